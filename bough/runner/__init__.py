"""Turns a Step into tensors, runs the model and the sampler, and hands back what the device will produce.

in: `core.step.Step`. out: `Launched`, whose `wait` gives numpy arrays. never: waits for the device in `launch`, decides
what runs, or loops over rows in Python.
"""
