"""Checkpoint formats -> parameters. Names are mapped by data; layers say what they take (slots) and cut their own share.

in: a `Checkpoint` and a model's slots. out: filled slots, or one error that lists everything that does not fit.
never: knowledge of an architecture beyond names; a whole checkpoint in memory.
"""
