"""Turns token ids into text, finds stop strings and patterns, and runs the reasoning and tool-call parsers.

in: `Began`, `Tokens`, `Reply`. out: `Deltas` to API workers, `StopAt` to the engine. never: torch, scheduling, HTTP.
"""
