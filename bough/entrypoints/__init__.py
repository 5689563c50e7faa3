"""Entrypoints for clients: JSON of every supported API becomes a validated request, deltas become SSE or one body.

in: bytes of clients. out: requests for `engine_client`, bytes. never: torch, the engine's sockets, model logic.
"""
