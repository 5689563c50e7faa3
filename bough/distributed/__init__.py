"""Which ranks share a model, and how they talk: torch.distributed (NCCL on CUDA, gloo on the CPU) behind one small object.

in: rank, size, an address. out: a `Mesh` and the collectives that take it. never: a global mesh; one rank
alone pays nothing.
"""
