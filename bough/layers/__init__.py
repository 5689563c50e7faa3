"""The pieces models are made of: linear, embedding, norm, rotary, attention, mixture of experts, for one rank of a mesh.

in: a `Build` (mesh, weight scheme, dtype, device), activations and a `Batch`. out: activations. never: an
architecture, or how attention reads its pages (the batch brings that).
"""
