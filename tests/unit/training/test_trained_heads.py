"""Heads that were trained, written and read back draft as they were judged: the served engine needs as many steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import proposing
import pytest
import torch
from in_process import InProcess, Setup
from tiny import make_tiny

from bough.config.draft_facts import DraftMethod, read_draft
from bough.config.hf import open_checkpoint
from bough.core.errors import ConfigError
from bough.core.sampling import SamplingParams
from bough.models.load import build_model
from bough.training.fit import HeadFit, Schedule, batches, frequent_tokens
from bough.training.heads import Eagle3Trainee, MedusaTrainee, Trainee
from bough.training.recording import StateRecording
from bough.training.samples import Sample
from bough.training.target import TrainingTarget
from bough.training.write import write_head
from tests.covers import long

CPU = torch.device("cpu")
COUNT = 3
SCHEDULE = Schedule(num_drafts=COUNT, epochs=25, minutes=5, learning_rate=3e-3, batch_tokens=400)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products are so small that threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("target")
    make_tiny("llama", made)
    return made


@pytest.fixture(scope="module")
def target(folder: Path) -> TrainingTarget:
    return TrainingTarget(open_checkpoint(str(folder)), CPU, 256)


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Sample]:
    """The model's greedy answers."""
    model = build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=CPU)
    engine = InProcess(model, 131, Setup())
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 131) for _ in range(draw.randrange(1, 20))] for _ in range(24)]
    params = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)
    answers = engine.finish([engine.submit(prompt, params) for prompt in prompts])
    return [Sample(prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]


def trainee_of(method: str, target: TrainingTarget, ids_V: torch.Tensor | None, own_head: bool = True) -> Trainee:
    torch.manual_seed(3)
    if method == "EAGLE3":
        return Eagle3Trainee(target, ids_V, own_head=own_head)
    return MedusaTrainee(target, ids_V, COUNT, 2, own_head=own_head)


@pytest.mark.parametrize(
    ("method", "vocab", "own_head"),
    [
        ("EAGLE3", 60, True),
        ("MEDUSA", 0, False),
        *(long("EAGLE3", *each) for each in ((0, False), (60, False))),
        *(long("MEDUSA", *each) for each in ((60, True), (60, False))),
    ],
)
def test_a_trained_head_drafts_as_it_was_judged(
    method: DraftMethod,
    vocab: int,
    own_head: bool,
    folder: Path,
    target: TrainingTarget,
    samples: list[Sample],
    tmp_path: Path,
) -> None:
    ids_V = frequent_tokens(samples, 131, vocab) if vocab else None
    trainee = trainee_of(method, target, ids_V, own_head)
    fit = HeadFit(target, trainee, SCHEDULE)
    before = fit.judge(samples)
    fit.run(samples, lambda _: None)
    with torch.no_grad():
        for weight in trainee.parameters():
            weight.copy_(weight.bfloat16())  # as it is written
    judged = fit.judge(samples)
    assert judged.accept_length > before.accept_length + 0.1
    assert list(judged.by_position) == sorted(judged.by_position, reverse=True)
    write_head(trainee, tmp_path / "head", {})
    model = build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=CPU)
    drafts = proposing.head(method, folder, tmp_path / "head", model)
    engine = InProcess(model, 131, Setup(drafts="device", most_drafts=COUNT), proposer=drafts)
    params = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)
    answers = engine.finish([engine.submit(sample.prompt, params) for sample in samples])
    assert [answer.tokens for answer in answers] == [sample.answer for sample in samples]
    steps = sum(answer.end.decode_steps for answer in answers if answer.end is not None)
    assert steps == judged.steps


def test_what_is_written_is_the_published_layout(folder: Path, target: TrainingTarget, tmp_path: Path) -> None:
    facts = target.facts
    for method in ("EAGLE3", "MEDUSA"):
        size = write_head(trainee_of(method, target, None), tmp_path / method, {"by": "hand"})
        written = open_checkpoint(str(tmp_path / method))
        read = read_draft(method, written, facts, None)
        assert not any("lm_head" in name for name in written.tensors)  # the model's own serves
        assert read.num_parameters() * 2 == pytest.approx(size, rel=0.02)
    assert "midlayer.self_attn.q_proj.weight" in open_checkpoint(str(tmp_path / "EAGLE3")).tensors
    assert "medusa_head.0.1.linear.bias" in open_checkpoint(str(tmp_path / "MEDUSA")).tensors


