"""How a linear layer keeps its weights: one scheme a file. A layer asks its scheme for a matrix and only ever multiplies.

in: the parts of a layer and this rank's share of each. out: a `Matrix` that takes weights from a checkpoint and multiplies.
never: names of checkpoints, or what the layer is for.
"""
