"""Anthropic's Messages API, translated to the chat route's request.

in: bodies of /v1/messages. out: messages and their events. never: a second way to render prompts or to sample.
"""
