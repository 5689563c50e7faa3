"""Logits to token ids on the device: penalties, biases, masks, top-k/top-p/min-p draws, log-probabilities.

in: logits and the rows' sampling parameters by slot. out: token ids that stay on the device. never: Python per row on
the hot path, or a decision about when a request ends.
"""
