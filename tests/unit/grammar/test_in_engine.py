"""The engine under grammars against transformers, one token at a time: jumping ahead saves steps and changes nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import InProcess, Setup
from tiny import make_tiny
from transformers import PreTrainedModel

from bough.config.hf import open_checkpoint
from bough.core.messages import Generate, LogprobSpec, Pause, Resume, pack_ids
from bough.core.sampling import GrammarSpec, SamplingParams
from bough.grammar import Grammars, Settings
from bough.grammar.matcher import TokenMatcher
from bough.layers.batch import Model
from bough.models.load import build_model
from tests.unit.grammar.conftest import compiled, load

VOCAB = 49_152
PROMPT = [(131 * i + 17) % 40_000 + 100 for i in range(21)]
LIMIT = 48
RECORD = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"type": "integer", "minimum": 100, "maximum": 999},
        "is_newsletter_subscriber": {"type": "boolean"},
        "preferred_contact_channel": {"enum": ["telephone", "electronic mail", "letter"]},
    },
}
SPECS = {
    "record": GrammarSpec(kind="json_schema", source=json.dumps({**RECORD, "required": list(RECORD["properties"])})),
    "any json": GrammarSpec(kind="json", source=""),
    "pattern": GrammarSpec(
        kind="regex", source="The answer is (?:[^a-z]{1,6}|certainly unknown), and nothing else[.!]"
    ),
    "choice": GrammarSpec(kind="choice", source='["the first of them","the second","none"]'),
    "endings": GrammarSpec(kind="ebnf", source='root ::= ([aeio] [a-z] "ing" [ ,]){9}'),
    "grammar": GrammarSpec(kind="ebnf", source='root ::= "BEGIN " item{3} "END"\nitem ::= [^x-z\\n]{4} ";\\n"'),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Model]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    theirs = make_tiny("llama", folder, vocab_size=VOCAB)
    ours = build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cpu"))
    return theirs, ours


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(Settings(backend="xgrammar"), lambda: load()[1])
    yield made
    made.close()


@torch.inference_mode()
def by_the_book(model: PreTrainedModel, spec: GrammarSpec, prompt: list[int], *, respelled: bool = True) -> list[int]:
    """Mask, take the best, look whether it should be spelt differently: the whole sequence is computed for every token."""
    matcher = TokenMatcher(compiled("xgrammar", spec.kind, spec.source).matcher(), load()[1])
    while len(matcher.tokens) < LIMIT and not matcher.is_terminated():
        logits = model(torch.tensor([prompt + matcher.tokens])).logits[0, -1]
        mask = np.empty(VOCAB // 32, np.int32)
        matcher.fill_mask(mask)
        allowed = torch.from_numpy(np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool))
        token = int(logits.masked_fill(~allowed, -torch.inf).argmax())
        if token in load()[1].tokens.stop_ids:
            return [*matcher.tokens, token]
        assert matcher.accept(token)
        better = matcher.respell() if respelled and len(matcher.tokens) < LIMIT else None
        if better is not None and not matcher.is_terminated():
            matcher.rollback(1)
            assert matcher.accept(better)
    return matcher.tokens


@pytest.fixture(scope="module")
def expected(models: tuple[PreTrainedModel, Model]) -> dict[str, list[int]]:
    return {name: by_the_book(models[0], spec, PROMPT) for name, spec in SPECS.items()}


def engine(models: tuple[PreTrainedModel, Model], grammars: Grammars, setup: Setup) -> InProcess:
    made = InProcess(models[1], VOCAB, setup)
    made.queues.grammars = grammars
    return made


def submit(made: InProcess, spec: GrammarSpec, number: int = 0, **extra: object) -> int:
    """Requests of the same prompt differ in nothing; `number` only keeps their ids apart."""
    made._next_id += 1
    made.mailbox.incoming.append(
        Generate(
            id=made._next_id,
            rid=str(number),
            prompt=pack_ids(PROMPT),
            sampling=SamplingParams(temperature=0.0, max_new_tokens=LIMIT, grammar=spec),
            stream=made.stream,
            eos_ids=load()[1].tokens.stop_ids,
            **extra,  # type: ignore[arg-type]
        )
    )
    return made._next_id


def finish(made: InProcess, ids: list[int]) -> list[list[int]]:
    while any((answer := made.mailbox.answers.get(i)) is None or answer.end is None for i in ids):
        made.loop.turn()
        if made.queues.compiling:
            time.sleep(0.001)
    for i in ids:
        end = made.mailbox.answers[i].end
        assert end is not None
        assert end.reason in ("stop", "length"), end
    return [made.mailbox.answers[i].tokens for i in ids]


@pytest.mark.parametrize(
    "setup",
    [
        Setup(overlap=True),
        Setup(overlap=False),
        Setup(overlap=True, stream=False, page_size=1, radix_cache=False),
        Setup(overlap=False, stream=False, page_size=5, chunk_tokens=7),
        Setup(overlap=True, num_pages=30, page_size=5),
    ],
    ids=["overlap", "no overlap", "whole answers", "small chunks", "tiny pool"],
)
def test_same_answers_as_one_token_at_a_time(
    models: tuple[PreTrainedModel, Model], grammars: Grammars, expected: dict[str, list[int]], setup: Setup
) -> None:
    made = engine(models, grammars, setup)
    ids = [submit(made, spec) for spec in SPECS.values()]
    again = [submit(made, SPECS["record"]), submit(made, SPECS["choice"])]
    answers = finish(made, ids + again)
    assert dict(zip(SPECS, answers[: len(ids)], strict=True)) == expected
    assert answers[len(ids) :] == [expected["record"], expected["choice"]]
    assert finish(made, [submit(made, SPECS["record"])]) == [expected["record"]], "from the cache"
    assert made.queues.counters.forced_tokens > 20


def test_the_answers_are_worth_looking_at(
    models: tuple[PreTrainedModel, Model], expected: dict[str, list[int]]
) -> None:
    tokenizer = load()[0]
    texts = {name: tokenizer.decode(ids) for name, ids in expected.items()}
    assert set(json.loads(texts["record"])) == set(RECORD["properties"])
    assert texts["choice"] in json.loads(SPECS["choice"].source)
    assert texts["pattern"].startswith("The answer is ")
    respelled = [n for n, spec in SPECS.items() if by_the_book(models[0], spec, PROMPT, respelled=False) != expected[n]]
    assert respelled, "at least one answer should have been respelt"


@pytest.mark.parametrize("overlap", [True, False])
def test_without_jumping_ahead(models: tuple[PreTrainedModel, Model], grammars: Grammars, overlap: bool) -> None:
    made = engine(models, grammars, Setup(overlap=overlap))
    ids = [submit(made, spec, logprobs=LogprobSpec()) for spec in SPECS.values()]
    answers = finish(made, ids)
    assert answers == [by_the_book(models[0], spec, PROMPT, respelled=False) for spec in SPECS.values()]
    assert made.queues.counters.forced_tokens == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_retracted_in_the_middle(
    models: tuple[PreTrainedModel, Model], grammars: Grammars, expected: dict[str, list[int]], overlap: bool
) -> None:
    for at in range(2, 12, 3):
        made = engine(models, grammars, Setup(overlap=overlap))
        ids = [submit(made, SPECS["record"]), submit(made, SPECS["pattern"])]
        made.loop.turn()
        while made.queues.compiling:
            time.sleep(0.001)
            made.loop.turn()
        for _ in range(at):
            made.loop.turn()
        made.mailbox.incoming += [Pause(call=1, mode="retract")]
        made.loop.turn()
        made.loop.turn()
        made.mailbox.incoming += [Resume(call=2)]
        assert finish(made, ids) == [expected["record"], expected["pattern"]]


def test_fewer_steps(models: tuple[PreTrainedModel, Model], grammars: Grammars, expected: dict[str, list[int]]) -> None:
    made = engine(models, grammars, Setup(overlap=False))
    finish(made, [submit(made, SPECS["record"])])
    assert made.queues.counters.steps <= 0.7 * len(expected["record"])


@pytest.mark.parametrize("overlap", [True, False])
def test_the_grammar_starts_where_the_reasoning_ends(
    models: tuple[PreTrainedModel, Model], grammars: Grammars, overlap: bool
) -> None:
    """After six free tokens the marker is forced, and the grammar holds from there."""
    made = engine(models, grammars, Setup(overlap=overlap))
    marker = tuple(load()[0].encode("</think>", add_special_tokens=False))
    spec = GrammarSpec(kind="choice", source=SPECS["choice"].source, after_reasoning=True)
    (tokens,) = finish(made, [submit(made, spec, reasoning_end=marker, reasoning_open=True, thinking_budget=6)])
    text = load()[0].decode(tokens[6 + len(marker) :])
    assert tuple(tokens[6 : 6 + len(marker)]) == marker
    assert text in json.loads(spec.source)
    end = made.mailbox.answers[made._next_id].end
    assert end is not None
    assert end.reasoning_tokens == 6
