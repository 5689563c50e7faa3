"""Reshapes the logits of rich rows before the draw: penalties, biases, forbidden and allowed tokens, custom processors.

Everything is batched: host lists of (row, token, value) become one scatter; penalties read counts that live on the device
by slot and are advanced there, so that a step in flight never needs the host to have seen its tokens. A sample behind drafts
is shaped as if they were output: each has its *path*, the drafts before it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bough.config.step_memory import PENALISED_AT_ONCE
from bough.core.step import I64, SlotSetup
from bough.kernels import masks as masks_kernel
from bough.memory.transfer import upload
from bough.sampler.speech import Said
from bough.sampler.state import Samples

_log = logging.getLogger(__name__)

LogitProcessor = Callable[[Tensor, list[Mapping[str, bool | int | float | str]]], Tensor]
"""Takes logits [rows, vocab] and each row's `custom_params`; returns logits of the same shape."""
ReadingProcessor = Callable[[Tensor, list[Mapping[str, bool | int | float | str]], Said], Tensor]
"""The same for one that also reads what the rows have said."""

HISTORY = 8
"""Last tokens kept per rich slot, unless a banned word needs more: the longest, in tokens, is one more."""


class StepIds(Protocol):
    """The arrays of a step that samples are found by (`runner.inputs.StepTensors` has them). int64."""

    @property
    def ids_T(self) -> Tensor: ...
    @property
    def sample_at_L(self) -> Tensor: ...
    @property
    def counter_L(self) -> Tensor: ...


@dataclass(slots=True)
class RichSamples:
    """The rich samples of a step, in order."""

    at: I64
    """Rows of the step's logits."""
    setups: list[SlotSetup]
    """Of each."""
    num_output_L: Tensor
    """Of all samples of the step: the output tokens before it."""
    owner: I64
    """The sampling row of each."""
    place: I64
    """How many drafts come before each."""
    path: Tensor | None
    """int64 [rich samples, most drafts]: those drafts, -1 behind them; None: the step has none."""
    num_before: Tensor | None = None
    """int64: how many drafts are on the path of each, where they form trees; None: `place` says it."""

    @staticmethod
    def of(samples: Samples, setups: list[SlotSetup], tensors: StepIds, seen_T: Tensor | None = None) -> RichSamples:
        """`seen_T`: where drafts form trees, the query tokens of its row that each token sees, as bits."""
        at, owner = samples.rich, samples.owners()[samples.rich]
        place, path, num_before = np.zeros(len(at), np.int64), None, None
        if samples.starts is not None:
            place = at - samples.starts[owner]
            drafts = np.arange(samples.width - 1)
            device = tensors.ids_T.device
            if seen_T is None:
                before = upload(drafts < place[:, None], device)
                index = upload(np.where(drafts < place[:, None], (at - place)[:, None] + 1 + drafts, 0), device)
            else:
                index, before = _ancestors(upload(at, device), upload(at - place, device), drafts, seen_T, tensors)
                num_before = before.sum(1)
            path = torch.where(before, tensors.ids_T[tensors.sample_at_L[index]], -1)
        return RichSamples(at, setups, tensors.counter_L, owner, place, path, num_before)

    def which(self, wanted: Callable[[SlotSetup], bool]) -> list[int]:
        """Those whose request asks for something."""
        return [i for i, setup in enumerate(self.setups) if wanted(setup)]


def _ancestors(
    at: Tensor, root: Tensor, drafts: npt.NDArray[np.int64], seen_T: Tensor, tensors: StepIds
) -> tuple[Tensor, Tensor]:
    """Of samples `at`, whose rows begin with sample `root`: the samples of the nodes on their paths, from the root's child
    on, and which of those places there are."""
    nodes = torch.from_numpy(drafts + 1).to(at.device)
    is_on = ((seen_T[tensors.sample_at_L[at]][:, None] >> nodes) & 1).bool()
    ordered = torch.where(is_on, nodes, len(drafts) + 1).sort(1).values  # a node comes behind those before it
    there = ordered <= len(drafts)
    return torch.where(there, root[:, None] + ordered, 0), there


