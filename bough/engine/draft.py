"""What drafts on the device, found and compared with its target before any weight is loaded. Needs no torch."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bough.config.concerns import AUTO, Config
from bough.config.draft_facts import DraftFacts, DraftMethod, Eagle3, Medusa, misfit, read_draft
from bough.config.hf import Checkpoint, open_checkpoint
from bough.config.kv_groups import with_draft_layers
from bough.config.layout import Layout
from bough.config.model_facts import Gqa, Mixer, ModelFacts
from bough.config.resolve_facts import ModelPlanFacts
from bough.config.speculation import ON_DEVICE
from bough.core.errors import ConfigError
from bough.engine.facts import plan_facts, why_no_codes
from bough.models.nextn import names_of
from bough.models.registry import facts_of

_FEW_TOKENS = 16
"""Ids that stand for other texts at most, in tokenizers that count as the same: reserved ones are renamed."""


class Draft(NamedTuple):
    """A checkpoint that drafts."""

    checkpoint: Checkpoint
    facts: DraftFacts


def draft_of(config: Config, target: Checkpoint, facts: ModelFacts) -> Draft | None:
    """What the configuration names; None: nothing drafts on the device. Raises `ConfigError` where it can't draft for the
    target."""
    asked = config.speculative
    method = asked.speculative_algorithm
    if method not in ON_DEVICE:
        return None
    if facts.through_transformers and method != "STANDALONE":
        raise ConfigError(
            what=f"--speculative-algorithm {method} can't be had with a model that runs through transformers",
            why="its hidden states are not seen between the layers",
            fix="use --speculative-algorithm STANDALONE or NGRAM",
            param="speculative_algorithm",
        )
    if asked.speculative_eagle_topk not in (AUTO, 1) and any(_counts_keys(mixer) for mixer in facts.mixers):
        raise ConfigError(
            what=f"--speculative-eagle-topk {asked.speculative_eagle_topk} can't be had with {facts.architecture}",
            why="its attention goes by the places of keys (slopes or chunks), which are not those of a tree's nodes",
            fix="use --speculative-eagle-topk 1",
            param="speculative_eagle_topk",
        )
    if method == "NEXTN":
        names_of(facts.architecture)
    draft = target
    if asked.speculative_draft_model_path:
        load_format = asked.speculative_draft_load_format
        draft = open_checkpoint(
            asked.speculative_draft_model_path,
            revision=asked.speculative_draft_model_revision,
            load_format=config.model.load_format if load_format == "auto" else load_format,
            download_dir=config.model.download_dir,
        )
    drafts_by: DraftMethod = method  # type: ignore[assignment]
    whole = None
    if method == "STANDALONE":
        whole = facts_of(draft.config, "bough")
        _same_tokens(target, draft)
    found = read_draft(drafts_by, draft, facts, whole)
    if found.model.state_mixers:
        raise misfit(
            draft,
            f"{draft.name} keeps states in some of its layers",
            "what drafts reads the KV cache of the model it drafts for, and has no states",
        )
    found = windowed(draft, found, asked.speculative_draft_window_size)
    found = mapped(draft, found, asked.speculative_token_map, facts.vocab)
    if found.tokens and config.parallel.tp_size > 1:
        raise ConfigError(
            what=f"{draft.name} can't draft with --tp-size {config.parallel.tp_size}",
            why="it was trained for some tokens of the model's output head, of which each rank has a part",
            fix="use --tp-size 1, or a head with an output head of its own (bough train-draft --draft-vocab)",
            param="tp_size",
        )
    return Draft(draft, found)


def mapped(draft: Checkpoint, facts: DraftFacts, path: str, vocab: int) -> DraftFacts:
    """What drafts, kept to the tokens that a file lists; "": those that it was trained for, else all. Raises `ConfigError`
    where that can't be."""
    path = path or _own_token_map(draft, facts)
    if not path:
        return facts
    match facts.kind:
        case Eagle3(vocab=own) if own is not None:
            why = "it has an output head of its own, with its own tokens"
        case Medusa(own_heads=True):
            why = "its heads have output heads of their own"
        case _:
            return replace(facts, tokens=_read_tokens(path, vocab))
    raise ConfigError(
        what=f"--speculative-token-map can't be had with {draft.name}",
        why=why,
        fix="leave it out",
        param="speculative_token_map",
    )


def _own_token_map(draft: Checkpoint, facts: DraftFacts) -> str:
    """The file that the config of a head names beside it; "": none. Raises `ConfigError`."""
    named = draft.config.get("token_map") if facts.method in ("EAGLE", "EAGLE3", "MEDUSA") else None
    if named is None:
        return ""
    if not isinstance(named, str) or Path(named).name != named:
        raise misfit(draft, f"{draft.name} has the token map {named!r}", "it is the name of a file beside its config")
    return str(draft.path / named)


