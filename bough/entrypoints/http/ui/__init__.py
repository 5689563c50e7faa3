"""The playground: static files for a browser, and the one route that only they need.

in: a browser. out: a page that speaks the public API. never: a private API for generation, or anything from another
host.
"""
