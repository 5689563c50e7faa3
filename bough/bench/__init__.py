"""Benchmarks: performance seen by clients of the public API, the host's work on a fake device, single kernels. in: a
server's address or nothing. out: numbers with their conditions. never: internals of the runtime, unless they are what
is measured.
"""