class History:
    """Device state of slots whose next token depends on earlier ones: counts for penalties, last tokens for banned words.

    Lines are handed to slots on demand, so that memory is paid only for requests that need it.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._line_of: dict[int, int] = {}
        self._free: list[int] = []
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        """Output occurrences of each token."""
        self.in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self.last = torch.full((0, HISTORY), -1, dtype=torch.int64, device=device)

    def assign(self, setup: SlotSetup) -> None:
        self._widen(max((len(word) for word in setup.sampling.bad_words), default=1) - 1)
        line = self._line_of.get(setup.slot)
        if line is None:
            if not self._free:
                self._grow()
            line = self._line_of[setup.slot] = self._free.pop()
        self.counts[line].zero_()
        self.in_prompt[line].zero_()
        self.last[line].fill_(-1)
        if setup.prompt is not None:
            self.in_prompt[line].index_fill_(0, self._up(np.unique(setup.prompt)), True)
        if setup.output is not None and len(setup.output):
            output = self._up(setup.output)
            self.counts[line].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
            width = self.last.shape[1]
            tail = output[-width:]
            self.last[line, width - len(tail) :] = tail

    def release(self, slot: int) -> None:
        line = self._line_of.pop(slot, None)
        if line is not None:
            self._free.append(line)

    def lines(self, slots: list[int]) -> Tensor:
        return self._up([self._line_of[s] for s in slots])

    def _up(self, values: npt.ArrayLike) -> Tensor:
        return upload(np.asarray(values, np.int64), self._device)

    def advance(self, lines: Tensor, tokens_RW: Tensor, counts_R: Tensor | None = None) -> None:
        """Notes that each line's row has output its first `counts_R` tokens (None: all)."""
        width = tokens_RW.shape[1]
        if counts_R is None:
            ones = torch.ones_like(tokens_RW, dtype=torch.int32)
            last = torch.cat([self.last[lines, width:], tokens_RW], dim=1)
        else:
            ones = (torch.arange(width, device=lines.device) < counts_R[:, None]).int()
            last = shifted(self.last[lines], tokens_RW, counts_R)
        self.counts.index_put_((lines[:, None], tokens_RW.clamp_min(0)), ones, accumulate=True)
        self.last[lines] = last

    def _widen(self, num_tokens: int) -> None:
        """Keeps at least `num_tokens` of every slot's last tokens. Slots in use don't need what they said before."""
        more = num_tokens - self.last.shape[1]
        if more > 0:
            self.last = torch.nn.functional.pad(self.last, (more, 0), value=-1)

    def _grow(self) -> None:
        have, more = len(self.counts), max(8, len(self.counts))
        self._free = list(range(have, have + more))

        def extended(state: Tensor, fill: int) -> Tensor:
            extra = torch.full((more, state.shape[1]), fill, dtype=state.dtype, device=state.device)
            return torch.cat([state, extra])

        self.counts, self.in_prompt = extended(self.counts, 0), extended(self.in_prompt, 0)
        self.last = extended(self.last, -1)


def shifted(last_RH: Tensor, tokens_RW: Tensor, counts_R: Tensor) -> Tensor:
    """The newest H of the last tokens and the first `counts_R` of those that follow."""
    both = torch.cat([last_RH, tokens_RW], dim=1)
    return both.gather(1, counts_R[:, None] + torch.arange(last_RH.shape[1], device=both.device))


