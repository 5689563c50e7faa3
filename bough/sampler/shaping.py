"""Reshapes the logits of rich rows before the draw: penalties, biases, forbidden and allowed tokens, custom processors.

Everything is batched: host lists of (row, token, value) become one scatter; penalties read counts that live on the device
by slot and are advanced there, so that a step in flight never needs the host to have seen its tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bough.config.resolve import PENALISED_AT_ONCE
from bough.core.step import I64, SlotSetup
from bough.kernels import masks as masks_kernel
from bough.memory.transfer import upload

_log = logging.getLogger(__name__)

LogitProcessor = Callable[[Tensor, list[Mapping[str, bool | int | float | str]]], Tensor]
"""Takes logits [rows, vocab] and each row's `custom_params`; returns logits of the same shape."""

HISTORY = 8
"""Last tokens kept per rich slot, unless a banned word needs more: the longest, in tokens, is one more."""


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

    def advance(self, lines: Tensor, tokens: Tensor) -> None:
        """Notes that each line's row has drawn its token."""
        self.counts[lines, tokens] += 1
        self.last[lines] = torch.cat([self.last[lines, 1:], tokens[:, None]], dim=1)

    def _widen(self, num_tokens: int) -> None:
        """Keeps at least so many of every slot's last tokens. What slots in use have said before is not needed by them."""
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


