"""Proposers: what drafts on the device, at the end of each step.

in: what the target has computed and drawn (`runner.proposing.Drafting`). out: drafts, one tensor for each place. never: how
many drafts are worth it, or which of them is right.
"""
