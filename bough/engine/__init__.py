"""One rank: it receives messages, plans, launches and settles steps. The loop, and what controls it.

in: `ToEngine` messages, a `Runner`. out: `ToDetokenizer` messages. never: HTTP, text, or a request's parameters.
"""
