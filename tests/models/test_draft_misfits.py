"""What can't draft for a model is refused before any weight is loaded, with what, why and a way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import draft_files
import pytest
from tiny import make_tiny

from bough.config.server_args import build_config
from bough.core.errors import BoughError, ConfigError
from bough.engine.decide import Decided, decide
from bough.platform import detect


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("drafts")
    make_tiny("llama", root / "target")
    make_tiny("llama", root / "larger vocabulary", vocab_size=140)
    make_tiny("llama", root / "small", hidden_size=24, num_hidden_layers=1)
    draft_files.eagle3(root / "eagle3")
    draft_files.medusa(root / "medusa")
    draft_files.dflash(root / "dflash")
    for name, text in (("target", "a"), ("small", "b")):
        vocab = {f"{text}{at}": at for at in range(131)}
        (root / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    return root


def decided(folders: Path, algorithm: str, draft: str = "", **options: Any) -> Decided:
    config = build_config(
        model_path=str(folders / "target"), device="cpu", dtype="float32", speculative_algorithm=algorithm,
        **({"speculative_draft_model_path": str(folders / draft)} if draft else {}), **options,
    )  # fmt: skip
    return decide(config, detect("cpu"))


def edited(folders: Path, draft: str, into: Path, **changes: Any) -> str:
    """A copy of a draft with another config. Returns its path."""
    into.mkdir()
    for file in (folders / draft).iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**config, **changes}))
    return str(into)


CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "no draft": ("EAGLE3", "", {}, "without --speculative-draft-model-path"),
    "no such path": ("EAGLE3", "missing", {}, "there is no model at"),
    "nothing drafts": ("NGRAM", "eagle3", {}, "nothing would load it"),
    "steps of n-grams": ("NGRAM", "", {"speculative_num_steps": 3}, "nothing drafts step by step"),
    "another tokenizer": ("STANDALONE", "small", {}, "another tokenizer"),
    "larger vocabulary": ("STANDALONE", "larger vocabulary", {}, "a vocabulary of 140 tokens"),
    "heads of another kind": ("EAGLE3", "medusa", {}, "drafts by MEDUSA"),
    "a head of another kind": ("MEDUSA", "eagle3", {}, "drafts by EAGLE3"),
    "a later head": ("EAGLE", "eagle3", {}, "drafts by EAGLE3"),
    "a block of another kind": ("EAGLE3", "dflash", {}, "drafts by DFLASH"),
    "no layers that draft": ("NEXTN", "", {}, "LlamaForCausalLM has no layers that draft"),
    "too many heads": ("MEDUSA", "medusa", {"speculative_num_steps": 4}, "the checkpoint makes 3"),
    "too long a block": ("DFLASH", "dflash", {"speculative_num_draft_tokens": 5}, "the checkpoint makes 3"),
    "numbers that differ": (
        "EAGLE3", "eagle3", {"speculative_num_steps": 3, "speculative_num_draft_tokens": 6}, "contradict one another",
    ),
    "through transformers": ("EAGLE3", "eagle3", {"model_impl": "transformers"}, "runs through transformers"),
    "stages": ("EAGLE3", "eagle3", {"pp_size": 2}, "does not work with 2 stages"),
    "a pooling model": ("EAGLE3", "eagle3", {"is_embedding": True}, "--is-embedding can't both be had"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(case: str, folders: Path) -> None:
    algorithm, draft, options, said = CASES[case]
    with pytest.raises(BoughError) as raised:
        decided(folders, algorithm, draft, **options)
    error = raised.value
    assert said in f"{error.what}; {error.why}"
    assert error.fix


CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "eagle3": ("vocabulary", {"vocab_size": 99}, "a vocabulary of 99 tokens"),
    "eagle3 ": ("width", {"target_hidden_size": 64}, "states of width 64"),
    "eagle3  ": ("layers", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, "4 layers"),
    "medusa": ("width", {"hidden_size": 64}, "states of width 64"),
    "dflash": ("mask", {"dflash_config": {"mask_token_id": 500}}, "mask token 500"),
}


@pytest.mark.parametrize("draft", CONFIGS)
def test_a_draft_of_another_model_is_refused(draft: str, folders: Path, tmp_path: Path) -> None:
    name = draft.strip()
    _, changes, said = CONFIGS[draft]
    path = edited(folders, name, tmp_path / "edited", **changes)
    with pytest.raises(ConfigError) as raised:
        decided(folders, name.upper(), path)
    assert said in f"{raised.value.what}; {raised.value.why}"
    assert "--speculative-draft-model-path" in raised.value.fix


def test_the_plan_has_room_for_what_drafts(folders: Path) -> None:
    plain = decided(folders, "none").resolved.plan
    for algorithm, draft in (
        ("EAGLE3", "eagle3"),
        ("MEDUSA", "medusa"),
        ("DFLASH", "dflash"),
        ("STANDALONE", "target"),
    ):
        made = decided(folders, algorithm, draft)
        assert made.draft is not None
        assert made.resolved.plan.weight_bytes > plain.weight_bytes
        per_token = made.resolved.plan.kv_bytes / (made.resolved.plan.kv_tokens + made.resolved.plan.page_size)
        kept = per_token - plain.kv_bytes / (plain.kv_tokens + plain.page_size)
        assert kept == 4 * sum(sum(mixer.planes) for mixer in made.draft.facts.model.mixers)
    numbers = decided(folders, "DFLASH", "dflash").resolved.config.speculative
    assert (numbers.speculative_num_steps, numbers.speculative_num_draft_tokens) == (3, 4)
