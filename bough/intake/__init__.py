"""What every entrance shares: check and tokenise a request, submit it, await its news, abort it; native JSON both ways.

in: `Request`s. out: `DeltaStream`s of `Delta`s, replies to control calls. never: HTTP, torch, or starting processes.
"""

from bough.intake.gate import IntakeStats, WorkGate, WorkHold
from bough.intake.intake import Intake
from bough.intake.native import NativeAnswer, NativeBatch, native_batch
from bough.intake.pool_texts import PoolOptions
from bough.intake.pooling import Pooled, Pooler
from bough.intake.request import Request, Room
from bough.intake.sampling import ANY_JSON, Sampling, parse_sampling
from bough.intake.stream import DeltaStream

__all__ = [
    "ANY_JSON",
    "DeltaStream",
    "Intake",
    "IntakeStats",
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
