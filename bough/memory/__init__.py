"""The tensors behind the pages, and how arrays travel between host and device.

in: attention specs and page counts from the memory plan. out: KV tensors, page copies, asynchronous transfers. never:
which page belongs to whom (that is `cache`).
"""
