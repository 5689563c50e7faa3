"""The ways in and out for clients: JSON of any dialect becomes a valid request, deltas become SSE or one body.

in: bytes of clients. out: requests for `engine_client`, bytes. never: torch, the engine's sockets, model logic.
"""
