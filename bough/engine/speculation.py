"""Wires speculative decoding into an engine: what drafts, and the drafter that says how much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from bough.config.concerns import Config, SpeculativeConfig
from bough.config.draft_facts import Dflash, DraftFacts, Eagle3, Fused, Medusa
from bough.config.memory_plan import MemoryPlan
from bough.config.model_facts import ModelFacts
from bough.config.speculation import drafts_of_row
from bough.core.messages import Corpus
from bough.distributed.mesh import Mesh
from bough.engine.decide import Decided
from bough.engine.draft import Draft
from bough.engine.dtypes import DTYPES
from bough.layers.batch import Model
from bough.layers.decoder import Decoder
from bough.models.drafts import DraftBuild, build_dflash, build_heads, build_medusa
from bough.models.load import build_model
from bough.platform import Device
from bough.runner.accepting import AcceptRule, Rejection, Thresholds
from bough.runner.proposing import Proposer
from bough.scheduler.drafting import Drafter
from bough.scheduler.limits import Limits
from bough.speculative.corpora import Corpora
from bough.speculative.device import DeviceDrafter
from bough.speculative.guesses import Guesser
from bough.speculative.host import HostDrafter
from bough.speculative.ngram import NgramGuesser
from bough.speculative.proposers.dflash import DflashProposer
from bough.speculative.proposers.heads import HeadProposer
from bough.speculative.proposers.medusa import MedusaProposer
from bough.speculative.proposers.standalone import StandaloneProposer
from bough.speculative.proposers.tree import TreeShape
from bough.speculative.suffix import SuffixGuesser


class LoadedDraft(NamedTuple):
    """What drafts on the device, weights loaded."""

    proposer: Proposer
    network: torch.nn.Module
    facts: DraftFacts


def load_draft(
    draft: Draft, model: Model, config: Config, plan: MemoryPlan, device: Device, mesh: Mesh, target: ModelFacts
) -> LoadedDraft:
    """Loads this rank's share of it. Its layers keep their KV behind those of `model`."""
    asked, facts = config.speculative, draft.facts
    load_format = asked.speculative_draft_load_format
    dtype, quantization = DTYPES[config.model.dtype], asked.speculative_draft_model_quantization
    load_format = config.model.load_format if load_format == "auto" else load_format
    first_layer = len(target.kv_mixers)
    if facts.method == "STANDALONE":
        whole = build_model(
            draft.checkpoint, dtype=dtype, device=device.torch_device, mesh=mesh, load_format=load_format,
            quantization=quantization, context_length=plan.context_length, seed=config.model.seed, model_impl="bough",
            first_layer=first_layer,
        )  # fmt: skip
        num_layers = len(facts.model.kv_mixers)
        assert isinstance(whole, torch.nn.Module)
        proposer = StandaloneProposer(whole, num_layers, first_layer + num_layers - 1, target.vocab)
        return LoadedDraft(proposer, whole, facts)
    assert isinstance(model, Decoder), "others have been refused"
    given = DraftBuild(
        draft.checkpoint, facts, dtype, device.torch_device, plan.context_length, first_layer, target.num_layers, mesh,
        load_format, quantization, config.model.seed,
    )  # fmt: skip
    return load_proposer(given, model, target.vocab, tree_of(asked))


def tree_of(asked: SpeculativeConfig) -> TreeShape | None:
    """The shape of trees of drafts; None: each follows the one before it."""
    steps, topk = asked.speculative_num_steps, asked.speculative_eagle_topk
    assert isinstance(steps, int), "decided by now"
    assert isinstance(topk, int), "decided by now"
    return TreeShape(steps, topk) if topk > 1 else None


