import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from bough.core.messages import Abort, Generate, RowOutput, ToDetokenizer, ToEngine, TokenLogprobs, Tokens, pack_ids
from bough.core.sampling import SamplingParams
from bough.core.step import LogprobArrays, Outcome, SlotSetup, Step
from bough.ipc import Codec


class Box(msgspec.Struct):
    array: np.ndarray


@given(
    hnp.arrays(
        dtype=st.sampled_from([np.int32, np.int64, np.float32, np.bool_, np.uint8]),
        shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    )
)
def test_arrays_survive(array: np.ndarray) -> None:
    codec: Codec[Box] = Codec(Box)
    back = codec.decode(codec.encode(Box(array))).array
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


def test_a_transposed_array_arrives_in_its_own_order() -> None:
    codec: Codec[Box] = Codec(Box)
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T
    assert codec.decode(codec.encode(Box(array))).array.tolist() == array.tolist()


def test_a_step_and_its_outcome_survive() -> None:
    rows = np.arange(4, dtype=np.int32)
    step = Step(
        index=9,
        num_decodes=3,
        slots=rows,
        num_query=rows,
        context=rows,
        samples=np.array([True, False, True, True]),
        tokens=np.array([-1, -1, -1, 5], np.int32),
        table_at=np.arange(4, dtype=np.int64),
        table_pages=rows,
        setups=[SlotSetup(slot=1, sampling=SamplingParams(seed=4, logit_bias={3: 1.5}), prompt=rows, eos_ids=(2,))],
    )
    codec: Codec[Step] = Codec(Step)
    back = codec.decode(codec.encode(step))
    assert back.samples.tolist() == [True, False, True, True]
    assert back.setups[0].sampling == step.setups[0].sampling
    assert back.setups[0].prompt is not None
    assert back.setups[0].prompt.tolist() == [0, 1, 2, 3]
    assert back.shared is None
    floats = np.ones((4, 2), np.float32)
    scores = LogprobArrays(
        row=rows,
        token_ids=rows,
        logprobs=floats[:, 0],
        top_ids=rows[:, None],
        top_logprobs=floats,
        chosen_logprobs=floats,
    )
    outcome = Outcome(
        tokens=rows[:, None], counts=rows, output_logprobs=scores, embeddings={2: floats}, failed={1: "nan"}
    )
    outcomes: Codec[Outcome] = Codec(Outcome)
    again = outcomes.decode(outcomes.encode(outcome))
    assert again.tokens.shape == (4, 1)
    assert again.embeddings[2].tolist() == floats.tolist()
    assert again.output_logprobs is not None
    assert again.output_logprobs.top_logprobs.shape == (4, 2)


def test_messages_of_both_unions_survive() -> None:
    generate = Generate(id=1 << 40, rid="a", prompt=pack_ids([1, 2]), sampling=SamplingParams(stop=("x",)))
    into: Codec[ToEngine] = Codec(ToEngine)
    for message in (generate, Abort(3)):
        assert into.decode(into.encode(message)) == message
    out: Codec[ToDetokenizer] = Codec(ToDetokenizer)
    logprobs = TokenLogprobs([1], [None], top=[[(1, -0.5)]])
    tokens = Tokens(ids=[1], counts=[1], tokens=pack_ids([7]), rows={0: RowOutput(logprobs=logprobs)})
    assert out.decode(out.encode(tokens)) == tokens


@given(st.binary(max_size=64))
def test_garbage_is_a_value_error(frame: bytes) -> None:
    codec: Codec[ToEngine] = Codec(ToEngine)
    with pytest.raises(ValueError, match="malformed"):
        codec.decode(frame)


@pytest.mark.parametrize("kind", ["O", "V8", "<U3", "M8[s]", "nonsense"])
def test_object_arrays_are_refused(kind: str) -> None:
    frame = msgspec.msgpack.encode({"array": [kind, [1], b"\0" * 12]})
    with pytest.raises(ValueError, match="malformed"):
        Codec(Box).decode(frame)


def test_a_shape_that_lies_is_refused() -> None:
    frame = msgspec.msgpack.encode({"array": ["<i4", [1 << 40], b"\0" * 4]})
    with pytest.raises(ValueError, match="malformed"):
        Codec(Box).decode(frame)


def test_what_is_no_array_can_not_be_sent() -> None:
    with pytest.raises(NotImplementedError, match="object"):
        Codec(Box).encode(Box(np.array([object()])))
    with pytest.raises(NotImplementedError, match="complex"):
        Codec(Box).encode(Box(complex(1)))  # type: ignore[arg-type]
