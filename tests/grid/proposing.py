"""Proposers on the device for the grid, of random weights in published layouts, and one that is right now and then."""

from __future__ import annotations

from pathlib import Path

import draft_files
import torch
from in_process import DraftsOnDevice
from torch import Tensor

from bough.config.draft_facts import DraftMethod, read_draft
from bough.config.hf import open_checkpoint
from bough.engine.draft import mapped, windowed
from bough.engine.speculation import load_proposer
from bough.layers.batch import Model
from bough.layers.decoder import Decoder
from bough.models.drafts import DraftBuild
from bough.models.load import build_model
from bough.models.registry import facts_of
from bough.runner.proposing import Drafting, Proposer
from bough.speculative.proposers.standalone import StandaloneProposer
from bough.speculative.proposers.tree import TreeShape

FP32 = {"dtype": torch.float32, "device": torch.device("cpu")}


class NowAndThen:
    """Drafts of another proposer, every third of them spoilt: runs of drafts are right in part."""

    def __init__(self, proposer: Proposer, vocab: int) -> None:
        self._inner = proposer
        self._vocab = vocab
        self.reads = proposer.reads
        self.num_layers = proposer.num_layers

    def propose(self, step: Drafting) -> list[Tensor]:
        drafts = self._inner.propose(step)
        counters = step.rows.counter_R
        return [
            torch.where((counters + place) % 3 == 2, (draft + 1) % self._vocab, draft)
            for place, draft in enumerate(drafts)
        ]


def itself(folder: Path, vocab: int) -> DraftsOnDevice:
    """The target's own checkpoint as the model that drafts."""
    checkpoint = open_checkpoint(str(folder))
    count = facts_of(checkpoint.config).num_layers
    model = build_model(checkpoint, first_layer=count, **FP32)
    assert isinstance(model, torch.nn.Module)
    proposer = StandaloneProposer(model, count, 2 * count - 1, vocab)
    return DraftsOnDevice(NowAndThen(proposer, vocab), model)


def head(
    method: DraftMethod,
    target_folder: Path,
    draft_folder: Path,
    model: Model,
    shape: TreeShape | None = None,
    window: int = 0,
    token_map: str = "",
) -> DraftsOnDevice:
    """What is in `draft_folder`, for the model of `target_folder`. `shape`: of trees. `window`: tokens that it sees.
    `token_map`: a file with those that it drafts."""
    target = facts_of(open_checkpoint(str(target_folder)).config)
    checkpoint = open_checkpoint(str(draft_folder))
    facts = windowed(checkpoint, read_draft(method, checkpoint, target, None), window)
    facts = mapped(checkpoint, facts, token_map, target.vocab)
    assert isinstance(model, Decoder)
    count = target.num_layers
    given = DraftBuild(checkpoint, facts, torch.float32, torch.device("cpu"), 256, len(target.kv_mixers), count)
    loaded = load_proposer(given, model, target.vocab, shape)
    return DraftsOnDevice(loaded.proposer, loaded.network, 0 if shape is None else shape.steps + 1)


def eagle3(folder: Path, model: Model) -> DraftsOnDevice:
    draft_files.eagle3(folder / "eagle3")
    return head("EAGLE3", folder, folder / "eagle3", model)
