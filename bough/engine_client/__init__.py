"""The engine's client, shared by all entrypoints: checks and tokenises requests, submits them, awaits their deltas,
aborts them; converts native JSON.

in: `Request`s. out: `DeltaStream`s of `Delta`s, replies to control calls. never: HTTP, torch, or starting processes.
"""

from bough.engine_client.client import EngineClient
from bough.engine_client.gate import EngineClientStats, WorkGate, WorkHold
from bough.engine_client.native import NativeAnswer, NativeBatch, native_batch
from bough.engine_client.pool_texts import PoolOptions
from bough.engine_client.pooling import Pooled, Pooler
from bough.engine_client.request import Request, Room
from bough.engine_client.sampling import ANY_JSON, Sampling, parse_sampling
from bough.engine_client.stream import DeltaStream

__all__ = [
    "ANY_JSON",
    "DeltaStream",
    "EngineClient",
    "EngineClientStats",
    "NativeAnswer",
    "NativeBatch",
    "PoolOptions",
    "Pooled",
    "Pooler",
    "Request",
    "Room",
    "Sampling",
    "WorkGate",
    "WorkHold",
    "native_batch",
    "parse_sampling",
]
