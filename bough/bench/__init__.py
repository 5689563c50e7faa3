"""Measures: what clients see through the public API, the host's own work on a fake device, single kernels.

in: a server's address or nothing. out: numbers with their conditions. never: the runtime's insides, unless they are what is
measured.
"""