def load_proposer(given: DraftBuild, model: Decoder, vocab: int, shape: TreeShape | None = None) -> LoadedDraft:
    """What drafts from the states of `model`. `shape`: of trees; None: each draft follows the one before it."""
    facts = given.facts
    match facts.method:
        case "MEDUSA":
            medusa = build_medusa(given, model)
            return LoadedDraft(MedusaProposer(medusa, vocab, shape), medusa, facts)
        case "DFLASH":
            dflash = build_dflash(given, model)
            return LoadedDraft(DflashProposer(dflash, facts.taps, facts.model.num_layers), dflash, facts)
    heads = build_heads(given, model)
    modules = torch.nn.ModuleList(head for head in heads if isinstance(head, torch.nn.Module))
    return LoadedDraft(HeadProposer(heads, facts.taps, vocab, shape), modules, facts)


def rule_of(asked: SpeculativeConfig) -> AcceptRule | None:
    """Which drafts count; None: those that the model draws itself."""
    if asked.speculative_use_rejection_sampling or asked.speculative_use_block_verification:
        return Rejection(block=asked.speculative_use_block_verification)
    single, total = asked.speculative_accept_threshold_single, asked.speculative_accept_threshold_acc
    return Thresholds(single, total) if min(single, total) < 1 else None


def reach_of(facts: DraftFacts, tree: TreeShape | None) -> Callable[[int], int]:
    """KV tokens behind a row's own that are written while this number of drafts is made."""
    match facts.kind:
        case Medusa():
            return lambda proposals: 0
        case Eagle3() | Fused() if tree is not None:
            written = tree.topk * (tree.steps - 1)
            return lambda proposals: written if proposals > 0 else 0
        case Dflash(block_size=size):
            return lambda proposals: size if proposals > 0 else 0
        case None:
            return lambda proposals: max(proposals, 1)
    return lambda proposals: max(proposals - 1, 0)


def upkeep_of(facts: DraftFacts, target: ModelFacts) -> float:
    """The part of a step that keeping up with its tokens takes, by weights that are read."""
    if isinstance(facts.kind, Medusa):
        return 0.0
    head = facts.kind.vocab or 0 if isinstance(facts.kind, Eagle3) else 0
    return (facts.num_parameters() - head * facts.model.hidden) / target.num_parameters()


def drafter_of(config: Config, limits: Limits, decided: Decided) -> Drafter | None:
    """What says how many drafts the engine's rows get; None: there are none."""
    asked = config.speculative
    if asked.speculative_algorithm == "none":
        return None
    if decided.draft is not None:
        return DeviceDrafter(
            drafts_of_row(asked),
            limits.num_slots,
            adaptive=asked.speculative_adaptive,
            reach=reach_of(decided.draft.facts, tree_of(asked)),
            upkeep=upkeep_of(decided.draft.facts, decided.facts),
            keeps_kv=not isinstance(decided.draft.facts.kind, Medusa),
            trees=tree_of(asked) is not None,
        )
    guesser: Guesser
    if asked.speculative_algorithm == "SUFFIX":
        guesser = SuffixGuesser(
            most=drafts_of_row(asked),
            most_match=asked.speculative_suffix_max_tree_depth,
            factor=asked.speculative_suffix_max_spec_factor,
            least_likely=asked.speculative_suffix_min_token_prob,
            capacity_tokens=asked.speculative_ngram_capacity,
        )
    else:
        guesser = _ngram(asked)
    return HostDrafter(
        guesser,
        limits.num_slots,
        overlaps=config.scheduler.overlap_schedule,
        adaptive=asked.speculative_adaptive,
    )


def _ngram(asked: SpeculativeConfig) -> NgramGuesser:
    return NgramGuesser(
        most=drafts_of_row(asked),
        corpora=Corpora(asked.speculative_ngram_external_corpus_max_tokens),
        least_match=asked.speculative_ngram_min_match_window_size,
        most_match=asked.speculative_ngram_max_match_window_size,
        capacity_tokens=asked.speculative_ngram_capacity,
    )


def corpora_of(drafter: Drafter | None) -> Callable[[Corpus], dict[str, Any]] | None:
    """What takes corpora to draft from; None: nothing does."""
    guesser = drafter.guesser if isinstance(drafter, HostDrafter) else None
    return guesser.corpora.handle if isinstance(guesser, NgramGuesser) else None