class Shaper:
    """Applies what rich rows ask for. One per engine."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        processors: Mapping[str, LogitProcessor] | None = None,
        readers: Mapping[str, ReadingProcessor] | None = None,
    ) -> None:
        """`processors`, `readers`: what requests may name."""
        self._device = device
        self._history = History(vocab_size, device)
        self._processors = dict(processors or {})
        self._readers = dict(readers or {})
        self._failed: dict[int, str] = {}

    @property
    def names(self) -> list[str]:
        """The processors that requests may name."""
        return sorted((*self._processors, *self._readers))

    def take_failed(self) -> dict[int, str]:
        """Samples of the last `shape` whose processor failed, and why; their logits are as they were."""
        failed, self._failed = self._failed, {}
        return failed

    def assign(self, setup: SlotSetup) -> None:
        """Call for every setup, rich or not: a reused slot must forget its past."""
        self._history.release(setup.slot)
        if self._has_history(setup):
            self._history.assign(setup)

    def shape(self, logits: Tensor, rich: RichSamples) -> Tensor:
        """Returns reshaped logits of all samples."""
        logits = self._penalise(logits, rich)
        adds, bans = self._scatter_lists(rich)
        if adds:
            logits = self._add(logits, adds)
        if bans:
            logits = self._ban(logits, bans)
        logits = self._ban_ends(logits, rich)
        logits = self._allow_only(logits, rich)
        logits = self._ban_words(logits, rich)
        return self._process(logits, rich)

    def advance(self, rich: RichSamples, result: Tensor) -> None:
        """Call after the draw with the sampling rows' tokens [rows], or with what `step_end.verify` gave of them."""
        wanted = [i for i in rich.which(self._has_history) if rich.place[i] == 0]
        if not wanted:
            return
        lines = self._history.lines([rich.setups[i].slot for i in wanted])
        rows = result[self._up(rich.owner[wanted])]
        if result.ndim == 1:
            self._history.advance(lines, rows[:, None])
        else:
            self._history.advance(lines, rows[:, 1:], rows[:, 0])

    def _penalise(self, logits: Tensor, rich: RichSamples) -> Tensor:
        some = rich.which(lambda setup: setup.sampling.penalised)
        if not some:
            return logits
        at = self._up(rich.at[some])
        lines = self._history.lines([rich.setups[i].slot for i in some])
        asked = [rich.setups[i].sampling for i in some]
        knobs = self._up_floats([(s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for s in asked])
        path = lines.new_empty(len(some), 0) if rich.path is None else rich.path[self._up(some)]
        shaped = logits.to(torch.float32, copy=True)
        step = max(1, PENALISED_AT_ONCE // logits.shape[1])
        for some_at, some_lines, some_knobs, some_path in zip(
            *(torch.split(each, step) for each in (at, lines, knobs, path)), strict=True
        ):
            shaped.index_copy_(0, some_at, self._penalised(shaped[some_at], some_lines, some_knobs, some_path))
        return shaped

    def _penalised(self, logits: Tensor, lines: Tensor, knobs: Tensor, path: Tensor) -> Tensor:
        repetition, frequency, presence = (knobs[:, i : i + 1] for i in range(3))
        counts = self._history.counts[lines]
        if path.shape[1]:
            counts.scatter_add_(1, path.clamp_min(0), (path >= 0).to(counts.dtype))
        seen = (counts > 0) | self._history.in_prompt[lines]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        picked = torch.where(seen, repeated, logits)
        return picked - frequency * counts - presence * (counts > 0)

    def _scatter_lists(self, rich: RichSamples) -> tuple[list[tuple[int, int, float]], list[tuple[int, int]]]:
        adds: list[tuple[int, int, float]] = []
        bans: list[tuple[int, int]] = []
        for at, setup in zip(rich.at.tolist(), rich.setups, strict=True):
            params = setup.sampling
            if params.logit_bias:
                adds.extend((at, token, bias) for token, bias in params.logit_bias.items())
            bans.extend((at, word[0]) for word in params.bad_words if len(word) == 1)
        return adds, bans

    def _ban_ends(self, logits: Tensor, rich: RichSamples) -> Tensor:
        """Bans the tokens that end a row while it has fewer than `min_new_tokens`, which the device counts."""
        ends = [
            (at, token, setup.sampling.min_new_tokens)
            for at, setup in zip(rich.at.tolist(), rich.setups, strict=True)
            if setup.sampling.min_new_tokens > 0
            for token in dict.fromkeys((*setup.eos_ids, *setup.sampling.stop_token_ids))
        ]
        if not ends:
            return logits
        at, tokens, least = (self._up(column) for column in zip(*ends, strict=True))
        logits = logits.float()
        banned = logits[at, tokens].masked_fill_(rich.num_output_L[at] < least, -torch.inf)
        return logits.index_put((at, tokens), banned)

    def _add(self, logits: Tensor, adds: list[tuple[int, int, float]]) -> Tensor:
        rows, tokens, values = zip(*adds, strict=True)
        where = (self._up(rows), self._up(tokens))
        return logits.float().index_put(where, self._up_floats(values), accumulate=True)

    def _ban(self, logits: Tensor, bans: list[tuple[int, int]]) -> Tensor:
        rows, tokens = zip(*bans, strict=True)
        where = (self._up(rows), self._up(tokens))
        return logits.float().index_put(where, self._up_floats(np.full(len(rows), -np.inf)))

    def _allow_only(self, logits: Tensor, rich: RichSamples) -> Tensor:
        pairs = [
            (int(row), token)
            for row, s in zip(rich.at, rich.setups, strict=True)
            for token in (s.sampling.allowed_token_ids or ())
        ]
        if not pairs:
            return logits
        rows = self._up([row for row, _ in pairs])
        tokens = self._up([token for _, token in pairs])
        kept = logits[rows, tokens]
        return logits.index_fill(0, rows, -torch.inf).index_put((rows, tokens), kept)

    def _ban_words(self, logits: Tensor, rich: RichSamples) -> Tensor:
        words = [(i, word) for i, setup in enumerate(rich.setups) for word in setup.sampling.bad_words if len(word) > 1]
        if not words:
            return logits
        some = [i for i, _ in words]
        final = self._up([word[-1] for _, word in words])
        width = self._history.last.shape[1]
        heads = np.full((len(words), width), -2, np.int64)
        for i, (_, word) in enumerate(words):
            heads[i, width - len(word) + 1 :] = word[:-1]
        wanted = self._up(heads)
        last = self._history.last[self._history.lines([rich.setups[i].slot for i in some])]
        if rich.path is not None:
            places = self._up(rich.place[some]) if rich.num_before is None else rich.num_before[self._up(some)]
            last = shifted(last, rich.path[self._up(some)], places)
        hit = ((wanted == last) | (wanted == -2)).all(dim=1)
        penalty = torch.where(hit, -torch.inf, 0.0).to(logits.dtype)
        return logits.index_put((self._up(rich.at[some]), final), penalty, accumulate=True)

    def _process(self, logits: Tensor, rich: RichSamples) -> Tensor:
        by_name: dict[str, list[tuple[int, SlotSetup]]] = {}
        for row, setup in zip(rich.at.tolist(), rich.setups, strict=True):
            if setup.sampling.logit_processor is not None:
                by_name.setdefault(setup.sampling.logit_processor, []).append((row, setup))
        for name, some in by_name.items():
            rows = self._up([row for row, _ in some])
            before = logits[rows]
            try:
                params: list[Mapping[str, bool | int | float | str]]
                params = [setup.sampling.custom_params or {} for _, setup in some]
                if name in self._readers:
                    shaped = self._readers[name](before.clone(), params, self._said(rows, some, rich))
                else:
                    shaped = self._processors[name](before.clone(), params)
                if shaped.shape != before.shape:
                    raise ValueError(f"it returned {tuple(shaped.shape)} for {tuple(before.shape)}")
            except Exception as error:
                _log.warning("the logit processor %s failed", name, exc_info=error)
                why = f"the logit processor {name} failed: {type(error).__name__}"
                self._failed.update({row: why for row, _ in some})
            else:
                logits = logits.index_copy(0, rows, shaped.to(logits.dtype))
        return logits

    def _said(self, rows: Tensor, some: list[tuple[int, SlotSetup]], rich: RichSamples) -> Said:
        """What the rows of these samples have said. There are no drafts where a processor reads it."""
        if rich.path is not None:
            raise ValueError("drafts are not part of what a row has said")
        lines = self._history.lines([setup.slot for _, setup in some])
        return Said(self._history.last[lines], self._history.counts[lines], rich.num_output_L[rows])

    def _has_history(self, setup: SlotSetup) -> bool:
        reads = setup.sampling.logit_processor in self._readers
        return setup.sampling.penalised or bool(setup.sampling.bad_words) or reads

    def _up(self, values: npt.ArrayLike) -> Tensor:
        return upload(np.asarray(values, np.int64), self._device)

    def _up_floats(self, values: npt.ArrayLike) -> Tensor:
        return upload(np.asarray(values, np.float32), self._device)


def apply_masks(logits: Tensor, rows: Tensor, masks: Tensor, *, in_place: bool = False) -> Tensor:
    """Forbids the tokens whose bit is clear: `masks[i]` (int32 words) belongs to `rows[i]`. Returns the logits."""
    masked = logits if in_place else logits.clone()
    masks_kernel.apply_masks(masked, rows, masks)
    return masked
