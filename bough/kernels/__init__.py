"""One folder an operation: `reference.py` in plain torch, faster implementations beside it, chosen once per device.

in: tensors. out: tensors. never: models, requests or configuration; nothing here waits for the device.
"""
