"""The HTTP server: OpenAI's and the native routes, health, and one place each for bodies, errors and keys.

in: HTTP requests. out: HTTP responses. never: tokenising, or an error whose text was not written for clients.
"""
