"""Adapters (LoRA) as requests name them.

in: names. out: the numbers that steps carry. never: weights, torch.
"""
