"""One architecture a file, each reading like its paper; what they share lives in layers.

in: `ModelFacts` and a `Build`. out: modules that turn a `Batch` into hidden states and those into logits, weights loaded.
never: pages, requests or sampling; names of checkpoint files.
"""
