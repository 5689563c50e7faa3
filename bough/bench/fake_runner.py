"""Runners without a model, for simulations and for measuring the host.

`OracleRunner` is a model whose next token is a hash of the whole prefix *as read through the pages*: a wrong page, a
page freed too early, a stale table entry or a lost token gives another answer than `lone_output`, which computes the same
from the prompt alone. It also checks every `Step` against the contract and notes what is wrong in `violations`.
`NullRunner` costs as little as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from bough.core.step import FROM_DEVICE, I32, LogprobArrays, Mask, Outcome, RunnerLimits, SlotSetup, Step

U64 = npt.NDArray[np.uint64]
_NOTHING = -1
_GARBAGE = -7
_ANYWHERE = -3
"""The position of tokens that were moved: joins may shift them."""
_POWERS: dict[int, U64] = {}


def _powers(count: int) -> U64:
    size = max(1024, 1 << (count - 1).bit_length())
    if size not in _POWERS:
        with np.errstate(over="ignore"):
            _POWERS[size] = np.cumprod(np.full(size, 0x9E3779B97F4A7C15 | 1, np.uint64), dtype=np.uint64)
    return _POWERS[size]


def prefix_hash(prefix: npt.NDArray[np.int64]) -> int:
    """64 bits that depend on every token and its place."""
    with np.errstate(over="ignore"):
        terms = (prefix + 3).astype(np.uint64) * _powers(len(prefix))[: len(prefix)]
        value = int(terms.sum(dtype=np.uint64))
    value ^= value >> 29
    value = value * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 32


def pick(hashed: int, vocab_size: int, mask: I32 | None = None) -> int:
    """The oracle's token: the hash's, or the next one that the mask allows."""
    token = hashed % vocab_size
    if mask is None:
        return token
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
    allowed = np.flatnonzero(bits)
    if not len(allowed):
        raise ValueError("the mask allows no token")
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])


def score(prefix: npt.NDArray[np.int64], token: int) -> float:
    """A made-up log-probability of `token` after `prefix`."""
    return -float((prefix_hash(prefix) ^ token * 2654435761) % 1000) / 64.0


def lone_output(
    prompt: Sequence[int],
    *,
    vocab_size: int,
    limit: int,
    stops: Sequence[int] = (),
    min_new: int = 0,
) -> tuple[list[int], str]:
    """What the oracle answers to a request that is alone, and why it ends."""
    tokens = list(prompt)
    for count in range(1, limit + 1):
        token = pick(prefix_hash(np.array(tokens, np.int64)), vocab_size)
        tokens.append(token)
        if token in stops and count > min_new:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


class OracleLaunched:
    """A step of the oracle. Its device work is done at launch, in order; `wait` only hands it out."""

    def __init__(self, runner: OracleRunner, step: Step, hashes: list[int], outcome: Outcome) -> None:
        self.step = step
        self.needs_masks = len(step.constrained) > 0
        self.reads: dict[int, set[tuple[int, int]]] = {}
        self.writes: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        self._runner = runner
        self._hashes = hashes
        self._outcome = outcome

    def sample(self, masks: Mask) -> None:
        if not self.needs_masks:
            self._runner.violations.append(f"step {self.step.index} was sampled twice")
        self.needs_masks = False
        self._runner.finish(self.step, self._hashes, self._outcome, masks)

    def wait(self) -> Outcome:
        if self.needs_masks:
            raise RuntimeError("waited for a step that was never sampled")
        return self._runner.waited(self)


class OracleRunner:
    """A deterministic model over paged memory. See the module's docstring."""

    def __init__(
        self,
        limits: RunnerLimits,
        *,
        pooling: bool = False,
        fail_launch: Callable[[Step], Exception | None] | None = None,
        fail_wait: Callable[[Step], Exception | None] | None = None,
    ) -> None:
        self.limits = limits
        self.violations: list[str] = []
        self.num_tokens = 0
        """Tokens computed, for tests of sharing."""
        self._pooling = pooling
        self._fail_launch = fail_launch
        self._fail_wait = fail_wait
        self._kv = np.full((limits.num_pages, limits.page_size), _NOTHING, np.int64)
        self._position = np.full((limits.num_pages, limits.page_size), _NOTHING, np.int64)
        """Where in its request each token in memory is."""
        self._table = np.zeros((limits.num_slots, limits.pages_per_slot), np.int64)
        self._last = np.full(limits.num_slots, _NOTHING, np.int64)
        self._length = np.zeros(limits.num_slots, np.int64)
        self._setups: dict[int, SlotSetup] = {}
        self._unsettled: list[OracleLaunched] = []
        self._index = -1

    # -- Runner -----------------------------------------------------------------------------------

    def launch(self, step: Step) -> OracleLaunched:
        self._check(step)
        if self._fail_launch is not None and (error := self._fail_launch(step)) is not None:
            raise error
        self._table.reshape(-1)[step.table_at] = step.table_pages
        for moves in step.moves:
            flat = self._kv.reshape(-1)
            flat[moves.target] = flat[moves.source]
            self._position.reshape(-1)[moves.target] = _ANYWHERE
            if (flat[moves.target] == _NOTHING).any():
                self._note(step, "moves memory that was never written")
        if len(step.copy_from):
            self._kv[step.copy_to] = self._kv[step.copy_from]
            self._position[step.copy_to] = self._position[step.copy_from]
        fresh = set()
        for setup in step.setups:
            if setup.slot not in self._setups or self._setups[setup.slot].rng_seed != setup.rng_seed:
                fresh.add(setup.slot)
            self._setups[setup.slot] = setup
            fresh.add(setup.slot)
        rows = len(step.slots)
        outcome = Outcome(tokens=np.zeros((rows, 1), np.int32), counts=np.zeros(rows, np.int32))
        launched = OracleLaunched(self, step, [], outcome)
        size = self.limits.page_size
        launched.writes += [(moves.target // size, moves.target % size) for moves in step.moves]
        hashes = self._forward(step, fresh, launched, outcome)
        launched._hashes = hashes
        self._check_shared(step)
        self._unsettled.append(launched)
        if not launched.needs_masks:
            self.finish(step, hashes, outcome, None)
        return launched

    def clear(self) -> None:
        if any(launched.needs_masks for launched in self._unsettled):
            self.violations.append("cleared with a step that was never sampled")

    # -- what the device would do ------------------------------------------------------------------

    def _forward(self, step: Step, fresh: set[int], launched: OracleLaunched, outcome: Outcome) -> list[int]:
        size = self.limits.page_size
        inputs = np.split(step.tokens.astype(np.int64), np.cumsum(step.num_query)[:-1])
        places = []
        for row, slot in enumerate(step.slots.tolist()):
            context, count = int(step.context[row]), int(step.num_query[row])
            if slot not in fresh and context != self._length[slot]:
                self._note(step, f"slot {slot} has {self._length[slot]} tokens, the step says {context}")
            tokens = np.where(inputs[row] == FROM_DEVICE, self._last[slot], inputs[row])
            inputs[row] = tokens
            at = np.arange(context, context + count)
            pages = self._table[slot, at // size]
            self._check_writes(step, slot, set(pages.tolist()))
            self._kv[pages, at % size] = tokens
            self._position[pages, at % size] = at
            launched.writes.append((pages, at % size))
            self._length[slot] = context + count
            places.append((slot, context + count))
            seed = self._setups[slot].rng_seed
            for page in set(self._table[slot, : -(-(context + count) // size)].tolist()):
                launched.reads.setdefault(page, set()).add((slot, seed))
        self.num_tokens += len(step.tokens)
        hashes = []
        scored: list[tuple[int, int, float]] = []
        wanted = dict(zip(step.prompt_logprobs.tolist(), step.following.tolist(), strict=True))
        for row, (slot, length) in enumerate(places):
            prefix = self._kv[self._table[slot, : -(-length // size)]].reshape(-1)[:length]
            if (prefix == _NOTHING).any():
                self._note(step, f"slot {slot} reads memory that was never written")
            positions = self._position[self._table[slot, : -(-length // size)]].reshape(-1)[:length]
            if ((positions != np.arange(length)) & (positions != _ANYWHERE)).any():
                self._note(step, f"slot {slot} reads memory of other positions")
            hashes.append(prefix_hash(prefix))
            if row in wanted:
                scored += self._score_prompt(step, row, slot, prefix, wanted[row])
            self._hidden(step, row, slot, prefix, outcome)
        outcome.prompt_logprobs = _arrays(scored) if wanted else None
        return hashes

    def _score_prompt(
        self, step: Step, row: int, slot: int, prefix: npt.NDArray[np.int64], following: int
    ) -> list[tuple[int, int, float]]:
        spec = self._setups[slot].logprobs
        if spec is None:
            self._note(step, f"slot {slot} is scored and did not ask for it")
            return []
        predicted = [*prefix.tolist()[1:], following] if following >= 0 else prefix.tolist()[1:]
        first = max(int(step.context[row]), spec.start - 1)
        return [(row, t, score(prefix[: p + 1], t)) for p, t in enumerate(predicted) if p >= first]

    def _hidden(self, step: Step, row: int, slot: int, prefix: npt.NDArray[np.int64], outcome: Outcome) -> None:
        kind = self._setups[slot].hidden_states
        if kind:
            first = int(step.context[row]) if kind == "all" else len(prefix) - 1
            states = [[float(p), float(prefix_hash(prefix[: p + 1]) % 997)] for p in range(first, len(prefix))]
            outcome.hidden_states[row] = np.array(states, np.float32)

    def finish(self, step: Step, hashes: list[int], outcome: Outcome, masks: Mask | None) -> None:
        """Samples: the second half of a step."""
        mask_of = {int(row): masks[at] for at, row in enumerate(step.constrained)} if masks is not None else {}
        scored = []
        for row in np.flatnonzero(step.samples).tolist():
            slot = int(step.slots[row])
            if self._pooling:
                outcome.embeddings[row] = np.array([hashes[row] % 1009, self._length[slot]], np.float32)
                continue
            token = pick(hashes[row], self.limits.vocab_size, mask_of.get(row))
            self._last[slot] = token
            outcome.tokens[row, 0] = token
            outcome.counts[row] = 1
            if self._setups[slot].logprobs is not None:
                length = int(self._length[slot])
                pages = self._table[slot, : -(-length // self.limits.page_size)]
                scored.append((row, token, score(self._kv[pages].reshape(-1)[:length], token)))
        outcome.output_logprobs = _arrays(scored) if scored else None

    def waited(self, launched: OracleLaunched) -> Outcome:
        if not self._unsettled or self._unsettled[0] is not launched:
            self.violations.append(f"step {launched.step.index} was waited for out of order")
        else:
            self._unsettled.pop(0)
        if self._fail_wait is not None and (error := self._fail_wait(launched.step)) is not None:
            self._spoil(launched)
            raise error
        return launched._outcome

    def _spoil(self, launched: OracleLaunched) -> None:
        """A failed step leaves garbage where it wrote."""
        for pages, offsets in launched.writes:
            self._kv[pages, offsets] = _GARBAGE
        self._last[launched.step.slots] = _GARBAGE

    # -- the contract -----------------------------------------------------------------------------

    def _note(self, step: Step, what: str) -> None:
        self.violations.append(f"step {step.index}: {what}")

    def _check(self, step: Step) -> None:
        limits = self.limits
        rows = step.num_rows
        if any(launched.needs_masks for launched in self._unsettled):
            self._note(step, "launched before the step before it was sampled")
        for bad, what in (
            (step.index <= self._index, "its index does not rise"),
            (len(set(step.slots.tolist())) != rows, "a slot appears twice"),
            ({len(step.num_query), len(step.context), len(step.samples)} != {rows}, "its columns differ in length"),
            (int(step.num_query.sum()) != len(step.tokens), "tokens and num_query differ"),
            (rows == 0 or bool((step.num_query < 1).any()), "a row brings no token"),
            (len(step.tokens) > limits.max_step_tokens, f"{len(step.tokens)} tokens are too many"),
            (bool((step.num_query[: step.num_decodes] != 1).any()), "a decode row brings several tokens"),
            (not step.samples[: step.num_decodes].all(), "a decode row does not sample"),
            (bool((step.context + step.num_query > limits.context_length).any()), "a row outgrows the context"),
            (len(step.table_at) != len(step.table_pages), "table writes differ in length"),
            (bool(((step.table_pages < 1) | (step.table_pages >= limits.num_pages)).any()), "no such page"),
            (bool(((step.table_at < 0) | (step.table_at >= self._table.size)).any()), "no such table entry"),
            (len(set(step.table_at.tolist())) != len(step.table_at), "a table entry is written twice"),
            (bool(((step.tokens < 0) & (step.tokens != FROM_DEVICE)).any()), "no such token"),
        ):
            if bad:
                self._note(step, what)
        self._index = step.index

    def _check_writes(self, step: Step, slot: int, pages: set[int]) -> None:
        """A page must not be written while an unsettled step reads it for another request."""
        me = (slot, self._setups[slot].rng_seed)
        if 0 in pages:
            self._note(step, f"slot {slot} writes to page 0")
        for launched in self._unsettled:
            for page in pages:
                others = launched.reads.get(page, set()) - {me}
                if others:
                    self._note(
                        step, f"slot {slot} writes page {page}, which step {launched.step.index} reads for {others}"
                    )

    def _check_shared(self, step: Step) -> None:
        shared = step.shared
        if shared is None:
            return
        seen: set[int] = set()
        for group, tokens in enumerate(shared.num_tokens.tolist()):
            rows = shared.rows[shared.start[group] : shared.start[group + 1]]
            pages = self._table[step.slots[rows], : tokens // self.limits.page_size]
            if tokens % self.limits.page_size or (pages != pages[0]).any() or seen & set(rows.tolist()):
                self._note(step, f"group {group} does not share {tokens} tokens")
            if (step.context[rows] < tokens).any() or rows.max() >= step.num_decodes or len(rows) < 2:
                self._note(step, f"group {group} is not one of decode rows that long")
            seen |= set(rows.tolist())


def _arrays(scored: list[tuple[int, int, float]]) -> LogprobArrays:
    count = len(scored)
    ids = np.array([token for _, token, _ in scored], np.int32)
    values = np.array([value for _, _, value in scored], np.float32)
    return LogprobArrays(
        row=np.array([row for row, _, _ in scored], np.int32),
        token_ids=ids,
        logprobs=values,
        top_ids=np.stack([ids, ids + 1], 1) if count else np.zeros((0, 2), np.int32),
        top_logprobs=np.stack([values, values - 1], 1) if count else np.zeros((0, 2), np.float32),
        chosen_logprobs=np.stack([values, values - 2], 1) if count else np.zeros((0, 2), np.float32),
    )


class NullLaunched:
    """A step that does nothing."""

    def __init__(self, step: Step, outcome: Outcome) -> None:
        self.step = step
        self.needs_masks = False
        self._outcome = outcome

    def sample(self, masks: Mask) -> None:
        raise RuntimeError("this runner has no masks")

    def wait(self) -> Outcome:
        return self._outcome


class NullRunner:
    """Answers at once with the step's number: for measuring everything but the device."""

    def __init__(self, limits: RunnerLimits) -> None:
        self.limits = limits

    def launch(self, step: Step) -> NullLaunched:
        token = step.index % self.limits.vocab_size
        tokens = np.full((step.num_rows, 1), token, np.int32)
        return NullLaunched(step, Outcome(tokens=tokens, counts=step.samples.astype(np.int32)))

    def clear(self) -> None:
        """Nothing is queued."""
