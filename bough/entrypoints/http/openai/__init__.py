"""OpenAI's API: chat completions, completions and models.

in: request bodies as OpenAI (and SGLang's extensions) spell them. out: their response bodies and chunks. never: sockets.
"""
