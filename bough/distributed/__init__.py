"""Which ranks share a model, and how they talk.

in: a `Layout` of ranks, an address where they meet. out: a `Mesh` of named axes, each with its `Collectives`, which are
torch.distributed's or those of threads. never: a global mesh; a rank that is alone on an axis pays nothing for it.
"""
