"""Traffic for simulations: made up, or read from a file of recorded lengths."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bough.core.errors import ConfigError
from bough.core.messages import Ids

TOKEN_IDS = 32_000
"""Simulated prompts are of ids below this, whatever the model's vocabulary."""
_BLOCK = 512
"""Tokens of a block in Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, when it comes, and how much it will generate."""

    at_s: float
    prompt: Ids
    new_tokens: int


def made_up(
    count: int,
    *,
    rate: float,
    prompt_tokens: int,
    new_tokens: int,
    shared_tokens: int = 0,
    groups: int = 8,
    spread: float = 0.5,
    seed: int = 0,
) -> list[Arrival]:
    """`count` requests with log-normal lengths around the two given, at random times, `rate` of them per second (infinite:
    all at once). Of each prompt `shared_tokens` are those of one of `groups` prefixes."""
    draw = random.Random(seed)
    prefixes = [_ids(draw.getrandbits(32), shared_tokens) for _ in range(groups)]
    made, now = [], 0.0
    for number in range(count):
        if math.isfinite(rate):
            now += draw.expovariate(rate)
        length = max(1, round(draw.lognormvariate(math.log(prompt_tokens), spread)) - shared_tokens)
        own = _ids(number + (1 << 33), length)
        wanted = max(1, round(draw.lognormvariate(math.log(new_tokens), spread)))
        made.append(Arrival(now, np.concatenate((prefixes[number % groups], own)), wanted))
    return made


def read_trace(path: Path, most: int = 0) -> list[Arrival]:
    """Requests by line, as JSON: `at_s`, `prompt_tokens`, `output_tokens`, and optionally `prefix` with `prefix_tokens`; or
    as in Mooncake's traces: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`. `most`: lines that are read; 0:
    all. Raises ConfigError."""
    made: list[Arrival] = []
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                if most and len(made) == most:
                    break
                if line.strip():
                    made.append(_arrival(json.loads(line), number))
    except OSError as error:
        raise ConfigError(what=f"can't read {path}", why=str(error), fix="check the path") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            what=f"line {number} of {path} is no request",
            why=f"{type(error).__name__}: {error}",
            fix='write lines like {"at_s": 0.5, "prompt_tokens": 900, "output_tokens": 120}',
        ) from error
    if not made:
        raise ConfigError(what=f"{path} has no requests", fix="write one as JSON on each line")
    return sorted(made, key=lambda each: each.at_s)


def _arrival(fields: dict[str, Any], number: int) -> Arrival:
    if "hash_ids" in fields:
        length = int(fields["input_length"])
        blocks = [_ids(int(each), _BLOCK) for each in fields["hash_ids"]]
        prompt = np.concatenate(blocks)[:length] if blocks else _ids(number, length)
        return Arrival(float(fields["timestamp"]) / 1e3, prompt, max(1, int(fields["output_length"])))
    length, shared = int(fields["prompt_tokens"]), int(fields.get("prefix_tokens", 0))
    if not 0 <= shared <= length or length < 1:
        raise ValueError(f"{shared} of {length} prompt tokens can't be shared")
    prefix = _ids(hash(str(fields.get("prefix", ""))) & 0xFFFFFFFF, shared)
    own = _ids(number + (1 << 33), length - shared)
    return Arrival(float(fields["at_s"]), np.concatenate((prefix, own)), max(1, int(fields["output_tokens"])))


def _ids(seed: int, count: int) -> Ids:
    return np.random.default_rng(seed).integers(0, TOKEN_IDS, count, np.int32)
