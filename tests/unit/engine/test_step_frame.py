"""A step that is packed, sent and unpacked is the same step."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from bough.core.sampling import SamplingParams
from bough.core.step import KVMoves, SharedSpans, SlotSetup, Step, StepMedia, StepStates
from bough.engine.step_frame import ARRAYS, RunStep, StepRest
from bough.engine.worker import Masks, Stop
from bough.ipc.codec import Codec

CODEC: Codec[RunStep | Masks | Stop] = Codec(RunStep | Masks | Stop)


def sent(step: Step) -> Step:
    came = CODEC.decode(RunStep(step).to_frame())
    assert isinstance(came, RunStep)
    return came.step


def same(a: Any, b: Any) -> bool:
    """Equal, with arrays of the same type."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(same(getattr(a, name), getattr(b, name)) for name in a.__struct_fields__)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def made(lengths: dict[str, int], seed: int = 0, **rest: Any) -> Step:
    rng = np.random.default_rng(seed)
    arrays = {name: rng.integers(-5, 100, lengths[name]).astype(dtype) for name, dtype in ARRAYS.items()}
    return Step(index=seed, num_decodes=3, proposals=seed % 3 - 1, **arrays, **rest)


def test_every_field_of_a_step_travels() -> None:
    scalars = {"index", "num_decodes", "proposals"}
    assert {*ARRAYS, *scalars, *StepRest.__struct_fields__} == set(Step.__struct_fields__)


@given(st.fixed_dictionaries({name: st.integers(0, 40) for name in ARRAYS}), st.integers(0, 1000))
def test_arrays_of_any_lengths(lengths: dict[str, int], seed: int) -> None:
    step = made(lengths, seed)
    assert same(step, sent(step))


@pytest.mark.parametrize("present", ["setups", "moves", "shared", "media", "states"])
def test_what_few_steps_have(present: str) -> None:
    some = np.arange(3, dtype=np.int32)
    rest: dict[str, Any] = {
        "setups": [SlotSetup(slot=2, sampling=SamplingParams(temperature=0.5), prompt=some)],
        "moves": [KVMoves(source=some.astype(np.int64), target=some.astype(np.int64), turn=some)],
        "shared": SharedSpans(rows=some, start=some, first=some, last=some, level=some),
        "media": StepMedia(at=some, rows=some, axes=np.ones((3, 2), np.int32)),
        "states": StepStates(load_slots=some, load_from=some),
    }
    step = made(dict.fromkeys(ARRAYS, 5), **{present: rest[present]})
    assert same(step, sent(step))


def test_views_with_gaps_and_wrong_types() -> None:
    step = made(dict.fromkeys(ARRAYS, 8))
    step.tokens = np.arange(16, dtype=np.int32)[::2]
    assert same(step, sent(step))
    step.slots = np.arange(8)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="another size"):
        sent(step)


def test_what_replicas_have_agreed_on_travels_with_it() -> None:
    came = CODEC.decode(RunStep(made(dict.fromkeys(ARRAYS, 2)), 77, alike=True).to_frame())
    assert isinstance(came, RunStep)
    assert (came.rows, came.alike) == (77, True)
    assert isinstance(CODEC.decode(CODEC.encode(Stop())), Stop)


@pytest.mark.parametrize("rest", [{}, {"setups": [SlotSetup(slot=2, sampling=SamplingParams())]}])
def test_no_part_of_a_frame_is_taken_for_a_step(rest: dict[str, Any]) -> None:
    frame = RunStep(made(dict.fromkeys(ARRAYS, 3), **rest)).to_frame()
    whole = len(RunStep(made(dict.fromkeys(ARRAYS, 3))).to_frame())  # a step without the rest
    for length in range(1, len(frame)):
        if length != whole:
            with pytest.raises(ValueError, match=r"ends early|malformed"):
                CODEC.decode(frame[:length])
