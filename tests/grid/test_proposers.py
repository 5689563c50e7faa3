"""Whatever drafts on the device, answers are those of an engine without drafts: greedy and sampled, under every feature that
meets them, in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import draft_files
import proposing
import pytest
import torch
from in_process import Answer, DraftsOnDevice, InProcess, Setup
from knowing import KnowingProposer
from pairwise import pairwise_cover
from tiny import make_tiny

from bough.config.hf import open_checkpoint
from bough.core.messages import LogprobSpec
from bough.core.sampling import GrammarSpec, SamplingParams
from bough.layers.batch import Model
from bough.models.load import build_model
from bough.speculative.proposers.tree import TreeShape
from tests.sim.harness import Grammars

AXES = {
    "method": [
        "STANDALONE", "EAGLE", "EAGLE3", "NEXTN", "MEDUSA", "DFLASH", "EAGLE tree", "EAGLE3 tree", "MEDUSA tree",
        "NEXTN tree",
    ],
    "asked": ["greedy", "sampled", "penalties", "logprobs", "stops", "grammar", "same prompt"],
    "company": ["batch", "cached", "retracted", "tiny pool"],
    "page_size": [16, 1, 64],
    "chunk_tokens": [512, 7],
    "overlap": [True, False],
    "attention": ["torch", "cpu"],
    "draft_kv_dtype": [None, torch.float8_e4m3fn],
}  # fmt: skip
COMMON = [(7 * i + 3) % 120 + 3 for i in range(37)]
PROMPTS = [[*COMMON, 5, 17, 99], [42], [*COMMON, 5, 88], [100, 90, 80, 70, 60, 50, 40]]
NUM_NEW = 18
TREE = TreeShape(3, 4)


@dataclass
class Target:
    folder: Path
    model: Model


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> dict[str, Target]:
    """Tiny models: one for heads of its own, one whose checkpoint brings one along."""
    made = {}
    for name in ("llama", "nextn"):
        folder = tmp_path_factory.mktemp(name)
        if name == "llama":
            make_tiny("llama", folder)
        else:
            draft_files.nextn(folder, make_tiny("Qwen2", folder), kind="mimo")
        model = build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cpu"))
        made[name] = Target(folder, model)
    files = {"EAGLE": draft_files.eagle, "EAGLE3": draft_files.eagle3, "MEDUSA": draft_files.medusa}
    for method, save in {**files, "DFLASH": draft_files.dflash}.items():
        save(made["llama"].folder / method)
    return made


@pytest.fixture(scope="module")
def drafts(targets: dict[str, Target]) -> dict[str, DraftsOnDevice]:
    found = {}
    for method in AXES["method"]:
        name, _, tree = str(method).partition(" ")
        target = targets["nextn" if name == "NEXTN" else "llama"]
        if name == "STANDALONE":
            found[name] = proposing.itself(target.folder, 131)
        else:
            folder = target.folder if name == "NEXTN" else target.folder / name
            shape = TREE if tree else None
            found[str(method)] = proposing.head(name, target.folder, folder, target.model, shape)  # type: ignore[arg-type]
    return found


def sampling_of(asked: str, number: int) -> SamplingParams:
    common: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NUM_NEW}
    more: dict[str, dict[str, Any]] = {
        "sampled": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 7 + number},
        "penalties": {
            "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "logit_bias": {9: 2.0},
            "bad_words": ((11, 12), (13,)), "temperature": 0.7, "seed": number, "min_new_tokens": 4,
        },
        "stops": {"stop_token_ids": tuple(range(3, 131, 11))},
        "grammar": {"grammar": GrammarSpec(kind="regex", source=f"{NUM_NEW - number},{number % 3},0")},
    }  # fmt: skip
    return SamplingParams(**{**common, **more.get(asked, {})})


def answers_of(engine: InProcess, asked: str, company: str) -> list[Answer]:
    prompts = [PROMPTS[0]] * 3 if asked == "same prompt" else PROMPTS
    spec = LogprobSpec(start=3, top=2) if asked == "logprobs" else None
    asks = [(prompt, sampling_of(asked, number), spec) for number, prompt in enumerate(prompts)]
    if company == "cached":
        engine.finish([engine.submit(*ask) for ask in asks[::-1]])
    ids = [engine.submit(*ask) for ask in asks]
    return engine.finish_with_a_retraction(ids) if company == "retracted" else engine.finish(ids)


def engine_of(target: Target, company: str, proposer: DraftsOnDevice | None, **options: Any) -> InProcess:
    if company == "tiny pool":
        tokens = len(COMMON) + 3 + NUM_NEW + 30
        options["num_pages"] = -(-tokens // int(options.get("page_size", 16))) + 3
    most = 8 if proposer is not None and proposer.tree_width else 3
    setup = Setup(drafts="none" if proposer is None else "device", most_drafts=most, **options)
    return InProcess(target.model, 131, setup, proposer=proposer, grammars=Grammars())


@pytest.fixture(scope="module")
def expected(targets: dict[str, Target]) -> dict[tuple[str, str], list[Answer]]:
    """By model and what is asked: the answers without drafts."""
    return {
        (name, asked): answers_of(engine_of(target, "batch", None), asked, "batch")
        for name, target in targets.items()
        for asked in map(str, AXES["asked"])
    }


COVER = pairwise_cover(AXES)
ACCEPTED: dict[str, int] = {}


@pytest.mark.parametrize("number", range(len(COVER)))
def test_drafts_change_nothing(number: int, targets: Any, drafts: Any, expected: Any) -> None:
    options = dict(COVER[number])
    method, asked, company = (str(options.pop(name)) for name in ("method", "asked", "company"))
    name = "nextn" if method.startswith("NEXTN") else "llama"
    wanted = expected[name, asked]
    prompts = [PROMPTS[0]] * 3 if asked == "same prompt" else PROMPTS
    known = [(prompt, answer.tokens) for prompt, answer in zip(prompts, wanted, strict=True)]
    proposer = drafts[method]
    proposer = proposer._replace(proposer=KnowingProposer(proposer.proposer, known))
    engine = engine_of(targets[name], company, proposer, **options)
    got = answers_of(engine, asked, company)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in wanted], COVER[number]
    assert [answer.end.reason for answer in got if answer.end] == [answer.end.reason for answer in wanted]
    if asked == "logprobs":
        for mine, theirs in zip(got, wanted, strict=True):
            values = [[v for part in each.output_logprobs for v in part.logprobs] for each in (mine, theirs)]
            assert torch.allclose(*map(torch.tensor, values), atol=1e-4)
    ACCEPTED[method] = ACCEPTED.get(method, 0) + engine.queues.counters.accepted_tokens


def test_every_method_had_drafts_that_were_right() -> None:
    assert all(ACCEPTED.get(str(method), 0) > 20 for method in AXES["method"]), ACCEPTED


def test_the_cover_has_every_pair() -> None:
    for a, b in combinations(AXES, 2):
        assert len({(row[a], row[b]) for row in COVER}) == len(AXES[a]) * len(AXES[b])
