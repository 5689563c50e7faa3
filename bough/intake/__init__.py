"""What every entrance shares: check and tokenise a request, submit it, await its news, abort it; native JSON both ways.

in: `Request`s. out: `Stream`s of `Delta`s, replies to control calls. never: HTTP, torch, or starting processes.
"""

from bough.intake.gate import Gate, IntakeStats, Place
from bough.intake.intake import Intake
from bough.intake.native import NativeAnswer, NativeBatch, native_batch
from bough.intake.pool_texts import PoolOptions
from bough.intake.pooling import Pooled, Pooler
from bough.intake.request import Request, Room
from bough.intake.sampling import ANY_JSON, Sampling, parse_sampling
from bough.intake.stream import Stream

__all__ = [
    "ANY_JSON",
    "Gate",
    "Intake",
    "IntakeStats",
    "NativeAnswer",
    "NativeBatch",
    "Place",
    "PoolOptions",
    "Pooled",
    "Pooler",
    "Request",
    "Room",
    "Sampling",
    "Stream",
    "native_batch",
    "parse_sampling",
]
