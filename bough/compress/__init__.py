"""Writes quantised checkpoints, and says what that costs: the layer-by-layer methods that need a model's activations.

in: a checkpoint in floats, text. out: a compressed-tensors checkpoint; its perplexity and KL divergence. never: a request.
"""
