"""The batched reshaping of logits against a row-by-row model written from the definitions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from bough.core.messages import LogprobSpec
from bough.core.sampling import SamplingParams
from bough.core.step import SlotSetup, Step
from bough.sampler import shaping
from bough.sampler.scoring import join_scores, score
from bough.sampler.shaping import RichSamples, Shaper, apply_masks
from bough.sampler.state import SlotParams

VOCAB = 40
CPU = torch.device("cpu")


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def rich(setups: list[SlotSetup], *at: int, num_output: int = 0) -> RichSamples:
    """Samples of rows without drafts."""
    places, count = np.array(at, np.int64), max(at) + 1
    return RichSamples(places, setups, torch.full((count,), num_output), places, np.zeros(len(at), np.int64), None)


def shape_one(setup: SlotSetup, logits: torch.Tensor, num_output: int = 0) -> torch.Tensor:
    shaper = Shaper(VOCAB, CPU)
    shaper.assign(setup)
    return shaper.shape(logits, rich([setup], 0, num_output=num_output))


@pytest.mark.parametrize("at_once", [1 << 22, 2 * VOCAB, 1])
def test_penalties_match_their_definitions_row_by_row(monkeypatch, at_once):
    monkeypatch.setattr(shaping, "PENALISED_AT_ONCE", at_once)
    torch.manual_seed(1)
    logits = torch.randn(3, VOCAB)
    setups = [
        SlotSetup(slot=7, sampling=SamplingParams(repetition_penalty=1.7), prompt=ids(1, 2, 2), output=ids(5)),
        SlotSetup(slot=2, sampling=SamplingParams(frequency_penalty=0.5, presence_penalty=-0.25), output=ids(3, 3, 9)),
        SlotSetup(
            slot=4,
            sampling=SamplingParams(repetition_penalty=0.6, frequency_penalty=-1.0),
            prompt=ids(0),
            output=ids(0, 0),
        ),
    ]
    shaper = Shaper(VOCAB, CPU)
    for setup in setups:
        shaper.assign(setup)
    before = logits.clone()
    got = shaper.shape(logits, rich(setups, 0, 1, 2))
    assert torch.equal(logits, before), "scores look at the raw ones"
    for row, setup in enumerate(setups):
        params, output = setup.sampling, setup.output.tolist()
        seen = set(output) | set(setup.prompt.tolist() if setup.prompt is not None else [])
        for token in range(VOCAB):
            value = float(logits[row, token])
            if token in seen and params.repetition_penalty != 1.0:
                value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
            value -= params.frequency_penalty * output.count(token)
            value -= params.presence_penalty * (token in output)
            assert abs(float(got[row, token]) - value) < 1e-5, (row, token)


def test_penalties_follow_tokens_drawn_on_the_device():
    setup = SlotSetup(slot=0, sampling=SamplingParams(frequency_penalty=1.0))
    shaper = Shaper(VOCAB, CPU)
    shaper.assign(setup)
    for expected in (0.0, -1.0, -2.0):
        shaped = shaper.shape(torch.zeros(1, VOCAB), rich([setup], 0))
        assert float(shaped[0, 11]) == expected
        shaper.advance(rich([setup], 0), torch.tensor([11]))


def test_a_reused_slot_forgets_its_past():
    setup = SlotSetup(slot=3, sampling=SamplingParams(presence_penalty=1.0), output=ids(8))
    shaper = Shaper(VOCAB, CPU)
    shaper.assign(setup)
    fresh = SlotSetup(slot=3, sampling=SamplingParams(presence_penalty=1.0))
    shaper.assign(fresh)
    assert float(shaper.shape(torch.zeros(1, VOCAB), rich([fresh], 0))[0, 8]) == 0.0


def test_bias_adds_and_end_tokens_wait_for_the_minimum():
    params = SamplingParams(logit_bias={4: 2.5, 6: -100.0}, min_new_tokens=2, stop_token_ids=(9,))
    setup = SlotSetup(slot=0, sampling=params, eos_ids=(1,))
    early = shape_one(setup, torch.zeros(1, VOCAB), num_output=1)
    assert float(early[0, 4]) == 2.5
    assert float(early[0, 6]) == -100.0
    assert early[0, 1] == early[0, 9] == -torch.inf
    late = shape_one(setup, torch.zeros(1, VOCAB), num_output=2)
    assert float(late[0, 1]) == float(late[0, 9]) == 0.0


def test_only_allowed_tokens_stay():
    logits = torch.randn(1, VOCAB)
    got = shape_one(SlotSetup(slot=0, sampling=SamplingParams(allowed_token_ids=(3, 5))), logits)
    kept = [t for t in range(VOCAB) if got[0, t] > -torch.inf]
    assert kept == [3, 5]
    assert got[0, 3] == logits[0, 3]


def test_a_banned_word_is_blocked_only_where_it_would_complete():
    params = SamplingParams(bad_words=((2,), (10, 11, 12)))
    setup = SlotSetup(slot=0, sampling=params)
    shaper = Shaper(VOCAB, CPU)
    shaper.assign(setup)

    def banned() -> list[int]:
        shaped = shaper.shape(torch.zeros(1, VOCAB), rich([setup], 0))
        return [t for t in range(VOCAB) if shaped[0, t] == -torch.inf]

    assert banned() == [2]
    for token in (11, 10, 11):
        shaper.advance(rich([setup], 0), torch.tensor([token]))
    assert banned() == [2, 12]
    shaper.advance(rich([setup], 0), torch.tensor([13]))
    assert banned() == [2]


def test_banned_words_may_be_long_and_come_to_rows_that_have_spoken():
    short = SlotSetup(slot=0, sampling=SamplingParams(bad_words=((10, 11, 12),)))
    shaper = Shaper(VOCAB, CPU)
    shaper.assign(short)
    for token in (10, 11):
        shaper.advance(rich([short], 0), torch.tensor([token]))
    word = tuple(range(1, 14))
    long = SlotSetup(slot=1, sampling=SamplingParams(bad_words=(word,)), output=ids(*word[:4]))
    shaper.assign(long)
    both = [short, long]
    for at, token in enumerate(word[4:-1]):
        shaped = shaper.shape(torch.zeros(2, VOCAB), rich(both, 0, 1))
        assert (shaped[0, 12] == -torch.inf) == (at == 0)
        assert (shaped[1] > -torch.inf).all()
        shaper.advance(rich(both, 0, 1), torch.tensor([5, token]))
    shaped = shaper.shape(torch.zeros(2, VOCAB), rich(both, 0, 1))
    assert torch.nonzero(shaped == -torch.inf).tolist() == [[1, 13]]


def test_processors_see_their_rows_and_parameters():
    def push(logits, params):
        return logits + torch.tensor([[p["by"]] for p in params])

    shaper = Shaper(VOCAB, CPU, {"push": push})
    setups = [
        SlotSetup(slot=i, sampling=SamplingParams(logit_processor="push", custom_params={"by": float(i)}))
        for i in (1, 2)
    ]
    got = shaper.shape(torch.zeros(3, VOCAB), rich(setups, 0, 2))
    assert got[:, 0].tolist() == [1.0, 0.0, 2.0]


def test_masks_forbid_clear_bits_of_their_rows_only():
    masks = np.zeros((1, 2), np.int32)
    masks[0, 0] = 1 << 3
    masks[0, 1] = 1 << (35 - 32)
    got = apply_masks(torch.zeros(2, VOCAB), torch.tensor([1]), torch.from_numpy(masks))
    assert (got[0] == 0).all()
    assert [t for t in range(VOCAB) if got[1, t] == 0] == [3, 35]


def test_scores_are_log_softmax_with_tops_and_chosen_tokens():
    logits = torch.randn(4, VOCAB)
    tokens = torch.tensor([1, 2, 3, 4])
    specs = [LogprobSpec(top=2), LogprobSpec(token_ids=(7, 8)), LogprobSpec(), LogprobSpec(top=3)]
    whole = score(logits, tokens, ids(0, 0, 1, 1), specs).download().arrays()
    expected = torch.log_softmax(logits, -1)
    assert np.allclose(whole.logprobs, expected[range(4), tokens])
    assert whole.top_ids[3].tolist() == expected[3].topk(3).indices.tolist()
    assert np.allclose(whole.chosen_logprobs[1], expected[1, [7, 8]])
    pieces = join_scores(
        [
            score(logits[:2], tokens[:2], ids(0, 0), specs[:2]),
            score(logits[2:], tokens[2:], ids(1, 1), specs[2:]),
        ]
    ).arrays()
    assert np.allclose(pieces.logprobs, whole.logprobs)
    assert pieces.row.tolist() == whole.row.tolist()
    assert pieces.top_ids.shape == whole.top_ids.shape


def test_scores_hold_on_to_nothing_large():
    """A view of no columns would keep all log-probabilities alive until a long prompt is scored to its end."""
    scores = score(torch.randn(5, VOCAB), torch.arange(5), np.arange(5, dtype=np.int32), [LogprobSpec(start=0)] * 5)
    for part in (scores.logprobs, scores.top_ids, scores.top_logprobs, scores.chosen):
        assert part.untyped_storage().nbytes() <= 5 * 8


RICH = {
    "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3, "min_new_tokens": 6,
    "bad_words": ((7,), (3, 9), (3, 3, 5), (1, 2, 3, 4)), "logit_bias": {11: 2.0},
}  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_a_sample_behind_drafts_is_shaped_as_if_they_were_output(seed: int):
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(max_new_tokens=99, **RICH)
    outputs = [rng.integers(0, 12, count).astype(np.int32) for count in (0, 2, 5)]
    drafts = [rng.integers(0, 12, count) for count in (3, 0, 2)]
    setups = [
        SlotSetup(slot=slot, sampling=sampling, eos_ids=(20,), prompt=ids(4, 5), output=output, num_output=len(output))
        for slot, output in enumerate(outputs)
    ]
    shaper = Shaper(VOCAB, CPU)
    for setup in setups:
        shaper.assign(setup)
    params = SlotParams(3, VOCAB)
    for setup in setups:
        params.fill(setup)
    counts = np.array([len(each) for each in drafts], np.int32)
    step = Step(
        index=0, num_decodes=3, slots=ids(0, 1, 2), num_query=counts + 1, context=ids(9, 9, 9),
        samples=np.ones(3, np.bool_), tokens=np.zeros(8, np.int32), table_at=np.empty(0, np.int64),
        table_pages=ids(), drafts=counts,
    )  # fmt: skip
    samples = params.gather(step)
    inputs = torch.from_numpy(np.concatenate([np.array([0, *each]) for each in drafts]))
    before = np.repeat([len(each) for each in outputs], counts + 1)
    arrays = SimpleNamespace(
        ids_T=inputs,
        sample_at_L=torch.arange(8),
        counter_L=torch.from_numpy(before + samples.longs[2]),
    )
    logits = torch.randn(8, VOCAB)
    found = RichSamples.of(samples, [setups[i] for i in samples.owners()], arrays)
    got = shaper.shape(logits, found)
    at = 0
    for setup, output, path in zip(setups, outputs, drafts, strict=True):
        for place in range(len(path) + 1):
            said = np.concatenate([output, path[:place]]).astype(np.int32)
            alone = replace(setup, output=said, num_output=len(said))
            assert torch.allclose(got[at], shape_one(alone, logits[at : at + 1], len(said))[0], atol=1e-5), (at, place)
            at += 1
    taken = np.array([min(2, len(each) + 1) for each in drafts])
    drawn = torch.from_numpy(rng.integers(0, 12, (3, 4)))
    shaper.advance(found, torch.cat([torch.from_numpy(taken)[:, None], drawn], 1))
    after = shaper.shape(torch.zeros(3, VOCAB), rich(setups, 0, 1, 2, num_output=7))
    for row, (setup, output) in enumerate(zip(setups, outputs, strict=True)):
        said = np.concatenate([output, drawn[row, : taken[row]].numpy()]).astype(np.int32)
        assert torch.allclose(
            after[row], shape_one(replace(setup, output=said), torch.zeros(1, VOCAB), 7)[0], atol=1e-5
        )
