"""Adapters that operators give (--lora-paths): answers and scores of transformers with the adapter merged into its weights,
beside rows with other adapters and without, in families that keep their matrices apart, fused, and fused by head."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from dense_attention import DenseAttention
from families import DENSE, EARLIER
from gguf_files import write_gguf
from in_process import InProcess, Setup
from narrowing_attention import NarrowingAttention
from quantised_files import quantise_checkpoint
from safetensors.torch import save_file
from tiny import make_tiny
from tiny_phi4mm import load_phi4
from transformers import PreTrainedModel

from bough.config.hf import open_checkpoint, pack_checkpoint, unpack_checkpoint
from bough.core.errors import ConfigError, WeightsError
from bough.core.messages import LogprobSpec
from bough.core.sampling import SamplingParams
from bough.layers.adapters import PassAdapters
from bough.layers.decoder import Decoder
from bough.models.load import build_model
from bough.models.registry import facts_of

NEW = 8
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
PROMPTS = [[5, 17, 99, 3, 64, 2, 120, 33], list(range(3, 40)), [42]]
LONG = pytest.mark.long
VOCAB = 131


@dataclass(frozen=True)
class Kind:
    """What an adapter is trained for."""

    ends: tuple[str, ...]
    """Of the names of matrices; empty: all of blocks."""
    rank: int
    alpha: float
    rslora: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


ADAPTERS = {"all": Kind((), 6, 9.0), "few": Kind(("q_proj", "qkv_proj", "query_key_value", "down_proj"), 3, 2.0, True)}
FAMILIES = [
    "llama-tied-bias",
    "gpt_neox",
    *(pytest.param(case, marks=LONG) for case in ("phi3", "qwen3", "olmo2", "bloom", "starcoder2", "qwen2")),
]


@dataclass(frozen=True)
class Adapted:
    folder: Path
    paths: tuple[str, ...]
    references: dict[str, PreTrainedModel]
    model: Decoder

    def says(self, adapter: str, prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([list(prompt)])
        with torch.no_grad():
            out = self.references[adapter].generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return out[0, ids.shape[1] :].tolist()


def write_adapter(
    reference: PreTrainedModel, kind: Kind, folder: Path, seed: int
) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """As PEFT writes it. Returns the model with it merged, and its tensors."""
    torch.manual_seed(seed)
    merged, tensors = deepcopy(reference), {}
    for name, module in merged.named_modules():
        inside = any(part.isdigit() for part in name.split("."))
        if not isinstance(module, torch.nn.Linear) or not inside or not name.endswith(kind.ends or name):
            continue
        out, inner = module.weight.shape
        a, b = torch.randn(kind.rank, inner) * inner**-0.5, torch.randn(out, kind.rank) * 0.4
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        with torch.no_grad():
            module.weight += b @ a * kind.scale
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA", "r": kind.rank, "lora_alpha": kind.alpha, "use_rslora": kind.rslora, "bias": "none",
        "target_modules": list(kind.ends) or "all-linear", "use_dora": False, "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return merged, tensors


@cache
def adapted(case: str) -> Adapted:
    folder = Path(mkdtemp(prefix="bough-tiny-"))
    prefix, extra = {**DENSE, **EARLIER}.get(case, (case, {}))
    reference = make_tiny(prefix, folder / "model", **extra)
    references = {"": reference}
    for seed, (name, kind) in enumerate(ADAPTERS.items()):
        references[name], _ = write_adapter(reference, kind, folder / name, seed)
    paths = tuple(f"{name}={folder / name}" for name in ADAPTERS)
    checkpoint = open_checkpoint(str(folder / "model"), lora_paths=paths)
    model = build_model(unpack_checkpoint(pack_checkpoint(checkpoint)), dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(model, Decoder)
    facts = facts_of(checkpoint.config)
    assert facts.num_parameters() == sum(each.numel() for each in model.parameters())
    return Adapted(folder, paths, references, model)


@pytest.mark.parametrize("case", FAMILIES)
def test_rows_have_the_answers_of_their_adapters(case: str) -> None:
    made = adapted(case)
    engine = InProcess(made.model, VOCAB, Setup(chunk_tokens=13, page_size=4, num_slots=12))
    asked = [(number, name, prompt) for prompt in PROMPTS for number, name in enumerate(made.references)]
    wanted = [made.says(name, prompt) for _, name, prompt in asked]
    assert len({tuple(each) for each in wanted[:3]}) > 1, "adapters count"
    for _ in range(2):
        ids = [engine.submit(prompt, GREEDY, adapter=number) for number, _, prompt in asked]
        found = engine.finish(ids)
        assert [answer.tokens for answer in found] == wanted
    assert all(answer.end is not None and answer.end.cached_tokens > 0 for answer in found[3:6])


@pytest.mark.parametrize(("attention", "drafts"), [("torch", "ngram"), ("cpu", "known")])
def test_retracted_rows_and_verified_drafts_keep_their_adapters(attention: str, drafts: str) -> None:
    made = adapted("llama-tied-bias")
    asked = [(number, name, prompt) for prompt in PROMPTS[:2] for number, name in enumerate(made.references)]
    wanted = [made.says(name, prompt) for _, name, prompt in asked]
    setup = Setup(attention=attention, drafts=drafts, page_size=4)
    engine = InProcess(
        made.model, VOCAB, setup, {tuple(prompt): answer for (_, _, prompt), answer in zip(asked, wanted, strict=True)}
    )
    ids = [engine.submit(prompt, GREEDY, adapter=number) for number, _, prompt in asked]
    assert [answer.tokens for answer in engine.finish_with_a_retraction(ids)] == wanted


def test_scores_of_prompts_are_those_of_their_adapters() -> None:
    made = adapted("llama-tied-bias")
    engine = InProcess(made.model, VOCAB, Setup())
    ids = [engine.submit(PROMPTS[1], GREEDY, LogprobSpec(start=1), adapter=number) for number in range(3)]
    for name, found in zip(made.references, engine.finish(ids), strict=True):
        with torch.no_grad():
            logits = made.references[name](torch.tensor([PROMPTS[1]])).logits[0].log_softmax(-1)
        wanted = logits[:-1].gather(1, torch.tensor(PROMPTS[1][1:])[:, None])[:, 0].tolist()
        assert found.prompt_logprobs is not None
        assert [each for each in found.prompt_logprobs.logprobs if each is not None] == pytest.approx(wanted, abs=1e-4)


def test_steps_without_adapters_do_what_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    made = adapted("llama-tied-bias")
    engine = InProcess(made.model, VOCAB, Setup())

    def never(*_: Any) -> None:
        raise AssertionError("a step without adapters has launched something for them")

    monkeypatch.setattr("bough.layers.adapters.add_lora", never)
    assert engine.generate([PROMPTS[0]], GREEDY) == [made.says("", PROMPTS[0])]


def loaded(paths: Sequence[str]) -> None:
    checkpoint = open_checkpoint(str(adapted("llama-tied-bias").folder / "model"), lora_paths=paths)
    build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"))


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda given: {**given, "base_model.model.lm_head.weight": torch.zeros(3, 3)}, "lm_head.weight"),
        (lambda given: {**given, "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(3, 3)}, "embedding_A"),
        (lambda given: {name: each for name, each in given.items() if name != FIRST}, "layers.0.self_attn.q_proj.lora_B"),
        (lambda given: {name.replace("q_proj", "w_proj"): each for name, each in given.items()}, "w_proj.lora_A"),
        (lambda given: {**given, FIRST: torch.zeros(4, 48)}, "is [4, 48], expected [3, 48]"),
        (
            lambda given: {
                **given, "base_model.model.lm_head.lora_A.weight": torch.zeros(3, 48),
                "base_model.model.lm_head.lora_B.weight": torch.zeros(VOCAB, 3),
            },
            "lm_head.lora_A",
        ),
        (lambda given: {}, "empty"),
    ],
)  # fmt: skip
def test_every_tensor_is_used_or_the_adapter_is_refused(tmp_path: Path, change: Any, shown: str) -> None:
    _, tensors = write_adapter(adapted("llama-tied-bias").references[""], ADAPTERS["few"], tmp_path / "odd", 5)
    save_file(change(tensors), tmp_path / "odd" / "adapter_model.safetensors")
    with pytest.raises((ConfigError, WeightsError)) as raised:
        loaded([str(tmp_path / "odd")])
    assert shown in f"{raised.value.what} {raised.value.why}"


@pytest.mark.parametrize(
    ("paths", "options", "what"),
    [
        (["one=/nowhere"], {}, "there is no directory"),
        (["a b=."], {}, "names no adapter"),
        (["x={all}", "x={few}"], {}, "two adapters 'x'"),
        (["x={all}", "y={few}"], {"max_loras": 1}, "2 adapters are given"),
        (["x={all}"], {"max_lora_rank": 5}, "has rank 6"),
    ],
)
def test_paths_that_make_no_sense_are_refused(paths: list[str], options: dict[str, Any], what: str) -> None:
    made = adapted("llama-tied-bias")
    given = [path.format(**{name: made.folder / name for name in ADAPTERS}) for path in paths]
    with pytest.raises(ConfigError, match=what):
        open_checkpoint(str(made.folder / "model"), lora_paths=given, **options)


def test_models_that_can_not_have_adapters_say_so(tmp_path: Path) -> None:
    made = adapted("llama-tied-bias")
    make_tiny("Mamba2", tmp_path / "mamba", num_heads=4, head_dim=24, state_size=8, n_groups=2, expand=2)
    checkpoint = open_checkpoint(str(tmp_path / "mamba"), lora_paths=made.paths)
    with pytest.raises(ConfigError, match="--lora-paths can't be had with Mamba2ForCausalLM"):
        facts_of(checkpoint.config)


def scores_beside(base: Path, made: Path, merged: PreTrainedModel) -> tuple[list[float], list[float]]:
    """Scores of a prompt by our model of `base` with the adapter of `made`, and by theirs."""
    checkpoint = open_checkpoint(str(base), lora_paths=[f"one={made}"])
    model = build_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    engine = InProcess(model, VOCAB, Setup())
    (found,) = engine.finish([engine.submit(PROMPTS[1], GREEDY, LogprobSpec(start=1), adapter=1)])
    with torch.no_grad():
        logits = merged(torch.tensor([PROMPTS[1]])).logits[0].log_softmax(-1)
    wanted: list[float] = logits[:-1].gather(1, torch.tensor(PROMPTS[1][1:])[:, None])[:, 0].tolist()
    assert found.prompt_logprobs is not None
    return [each for each in found.prompt_logprobs.logprobs if each is not None], wanted


@pytest.mark.parametrize("form", ["fp8-block", pytest.param("bnb-nf4", marks=LONG)])
def test_adapters_beside_quantised_weights(form: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192}
    reference = make_tiny("llama", tmp_path / "model", **sizes)
    reference.load_state_dict(quantise_checkpoint(tmp_path / "model", form), strict=False)
    merged, _ = write_adapter(reference, ADAPTERS["all"], tmp_path / "one", 1)
    found, wanted = scores_beside(tmp_path / "model", tmp_path / "one", merged)
    assert found == pytest.approx(wanted, abs=1e-3)


def test_adapters_beside_gguf(tmp_path: Path) -> None:
    reference = make_tiny("llama", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    write_gguf(tmp_path / "model", config, tmp_path / "tiny.gguf")
    merged, _ = write_adapter(reference, ADAPTERS["all"], tmp_path / "one", 1)
    found, wanted = scores_beside(tmp_path / "tiny.gguf", tmp_path / "one", merged)
    assert found == pytest.approx(wanted, abs=1e-4)


def test_attention_of_models_with_experts_may_have_adapters(tmp_path: Path) -> None:
    reference = make_tiny("qwen3_moe", tmp_path / "model")
    kind = Kind(("q_proj", "k_proj", "v_proj", "o_proj"), 4, 8.0)
    merged, _ = write_adapter(reference, kind, tmp_path / "one", 1)
    found, wanted = scores_beside(tmp_path / "model", tmp_path / "one", merged)
    assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("case", ["llama-tied-bias", "phi4mm"])
def test_adapters_in_a_last_layer_of_the_tokens_that_are_read(case: str) -> None:
    """As on GPUs: the last layer computes keys and values of all tokens, and queries of few."""
    model = load_phi4().model if case == "phi4mm" else adapted(case).model
    queries = [(0, PROMPTS[1]), (1, PROMPTS[0])]
    of_T = torch.tensor([1] * len(PROMPTS[1]) + [2] * len(PROMPTS[0]), dtype=torch.int32)
    plain, narrowing = DenseAttention(2), NarrowingAttention(2, len(model.layers))
    found = []
    for attention in (plain, narrowing):
        batch = attention.step(queries)
        batch.adapters = PassAdapters(of_T, batch.logits_at)
        with torch.no_grad():
            found.append(model.forward(batch))
    assert narrowing.narrowed
    assert (found[0] - found[1]).abs().max() < 1e-4
    batch = plain.step(queries)
    with torch.no_grad():
        assert (model.forward(batch) - found[0]).abs().max() > 0.01, "adapters count"
