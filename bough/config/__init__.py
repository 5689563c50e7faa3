"""The settings (one frozen dataclass per concern), what a checkpoint says, and how "auto" is decided.

in: flags, environment, YAML, config.json, safetensors and GGUF headers. out: frozen configs and `Decision`s with reasons.
never: torch, weights in memory, or side effects beyond reading files and downloading a checkpoint.
"""
