"""Ollama's API, by way of the chat route's request.

in: bodies of /api/... out: JSON objects, one or one a line. never: pulling, making or deleting models.
"""
