"""What runs a program's generations: a bough or SGLang server, an in-process engine, or a remote API.

in: a prompt and sampling parameters; out: text with meta information, streamed or whole; never: program control flow.
"""
