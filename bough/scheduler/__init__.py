"""The scheduler: queues of requests by phase, and the plan of each step within the device's memory and token budget.

in: `Generate`, `Abort`, `StopAt`; a cache view; outcomes of steps. out: `Step`s of plain arrays, `Tokens`, ends.
never: torch, the device, processes or sockets.
"""
