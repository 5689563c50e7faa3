"""Speculative decoding: where drafts come from, how many are worth verifying, and how much of them was right.

in: what rows have said, hidden states of the target model, what steps cost. out: drafts for `scheduler` and `runner`. never:
which draft is right (the step decides that), or a plan of its own.
"""
