"""Measures: the host's own work on a fake device, and what clients see through the public API.

in: a server's address or nothing. out: numbers with their conditions. never: the runtime's insides, but for `host.py`.
"""