def _read_tokens(path: str, vocab: int) -> tuple[int, ...]:
    try:
        listed = json.loads(Path(path).read_bytes())
        why = "it is not a list of token ids" if not isinstance(listed, list) or not listed else ""
    except (OSError, ValueError) as error:
        listed, why = [], str(error)
    if not why and not all(type(token) is int and 0 <= token < vocab for token in listed):
        why = f"ids are whole numbers from 0 to {vocab - 1}"
    if why:
        raise ConfigError(
            what=f"--speculative-token-map {path} can't be read",
            why=why[:200],
            fix="name a JSON file with a list of ids (SGLang's .pt files: json.dump what torch.load gives)",
            param="speculative_token_map",
        )
    return tuple(sorted(set(listed)))


def windowed(draft: Checkpoint, facts: DraftFacts, window: int) -> DraftFacts:
    """What drafts, with attention to the newest `window` tokens; 0: as it is. Raises `ConfigError` where it can't be had."""
    if not window:
        return facts

    def narrowed(mixer: Mixer) -> Mixer:
        if not isinstance(mixer, Gqa) or mixer.chunk is not None:
            raise ConfigError(
                what=f"--speculative-draft-window-size can't be had with {draft.name}",
                why="its attention has no windows",
                fix="leave it out",
                param="speculative_draft_window_size",
            )
        return replace(mixer, window=min(window, mixer.window or window))

    layers = tuple(replace(each, mixers=tuple(map(narrowed, each.mixers))) for each in facts.model.layers)
    return replace(facts, model=replace(facts.model, layers=layers))


def _counts_keys(mixer: Mixer) -> bool:
    """Whether attention depends on where keys lie, beyond their order and a window."""
    return isinstance(mixer, Gqa) and (mixer.alibi is not None or mixer.chunk is not None)


def with_draft(
    planned: ModelPlanFacts, target: ModelFacts, draft: Draft | None, config: Config, layout: Layout, *, on_cpu: bool
) -> ModelPlanFacts:
    """The plan of `target` with what its draft takes: weights, KV beside its own, and states that are kept for it."""
    if draft is None:
        return planned
    checkpoint, facts = draft
    dense, packed_bytes, packed_params = _num_weights(draft) + len(facts.tokens) * planned.hidden_size, 0, 0
    if facts.method == "STANDALONE":
        model = replace(config.model, quantization=config.speculative.speculative_draft_model_quantization)
        alone = plan_facts(checkpoint, facts.model, model, on_cpu=on_cpu, layout=layout)
        dense, packed_bytes, packed_params = alone.dense_params, alone.packed_bytes, alone.packed_params
    return replace(
        planned,
        dense_params=planned.dense_params + dense,
        packed_bytes=planned.packed_bytes + packed_bytes,
        packed_params=planned.packed_params + packed_params,
        kv_values_per_token=planned.kv_values_per_token + sum(sum(mixer.planes) for mixer in facts.model.kv_mixers),
        kv=partial(with_draft_layers, target, layout, facts.model),
        no_kv_codes=planned.no_kv_codes or why_no_codes(facts.model),
        tapped_values=(len(facts.taps) + 1) * planned.hidden_size,
        most_draft_steps=facts.most_steps,
    )


def _num_weights(draft: Draft) -> int:
    """Of a head. All tensors of a checkpoint that brings one along have been counted as the model's."""
    checkpoint, facts = draft
    if checkpoint.kind == "config-only":
        return facts.num_parameters()
    if facts.method == "NEXTN":
        return 0
    return sum(
        math.prod(tensor.shape)
        for name, tensor in checkpoint.tensors.items()
        if not name.removeprefix("model.").startswith("embed_tokens.") and not name.endswith("t2d")
    )


def _same_tokens(target: Checkpoint, draft: Checkpoint) -> None:
    """Raises `ConfigError` if ids stand for other texts. Where a tokenizer can't be read as a list, nothing is compared."""
    theirs, its = _tokens(target), _tokens(draft)
    if theirs is None or its is None:
        return
    common = theirs.keys() & its.keys()
    others = sum(theirs[token] != its[token] for token in common)
    others += abs(len(theirs) - len(common)) if len(common) < min(len(theirs), len(its)) // 2 else 0
    if others > _FEW_TOKENS:
        raise misfit(
            draft,
            f"{draft.name} has another tokenizer than {target.name}",
            f"{others:,} of {len(common):,} ids stand for different tokens",
        )


def _tokens(checkpoint: Checkpoint) -> dict[int, str] | None:
    """Texts by id."""
    for header in checkpoint.gguf:
        listed = header.metadata.get("tokenizer.ggml.tokens")
        if isinstance(listed, list):
            return dict(enumerate(map(str, listed)))
    path = Path(checkpoint.tokenizer) / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        read = json.loads(path.read_bytes())
        vocab = read["model"]["vocab"]
        pairs = vocab.items() if isinstance(vocab, dict) else ((token, at) for at, (token, _) in enumerate(vocab))
        found = {int(at): str(token) for token, at in pairs}
        found |= {int(added["id"]): str(added["content"]) for added in read.get("added_tokens", [])}
    except (ValueError, KeyError, TypeError):
        return None
    return found
