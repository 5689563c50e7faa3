"""Items of one prompt score what they score as prompts of their own, however the engine is set up."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import draft_files
import proposing
import pytest
import torch
from in_process import Answer, DraftsOnDevice, InProcess, Setup
from pairwise import pairwise_cover
from tiny import make_tiny

from bough.config.hf import open_checkpoint
from bough.core.messages import Generate, LogprobSpec, pack_ids
from bough.core.sampling import SamplingParams
from bough.layers.batch import Model
from bough.models.load import build_model
from bough.speculative.proposers.tree import TreeShape

AXES = {
    "page_size": [16, 1, 5],
    "chunk_tokens": [512, 7, 37],
    "overlap": [True, False],
    "radix_cache": [True, False],
    "attention": ["torch", "cpu"],
    "company": ["alone", "batch", "cached", "retracted"],
    "drafts": ["none", "chain", "tree"],
}
COVER = pairwise_cover(AXES)
QUERY = [(7 * i + 3) % 120 + 3 for i in range(37)]
ITEMS = [[5, 17, 99], [42], [9, 9, 9, 30, 31, 77, 12], [88], [100, 90, 80], [3]]
LABELS = (20, 21, 99)
NOTHING = SamplingParams(temperature=0.0, max_new_tokens=0, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def target(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Model, torch.Tensor, list[int], dict[str, DraftsOnDevice]]:
    """A tiny model, transformers' log-probabilities of the labels behind each item, its answer to the query, and drafts."""
    folder: Path = tmp_path_factory.mktemp("llama")
    reference = make_tiny("llama", folder)
    model = build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        rows = [reference(torch.tensor([[*QUERY, *item]])).logits[0, -1].log_softmax(-1) for item in ITEMS]
    answer = InProcess(model, 131, Setup()).generate([QUERY], GREEDY)[0]
    draft_files.eagle3(folder / "EAGLE3")
    drafts = {
        "chain": proposing.itself(folder, 131),
        "tree": proposing.head("EAGLE3", folder, folder / "EAGLE3", model, TreeShape(3, 4)),
    }
    return model, torch.stack(rows)[:, list(LABELS)], answer, drafts


def ask(engine: InProcess) -> int:
    prompt = [*QUERY, *(token for item in ITEMS for token in item)]
    spec = LogprobSpec(token_ids=LABELS, start=len(QUERY))
    return engine.submit(prompt, NOTHING, spec, items=tuple(map(len, ITEMS)))


def scores(answer: Answer) -> torch.Tensor:
    assert answer.prompt_logprobs is not None
    assert [[token for token, _ in row] for row in answer.prompt_logprobs.chosen] == [list(LABELS)] * len(ITEMS)
    return torch.tensor([[value for _, value in row] for row in answer.prompt_logprobs.chosen])


@pytest.mark.parametrize("number", range(len(COVER)))
def test_items_do_not_see_each_other(target: Any, number: int) -> None:
    model, expected, answer, drafts = target
    options = dict(COVER[number])
    company, method = options.pop("company"), str(options.pop("drafts"))
    proposer = drafts.get(method)
    most = 8 if method == "tree" else 3
    setup = Setup(drafts="device" if proposer else "none", most_drafts=most, **options)
    engine = InProcess(model, 131, setup, proposer=proposer)
    if company == "alone":
        torch.testing.assert_close(scores(engine.finish([ask(engine)])[0]), expected, atol=1e-4, rtol=1e-4)
        return
    if company == "cached":
        engine.finish([ask(engine), engine.submit(QUERY, GREEDY)])
    ids = [engine.submit(QUERY, GREEDY), ask(engine), engine.submit(QUERY, GREEDY), ask(engine)]
    found = engine.finish_with_a_retraction(ids) if company == "retracted" else engine.finish(ids)
    for each in found[1::2]:
        torch.testing.assert_close(scores(each), expected, atol=1e-4, rtol=1e-4)
    assert [each.tokens for each in found[::2]] == [answer, answer]


def test_items_begin_where_chunks_do(target: Any) -> None:
    """A chunk that ends with the query, and those that end with an item, score no more than the items' ends."""
    model, expected, _, _ = target
    for chunk in (1, 37, 38, 40, 41):
        engine = InProcess(model, 131, Setup(chunk_tokens=chunk, num_slots=1))
        torch.testing.assert_close(scores(engine.finish([ask(engine)])[0]), expected, atol=1e-4, rtol=1e-4)


def test_prompts_do_not_go_on_from_items(target: Any) -> None:
    """Their KV is that of other positions: a prompt with the same tokens must not find it in the tree."""
    model, _, _, _ = target
    prompt = [*QUERY, *(token for item in ITEMS for token in item), 50]
    plain = InProcess(model, 131, Setup(page_size=1)).generate([prompt], GREEDY)
    engine = InProcess(model, 131, Setup(page_size=1))
    engine.finish([ask(engine)])
    assert engine.generate([prompt], GREEDY) == plain
    (answer,) = engine.finish([ask(engine)])
    assert answer.end is not None
    assert answer.end.cached_tokens == len(QUERY) - 1


def test_what_does_not_fit_is_refused(target: Any) -> None:
    model, _, _, _ = target
    engine = InProcess(model, 131, Setup())
    rng = random.Random(0)
    good = {"items": (2, 3), "sampling": NOTHING, "logprobs": LogprobSpec(token_ids=LABELS, start=5)}
    for change in (
        {"items": (2, 0)},
        {"items": (5, 5)},
        {"items": (5, 6)},
        {"items": (2, 2)},
        {"logprobs": None},
        {"sampling": GREEDY},
        {},
    ):
        number = rng.randrange(1 << 30)
        asked = Generate(id=number, rid=str(number), prompt=pack_ids(QUERY[:10]), **{**good, **change})  # type: ignore[arg-type]
        found = refusal(engine, asked)
        assert (found is None) == (not change), change


def refusal(engine: InProcess, asked: Generate) -> str | None:
    """Why the engine does not take it; None: it does."""
    engine.mailbox.incoming.append(asked)
    (answer,) = engine.finish([asked.id])
    assert answer.end is not None
    return answer.end.message or None