def test_batches_hold_every_sample_once_and_no_more_than_they_may() -> None:
    lengths = [1 + 7 * n % 90 for n in range(50)]
    made = batches(lengths, 200, random.Random(5))
    assert sorted(number for group in made for number in group) == list(range(50))
    assert all(len(group) * max(lengths[number] for number in group) <= 200 for group in made)


def test_the_vocabulary_is_what_answers_have_most_often() -> None:
    samples = [Sample([9, 9, 9, 4], [7, 7, 2, 7]), Sample([9], [2, 5])]
    assert frequent_tokens(samples, 12, 3).tolist() == [2, 5, 7]
    assert frequent_tokens(samples, 12, 6).tolist() == [0, 2, 4, 5, 7, 9]


def test_a_model_of_two_layers_gets_no_eagle3_head(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, num_hidden_layers=2)
    small = TrainingTarget(open_checkpoint(str(tmp_path)), CPU, 256)
    with pytest.raises(ConfigError, match="three layers"):
        Eagle3Trainee(small, None)


@pytest.mark.parametrize("case", ["gemma2", "qwen3_moe", "llama-tied-bias"])
def test_other_families_are_trained_for(case: str, tmp_path: Path) -> None:
    """Norms with an offset, soft caps and scaled embeddings; experts; a tied head: the loss falls."""
    make_tiny(case, tmp_path)
    other = TrainingTarget(open_checkpoint(str(tmp_path)), CPU, 256)
    given = [Sample([3, 5, number], [number % 7 + 3, 9, 11, 40, 5, 6]) for number in range(8)]
    trainee = trainee_of("EAGLE3", other, None)
    first = HeadFit(other, trainee, Schedule(num_drafts=2, epochs=1, minutes=1, learning_rate=1e-5, batch_tokens=99))
    more = HeadFit(other, trainee, Schedule(num_drafts=2, epochs=15, minutes=1, learning_rate=3e-3, batch_tokens=99))
    before = first.run(given, lambda _: None)
    assert more.run(given, lambda _: None) < before - 0.05


def test_states_that_are_kept_are_those_that_are_computed(target: TrainingTarget, samples: list[Sample]) -> None:
    """Whether or not there is memory for them, batches are the same; padding repeats a text's last token."""
    kept, computed = (StateRecording(target, samples, (2, 1), budget) for budget in (1 << 30, 0))
    assert kept.is_kept
    assert not computed.is_kept
    group = [5, 0, 9]
    a, b = kept.of(group), computed.of(group)
    assert torch.equal(a.ids_BT, b.ids_BT)
    for one, other in zip((*a.states, a.hidden_BTE), (*b.states, b.hidden_BTE), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for row, number in enumerate(group):
        ids = samples[number].ids
        assert a.ids_BT[row].tolist() == ids + [ids[-1]] * (a.ids_BT.shape[1] - len(ids))


def test_the_loss_is_the_mean_over_places_of_each_draft(target: TrainingTarget, samples: list[Sample]) -> None:
    """Beside the formula, text by text, and however many places are computed at a time."""
    trainee = trainee_of("MEDUSA", target, None)
    for weight in trainee.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    some = [*samples[:3], Sample([4, 5], [6, 7])]
    fit = HeadFit(target, trainee, SCHEDULE)
    sums, counts = [0.0] * COUNT, [0] * COUNT
    for sample in some:
        (hidden_TE,) = target.compute([sample.ids], ())
        seen = StateRecording(target, [sample], (), 0).of([0])
        for number, made in enumerate(trainee.drafts(seen, COUNT)):
            for at in range(len(sample.prompt) - 1, len(sample.ids) - 2 - number):
                wanted = target.head(hidden_TE[at + 1 + number]).softmax(-1)
                found = trainee.logits(made[0, at], number).log_softmax(-1)
                sums[number] -= float((wanted * found.detach()).sum())
                counts[number] += 1
    shares = [0.8**number for number in range(COUNT)]
    means = (share * total / count for share, total, count in zip(shares, sums, counts, strict=True))
    loss = fit.learn(StateRecording(target, some, (), 1 << 30), range(len(some)))
    assert loss is not None
    assert float(loss) == pytest.approx(sum(means) / sum(shares), rel=1e-4)
