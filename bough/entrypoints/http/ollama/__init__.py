"""Ollama's API, translated to the chat route's request.

in: bodies of /api/... out: JSON objects, one or one a line. never: pulling, creating or deleting models.
"""
