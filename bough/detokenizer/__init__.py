"""The way out: token ids to text, stop strings and patterns, and the parsers that say what the text means.

in: `Began`, `Tokens`, `Reply`. out: `Deltas` to API workers, `StopAt` to the engine. never: torch, scheduling, HTTP.
"""
