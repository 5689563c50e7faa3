"""The ways in and out for clients: JSON of any dialect becomes a valid request, deltas become SSE or one body.

in: bytes from clients. out: requests for `intake`, bytes for clients. never: torch, the engine's sockets, or model logic.
"""
