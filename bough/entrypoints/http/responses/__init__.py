"""OpenAI's Responses API, by way of the chat route's request.

in: bodies of /v1/responses. out: responses and their events, kept for a while. never: tools of its own.
"""