class Shaper:
    """Applies what rich rows ask for. One per engine."""

    def __init__(
        self, vocab_size: int, device: torch.device, processors: Mapping[str, LogitProcessor] | None = None
    ) -> None:
        self._device = device
        self._history = History(vocab_size, device)
        self._processors = dict(processors or {})
        self._failed: dict[int, str] = {}

    @property
    def names(self) -> list[str]:
        """The processors that requests may name."""
        return sorted(self._processors)

    def take_failed(self) -> dict[int, str]:
        """Rows of the last `shape` whose processor failed, and why; their logits are as they were."""
        failed, self._failed = self._failed, {}
        return failed

    def assign(self, setup: SlotSetup) -> None:
        """Call for every setup, rich or not: a reused slot must forget its past."""
        self._history.release(setup.slot)
        if setup.sampling.penalised or setup.sampling.bad_words:
            self._history.assign(setup)

    def shape(self, logits: Tensor, rich: I64, setups: list[SlotSetup], num_output: list[int]) -> Tensor:
        """Returns reshaped logits. `rich[i]` is the row of `setups[i]`, which has drawn `num_output[i]` tokens."""
        logits = self._penalise(logits, rich, setups)
        adds, bans = self._scatter_lists(rich, setups, num_output)
        if adds:
            logits = self._add(logits, adds)
        if bans:
            logits = self._ban(logits, bans)
        logits = self._allow_only(logits, rich, setups)
        logits = self._ban_words(logits, rich, setups)
        return self._process(logits, rich, setups)

    def advance(self, rich: I64, setups: list[SlotSetup], tokens: Tensor) -> None:
        """Call after the draw with all rows' tokens [rows]."""
        wanted = [
            (int(row), s.slot)
            for row, s in zip(rich, setups, strict=True)
            if s.sampling.penalised or s.sampling.bad_words
        ]
        if wanted:
            rows = self._up([row for row, _ in wanted])
            self._history.advance(self._history.lines([slot for _, slot in wanted]), tokens[rows])

    def _penalise(self, logits: Tensor, rich: I64, setups: list[SlotSetup]) -> Tensor:
        some = [(int(row), s) for row, s in zip(rich, setups, strict=True) if s.sampling.penalised]
        if not some:
            return logits
        rows = self._up([row for row, _ in some])
        lines = self._history.lines([s.slot for _, s in some])
        knobs = self._up_floats(
            [
                (s.sampling.repetition_penalty, s.sampling.frequency_penalty, s.sampling.presence_penalty)
                for _, s in some
            ]
        )
        shaped = logits.to(torch.float32, copy=True)
        step = max(1, PENALISED_AT_ONCE // logits.shape[1])
        for some_rows, some_lines, some_knobs in zip(
            *(torch.split(each, step) for each in (rows, lines, knobs)), strict=True
        ):
            shaped.index_copy_(0, some_rows, self._penalised(shaped[some_rows], some_lines, some_knobs))
        return shaped

    def _penalised(self, logits: Tensor, lines: Tensor, knobs: Tensor) -> Tensor:
        repetition, frequency, presence = (knobs[:, i : i + 1] for i in range(3))
        counts = self._history.counts[lines]
        seen = (counts > 0) | self._history.in_prompt[lines]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        picked = torch.where(seen, repeated, logits)
        return picked - frequency * counts - presence * (counts > 0)

    def _scatter_lists(
        self, rich: I64, setups: list[SlotSetup], num_output: list[int]
    ) -> tuple[list[tuple[int, int, float]], list[tuple[int, int]]]:
        adds: list[tuple[int, int, float]] = []
        bans: list[tuple[int, int]] = []
        for row, setup, produced in zip(rich.tolist(), setups, num_output, strict=True):
            params = setup.sampling
            if params.logit_bias:
                adds.extend((row, token, bias) for token, bias in params.logit_bias.items())
            if produced < params.min_new_tokens:
                bans.extend((row, token) for token in (*setup.eos_ids, *params.stop_token_ids))
            bans.extend((row, word[0]) for word in params.bad_words if len(word) == 1)
        return adds, bans

    def _add(self, logits: Tensor, adds: list[tuple[int, int, float]]) -> Tensor:
        rows, tokens, values = zip(*adds, strict=True)
        where = (self._up(rows), self._up(tokens))
        return logits.float().index_put(where, self._up_floats(values), accumulate=True)

    def _ban(self, logits: Tensor, bans: list[tuple[int, int]]) -> Tensor:
        rows, tokens = zip(*bans, strict=True)
        where = (self._up(rows), self._up(tokens))
        return logits.float().index_put(where, self._up_floats(np.full(len(rows), -np.inf)))

    def _allow_only(self, logits: Tensor, rich: I64, setups: list[SlotSetup]) -> Tensor:
        pairs = [
            (int(row), token)
            for row, s in zip(rich, setups, strict=True)
            for token in (s.sampling.allowed_token_ids or ())
        ]
        if not pairs:
            return logits
        rows = self._up([row for row, _ in pairs])
        tokens = self._up([token for _, token in pairs])
        kept = logits[rows, tokens]
        return logits.index_fill(0, rows, -torch.inf).index_put((rows, tokens), kept)

    def _ban_words(self, logits: Tensor, rich: I64, setups: list[SlotSetup]) -> Tensor:
        words = [
            (int(row), s.slot, word)
            for row, s in zip(rich, setups, strict=True)
            for word in s.sampling.bad_words
            if len(word) > 1
        ]
        if not words:
            return logits
        rows = self._up([row for row, _, _ in words])
        final = self._up([word[-1] for _, _, word in words])
        width = self._history.last.shape[1]
        heads = np.full((len(words), width), -2, np.int64)
        for i, (_, _, word) in enumerate(words):
            heads[i, width - len(word) + 1 :] = word[:-1]
        wanted = self._up(heads)
        last = self._history.last[self._history.lines([slot for _, slot, _ in words])]
        hit = ((wanted == last) | (wanted == -2)).all(dim=1)
        penalty = torch.where(hit, -torch.inf, 0.0).to(logits.dtype)
        return logits.index_put((rows, final), penalty, accumulate=True)

    def _process(self, logits: Tensor, rich: I64, setups: list[SlotSetup]) -> Tensor:
        by_name: dict[str, list[tuple[int, SlotSetup]]] = {}
        for row, setup in zip(rich.tolist(), setups, strict=True):
            if setup.sampling.logit_processor is not None:
                by_name.setdefault(setup.sampling.logit_processor, []).append((row, setup))
        for name, some in by_name.items():
            rows = self._up([row for row, _ in some])
            before = logits[rows]
            try:
                shaped = self._processors[name](before.clone(), [s.sampling.custom_params or {} for _, s in some])
                if shaped.shape != before.shape:
                    raise ValueError(f"it returned {tuple(shaped.shape)} for {tuple(before.shape)}")
            except Exception as error:
                _log.warning("the logit processor %s failed", name, exc_info=error)
                why = f"the logit processor {name} failed: {type(error).__name__}"
                self._failed.update({row: why for row, _ in some})
            else:
                logits = logits.index_copy(0, rows, shaped.to(logits.dtype))
        return logits

    def _up(self, values: npt.ArrayLike) -> Tensor:
        return upload(np.asarray(values, np.int64), self._device)

    def _up_floats(self, values: npt.ArrayLike) -> Tensor:
        return upload(np.asarray(values, np.float32), self._device)


def apply_masks(logits: Tensor, rows: Tensor, masks: Tensor, *, in_place: bool = False) -> Tensor:
    """Forbids the tokens whose bit is clear: `masks[i]` (int32 words) belongs to `rows[i]`. Returns the logits."""
    masked = logits if in_place else logits.clone()
    masks_kernel.apply_masks(masked, rows, masks)
    return masked
