"""OpenAI's Responses API, translated to the chat route's request.

in: bodies of /v1/responses. out: responses and their events, kept for a while. never: tools that the server runs.
"""
