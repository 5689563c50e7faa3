"""Runners without a model, for simulations and for measuring the host.

`OracleRunner` is a model whose next token is a hash of the whole prefix *as read through the pages*: a wrong page, a
page freed too early, a stale table entry or a lost token gives another answer than `lone_output`, which computes the
same from the prompt alone. Each token is stored with the running sum of the hash up to that token: lines with a window
continue it from the previous token, as far as that is still there. It also checks every `Step` against its contract and
records errors in `violations`. `NullRunner` takes as little time as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from bough.bench.fake_media import OracleMedia, media_mark, positions_of
from bough.bench.fake_states import OracleStates
from bough.core.kv import TablePlaces, Window
from bough.core.step import FIRST_DRAFT, FROM_DEVICE, I32, LogprobArrays, Mask, Outcome, RunnerLimits, SlotSetup, Step

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


def _terms(tokens: npt.NDArray[np.int64], start: int) -> U64:
    """The contribution of each of these tokens, the first of which is at `start`, to the hash."""
    with np.errstate(over="ignore"):
        terms: U64 = (tokens + 3).astype(np.uint64) * _powers(start + len(tokens))[start : start + len(tokens)]
    return terms


def _sums(before: int, tokens: npt.NDArray[np.int64], start: int) -> U64:
    """The sums up to each of these tokens."""
    with np.errstate(over="ignore"):
        sums: U64 = np.cumsum(_terms(tokens, start), dtype=np.uint64) + np.uint64(before)
    return sums


def _mixed(value: int) -> int:
    value ^= value >> 29
    value = value * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 32


def prefix_hash(prefix: npt.NDArray[np.int64]) -> int:
    """64 bits that depend on every token and its place."""
    return _mixed(int(_terms(prefix, 0).sum(dtype=np.uint64)))


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
    return _score(prefix_hash(prefix), token)


def _score(hashed: int, token: int) -> float:
    return -float((hashed ^ token * 2654435761) % 1000) / 64.0


def lone_output(
    prompt: Sequence[int],
    *,
    vocab_size: int,
    limit: int,
    stops: Sequence[int] = (),
    min_new: int = 0,
    marks: Sequence[int] = (),
) -> tuple[list[int], str]:
    """The oracle's answer to a request that runs alone, and why it ends. `marks`: by token of the prompt, of media that
    cross attention reads; answers have the last one."""
    tokens, output = [each + mark for each, mark in zip_longest(prompt, marks, fillvalue=0)], []
    mark = marks[-1] if marks else 0
    for count in range(1, limit + 1):
        token = pick(prefix_hash(np.array(tokens, np.int64)), vocab_size)
        output.append(token)
        tokens.append(token + mark)
        if token in stops and count > min_new:
            return output, "stop"
    return output, "length"


class OracleLaunched:
    """A step of the oracle. Its device work is done at launch, in order; `wait` only hands it out."""

    def __init__(self, runner: OracleRunner, step: Step, hashes: list[list[int]], outcome: Outcome) -> None:
        self.step = step
        self.needs_masks = len(step.constrained) > 0
        self.reads: dict[int, set[tuple[int, int]]] = {}
        self.writes: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        self.misread: list[tuple[int, str]] = []
        """Slots, and what is wrong with what their rows read."""
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
        yields: Callable[[int], int] | None = None,
        propose: Callable[[list[int], int], list[int]] | None = None,
        is_void: Callable[[int, int], bool] | None = None,
    ) -> None:
        """`yields`: takes how many tokens a decode row could yield, and says how many it does. `propose`: takes a row's
        tokens and a number, and gives as many drafts that the device then has for it. `is_void`: takes a slot and the index
        of the oldest step in flight, and says whether what that yields for the slot is dropped: such a row had begun with
        tokens that did not come, and may read anything of its own."""
        self.limits = limits
        self._yields = yields
        self._propose = propose
        self._is_void = is_void
        self._drafts: dict[int, list[int]] = {}
        self.violations: list[str] = []
        self.num_tokens = 0
        """Tokens computed, for tests of sharing."""
        self._pooling = pooling
        self._fail_launch = fail_launch
        self._fail_wait = fail_wait
        self._layout = limits.layout
        self._kv = np.full((limits.num_pages, limits.page_size), _NOTHING, np.int64)
        self._sum = np.zeros((limits.num_pages, limits.page_size), np.uint64)
        self._position = np.full((limits.num_pages, limits.page_size), _NOTHING, np.int64)
        """Where in its request each token in memory is."""
        self._stands = np.full((limits.num_pages, limits.page_size), _NOTHING, np.int64)
        """The position that each was rotated by."""
        self._media = OracleMedia(limits)
        self._states = OracleStates(limits)
        places = TablePlaces(self._layout, limits.num_slots, limits.pages_per_slot)
        self._flat = np.zeros(places.size, np.int64)
        self._tables, self._sizes, at = [], [], 0
        for parts in self._layout.line_parts:
            shape = (limits.num_slots + 1, limits.pages_per_slot * parts)
            self._tables.append(self._flat[at : at + shape[0] * shape[1]].reshape(shape))
            self._sizes.append(limits.page_size // parts)
            at += shape[0] * shape[1]
        self._media_tables, self._media_sizes = [], []
        widths = self._layout.line_widths(limits.pages_per_slot)[len(self._tables) :]
        for parts, width in zip(self._layout.fixed_parts, widths, strict=True):
            table = self._flat[at : at + (limits.num_slots + 1) * width].reshape(-1, width)
            self._media_tables.append(table)
            self._media_sizes.append(limits.page_size // parts)
            at += table.size
        lifetimes = [group.lifetime for group in limits.groups for _ in group.layers]
        self._window_of = {line: each for line, each in enumerate(lifetimes) if isinstance(each, Window)}
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
        self._flat[step.table_at] = step.table_pages
        for moves in step.moves:
            flat = self._kv.reshape(-1)
            flat[moves.target] = flat[moves.source]
            self._position.reshape(-1)[moves.target] = _ANYWHERE
            self._stands.reshape(-1)[moves.target] = _ANYWHERE
            if (flat[moves.target] == _NOTHING).any():
                self._note(step, "moves memory that was never written")
        if len(step.copy_from):
            for memory in (self._kv, self._sum, self._position, self._stands):
                memory[step.copy_to] = memory[step.copy_from]
        self._media.begin(step)
        self._states.begin(step)
        fresh = set()
        for setup in step.setups:
            if setup.slot not in self._setups or self._setups[setup.slot].rng_seed != setup.rng_seed:
                fresh.add(setup.slot)
            self._setups[setup.slot] = setup
            fresh.add(setup.slot)
        rows = len(step.slots)
        width = 1 + (int(step.drafts.max()) if len(step.drafts) else 0)
        outcome = Outcome(tokens=np.zeros((rows, width), np.int32), counts=np.zeros(rows, np.int32))
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

    def _forward(self, step: Step, fresh: set[int], launched: OracleLaunched, outcome: Outcome) -> list[list[int]]:
        inputs = np.split(self._media.tokens(step), np.cumsum(step.num_query)[:-1])
        firsts = (np.cumsum(step.num_query) - step.num_query).tolist()
        contexts = []
        self._write_media(step, launched)
        for row, slot in enumerate(step.slots.tolist()):
            context = self._context(step, row, slot, fresh)
            inputs[row] = self._resolved(step, slot, inputs[row])
            inputs[row] += self._marks(step, slot, firsts[row], len(inputs[row]), launched)
            stands = self._media.stands_at(step, slot, firsts[row], np.arange(context, context + len(inputs[row])))
            for line in range(len(self._tables)):
                self._write(step, slot, line, context, inputs[row], stands, launched)
            self._length[slot] = context + len(inputs[row])
            contexts.append(context)
        self.num_tokens += len(step.tokens)
        hashes = []
        scored: list[tuple[int, int, float]] = []
        wanted = dict(zip(step.prompt_logprobs.tolist(), step.following.tolist(), strict=True))
        for row, slot in enumerate(step.slots.tolist()):
            sums = self._read(slot, contexts[row], inputs[row], launched)
            if self._states.kept:
                self._advance(row, slot, contexts[row], inputs[row], sums, launched)
            hashed = [_mixed(int(each)) for each in sums]
            hashes.append(hashed[-1 - _num_drafts(step, row) :])
            if row in wanted:
                scored += self._score_prompt(step, row, slot, inputs[row], hashed, wanted[row])
            self._hidden(step, row, slot, contexts[row], hashed, outcome)
        outcome.prompt_logprobs = _arrays(scored) if wanted else None
        return hashes

    def _write_media(self, step: Step, launched: OracleLaunched) -> None:
        """Puts media that are new to cross attention into their pages."""
        values = self._media.fresh(step)
        if not len(values) or step.media is None:
            return
        for places, size in zip(step.media.fixed_at, self._media_sizes, strict=True):
            pages, offsets = places // size, places % size
            if (pages == 0).any() or len(np.unique(places)) != len(places):
                self._note(step, "writes media to page 0, or several to one place")
            for other in self._unsettled:
                if other.reads.keys() & set(pages.tolist()):
                    self._note(step, f"writes media to pages that step {other.step.index} reads")
            self._kv[pages, offsets] = values
            launched.writes.append((pages, offsets))

    def _marks(self, step: Step, slot: int, first: int, count: int, launched: OracleLaunched) -> npt.NDArray[np.int64]:
        """Of the media that the tokens of a row see, which are `count` from `first` on in the step."""
        marks = np.full(count, self._mark(step, slot, 0, int(self._media.lengths[slot]), launched))
        for seen, column, length, begin, num in [] if step.media is None else step.media.sights.tolist():
            if seen == slot:
                marks[begin - first : begin - first + num] = self._mark(step, slot, column, length, launched)
        return marks

    def _mark(self, step: Step, slot: int, column: int, length: int, launched: OracleLaunched) -> int:
        """Of the media that cross attention reads from a column on."""
        at, found = column * self.limits.page_size + np.arange(length), []
        for table, size in zip(self._media_tables, self._media_sizes, strict=True):
            pages, offsets = table[slot, at // size], at % size
            for page in set(pages.tolist()):
                launched.reads.setdefault(page, set()).add((slot, self._setups[slot].rng_seed))
            values = self._kv[pages, offsets]
            if (values == _NOTHING).any():
                self._note(step, f"slot {slot} reads media that were never written")
            found.append(media_mark(values))
        if len(set(found)) > 1:
            self._note(step, f"slot {slot} reads other media in some lines than in the first")
        return found[0] if found else 0

    def _write(
        self,
        step: Step,
        slot: int,
        line: int,
        context: int,
        tokens: npt.NDArray[np.int64],
        stands: npt.NDArray[np.int64],
        launched: OracleLaunched,
    ) -> None:
        """Puts a row's tokens, which stand at these positions, into the pages of a line, with the sums up to them."""
        size, table = self._sizes[line], self._tables[line][slot]
        at = np.arange(context, context + len(tokens))
        pages = table[at // size]
        self._check_writes(step, slot, set(pages.tolist()))
        window, before = self._window_of.get(line), 0
        if context and window is not None and window.first_needed(context) < context:
            before = int(self._sum[table[(context - 1) // size], (context - 1) % size])
        elif context:  # a line in which the token sees nothing before itself has it from one that keeps all
            source = line if window is None else 0
            before = int(_terms(self._prefix(slot, context, source), 0).sum(dtype=np.uint64))
        self._kv[pages, at % size] = tokens
        self._sum[pages, at % size] = _sums(before, tokens, context)
        self._position[pages, at % size] = at
        self._stands[pages, at % size] = stands
        launched.writes.append((pages, at % size))

    def _read(self, slot: int, context: int, tokens: npt.NDArray[np.int64], launched: OracleLaunched) -> U64:
        """The sums up to each of the row's tokens, as all lines have them."""
        length = context + len(tokens)
        me = (slot, self._setups[slot].rng_seed)
        found: list[U64] = []
        for line in range(len(self._tables)):
            window = self._window_of.get(line)
            first = 0 if window is None else window.first_needed(context)
            at = np.arange(first, length)
            size = self._sizes[line]
            pages, offsets = self._tables[line][slot, at // size], at % size
            for page in set(pages.tolist()):
                launched.reads.setdefault(page, set()).add(me)
            if (self._kv[pages, offsets] == _NOTHING).any():
                launched.misread.append((slot, "reads memory that was never written"))
            positions = self._position[pages, offsets]
            if ((positions != at) & (positions != _ANYWHERE)).any():
                launched.misread.append((slot, "reads memory of other positions"))
            self._check_stands(slot, first, pages, offsets, launched)
            sums = self._sum[pages, offsets]
            if window is None:
                sums = _sums(0, self._kv[pages, offsets], 0)
            elif (sums[1:] - sums[:-1] != _terms(self._kv[pages, offsets], first)[1:]).any():
                launched.misread.append((slot, "reads memory of another request"))
            found.append(sums[context - first :])
        for line, sums in enumerate(found):
            if (sums != found[0]).any():
                launched.misread.append((slot, f"has other tokens in line {line} than in the first"))
        return found[0]

    def _advance(
        self, row: int, slot: int, context: int, tokens: npt.NDArray[np.int64], sums: U64, launched: OracleLaunched
    ) -> None:
        """Moves the row's state on; it must be of the prefix that the row's pages hold."""
        own = _sums(max(self._states.take_in(slot, context), 0), tokens, context)
        problem = self._states.advance(launched.step, row, slot, context, own)
        if not problem and (own != sums).any():
            problem = "has another prefix's state"
        if problem:
            launched.misread.append((slot, problem))

    def _check_stands(
        self,
        slot: int,
        first: int,
        pages: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        launched: OracleLaunched,
    ) -> None:
        """Tokens from `first` on, as they lie in a line, must have been rotated by the positions that follow from them."""
        stands = self._stands[pages, offsets]
        expected = np.arange(first, first + len(stands))
        if self._media.axes:  # of a window, what is before it is not known: neither is where its first token stands
            expected = positions_of(self._kv[pages, offsets]) + (int(stands[0]) if first else 0)
        if ((stands != expected) & (stands != _ANYWHERE)).any():
            launched.misread.append((slot, "reads memory that stands elsewhere"))

    def _context(self, step: Step, row: int, slot: int, fresh: set[int]) -> int:
        """KV tokens of a row before the step: for decode rows the device's number, of which the step has only an upper
        bound."""
        given, own = int(step.context[row]), int(self._length[slot])
        if row >= step.num_decodes:
            if slot not in fresh and given != own:
                self._note(step, f"slot {slot} has {own} tokens, the step says {given}")
            return given
        if own > given:
            self._note(step, f"slot {slot} has {own} tokens, the step says at most {given}")
        if step.tokens[int(step.num_query[:row].sum())] != FROM_DEVICE:
            self._note(step, f"slot {slot} does not go on from its newest token")
        return own

    def _resolved(self, step: Step, slot: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Ids of the row's tokens, those included that the device has."""
        drafts = self._drafts.get(slot, [])
        if (ids < FIRST_DRAFT - len(drafts) + 1).any():
            self._note(step, f"slot {slot} has no such draft")
        return np.array(
            [self._last[slot] if i == FROM_DEVICE else drafts[FIRST_DRAFT - i] if i < 0 else i for i in ids], np.int64
        )

    def _prefix(self, slot: int, length: int, line: int = 0) -> npt.NDArray[np.int64]:
        """The row's tokens as read through its pages, of a line that keeps all."""
        size = self._sizes[line]
        return self._kv[self._tables[line][slot, : -(-length // size)], :size].reshape(-1)[:length]

    def _score_prompt(
        self, step: Step, row: int, slot: int, tokens: npt.NDArray[np.int64], hashed: list[int], following: int
    ) -> list[tuple[int, int, float]]:
        spec = self._setups[slot].logprobs
        if spec is None:
            self._note(step, f"slot {slot} is scored and did not ask for it")
            return []
        predicted = [*tokens.tolist()[1:], following] if following >= 0 else tokens.tolist()[1:]
        first = max(0, spec.start - 1 - int(step.context[row]))
        return [(row, t, _score(hashed[at], t)) for at, t in enumerate(predicted) if at >= first]

    def _hidden(self, step: Step, row: int, slot: int, context: int, hashed: list[int], outcome: Outcome) -> None:
        kind = self._setups[slot].hidden_states
        if kind:
            first = 0 if kind == "all" else len(hashed) - 1 - _num_drafts(step, row)
            states = [[float(context + at), float(hashed[at] % 997)] for at in range(first, len(hashed))]
            outcome.hidden_states[row] = np.array(states, np.float32)

    def finish(self, step: Step, hashes: list[list[int]], outcome: Outcome, masks: Mask | None) -> None:
        """Samples and verifies: the second half of a step."""
        mask_of, at = {}, 0
        for row in step.constrained.tolist() if masks is not None else ():
            mask_of[row] = masks[at : at + 1 + _num_drafts(step, row)]  # type: ignore[index]
            at += len(mask_of[row])
        if masks is not None and at != len(masks):
            self._note(step, f"it has {at} constrained samples and {len(masks)} masks")
        scored = []
        for row in np.flatnonzero(step.samples).tolist():
            slot = int(step.slots[row])
            if self._pooling:
                outcome.embeddings[row] = np.array([hashes[row][0] % 1009, self._length[slot]], np.float32)
                continue
            scored += self._verify(step, row, slot, hashes[row], outcome, mask_of.get(row))
            self._leave_drafts(step, row, slot, outcome)
        outcome.output_logprobs = _arrays(scored) if scored else None

    def _leave_drafts(self, step: Step, row: int, slot: int, outcome: Outcome) -> None:
        """What a proposer does behind a row that samples. Like one, it writes to the room behind the row's tokens."""
        if self._propose is None or step.proposals < 0:
            return
        length, room = int(self._length[slot]), int(step.room[row])
        for table, size in zip(self._tables, self._sizes, strict=True):
            pages = table[slot, -(-length // size) : room // size]
            self._check_writes(step, slot, set(pages.tolist()))
            self._kv[pages] = _NOTHING
        said = [*self._prefix(slot, length).tolist(), int(self._last[slot])]
        had = self._drafts.get(slot, [])
        left = self._propose(said, step.proposals) if outcome.counts[row] else (had + [0] * step.proposals)
        self._drafts[slot] = left[: step.proposals]
        if step.proposals:
            if outcome.drafts is None:
                outcome.drafts = np.zeros((step.num_rows, step.proposals), np.int32)
            outcome.drafts[row] = self._drafts[slot]

    def _verify(
        self, step: Step, row: int, slot: int, hashes: list[int], outcome: Outcome, masks: Mask | None
    ) -> list[tuple[int, int, float]]:
        """Yields the row's tokens up to the first that is not its next draft. Returns the scores of all of its samples."""
        length, num_drafts = int(self._length[slot]), len(hashes) - 1
        drawn: list[int] = []
        goes_on, count = True, 0
        for place, hashed in enumerate(hashes):
            goes_on = goes_on and (place == 0 or drawn[-1] == self._token(slot, length - num_drafts + place - 1))
            token = pick(hashed, self.limits.vocab_size, masks[place] if masks is not None and goes_on else None)
            drawn.append(token)
            count += goes_on
        if row < step.num_decodes and self._yields is not None:
            count = self._yields(count)
        outcome.tokens[row, : len(drawn)] = drawn
        outcome.counts[row] = count
        if row < step.num_decodes:
            self._length[slot] = length - num_drafts - (0 if count else 1) + max(count - 1, 0)
        if count:
            self._last[slot] = drawn[count - 1]
        if self._setups[slot].logprobs is None:
            return []
        return [(row, t, _score(hashed, t)) for hashed, t in zip(hashes, drawn, strict=True)]

    def _token(self, slot: int, at: int) -> int:
        """A token of the row, of which every line has what is as recent as this."""
        size = self._sizes[0]
        return int(self._kv[self._tables[0][slot, at // size], at % size])

    def waited(self, launched: OracleLaunched) -> Outcome:
        if not self._unsettled or self._unsettled[0] is not launched:
            self.violations.append(f"step {launched.step.index} was waited for out of order")
        else:
            self._unsettled.pop(0)
        step = launched.step
        for slot, what in launched.misread:
            if self._is_void is None or not self._is_void(slot, step.index):
                self._note(step, f"slot {slot} {what}")
        if self._fail_wait is not None and (error := self._fail_wait(step)) is not None:
            self._spoil(launched)
            raise error
        return launched._outcome

    def _spoil(self, launched: OracleLaunched) -> None:
        """A failed step leaves garbage where it wrote."""
        for pages, offsets in launched.writes:
            self._kv[pages, offsets] = _GARBAGE
            self._sum[pages, offsets] = 0
        self._last[launched.step.slots] = _GARBAGE
        self._media.spoil(launched.step)
        self._states.spoil(launched.step)

    # -- the contract -----------------------------------------------------------------------------

    def _note(self, step: Step, what: str) -> None:
        self.violations.append(f"step {step.index}: {what}")

    def _check(self, step: Step) -> None:
        limits = self.limits
        rows = step.num_rows
        least = 0 if self._window_of else 1  # columns that are not there stand in a row's table, behind its window
        if any(launched.needs_masks for launched in self._unsettled):
            self._note(step, "launched before the step before it was sampled")
        for bad, what in (
            (step.index <= self._index, "its index does not rise"),
            (len(set(step.slots.tolist())) != rows, "a slot appears twice"),
            ({len(step.num_query), len(step.context), len(step.samples)} != {rows}, "its columns differ in length"),
            (int(step.num_query.sum()) != len(step.tokens), "tokens and num_query differ"),
            (rows == 0 or bool((step.num_query < 1).any()), "a row brings no token"),
            (len(step.tokens) > limits.max_step_tokens, f"{len(step.tokens)} tokens are too many"),
            (len(step.drafts) not in (0, step.num_decodes), "its drafts are not those of its decode rows"),
            (
                bool((step.num_query[: step.num_decodes] != (1 + step.drafts if len(step.drafts) else 1)).any()),
                "a decode row brings other tokens than its newest and its drafts",
            ),
            (not step.samples[: step.num_decodes].all(), "a decode row does not sample"),
            (bool((step.context + step.num_query > limits.context_length).any()), "a row outgrows the context"),
            (len(step.table_at) != len(step.table_pages), "table writes differ in length"),
            (bool(((step.table_pages < least) | (step.table_pages >= limits.num_pages)).any()), "no such page"),
            (bool(((step.table_at < 0) | (step.table_at >= self._flat.size)).any()), "no such table entry"),
            (len(set(step.table_at.tolist())) != len(step.table_at), "a table entry is written twice"),
            (bool((step.tokens[step.num_decode_tokens :] < 0).any()), "no such token"),
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
        page_size = self.limits.page_size
        reached = np.zeros((2, step.num_rows), np.int32)  # levels and tokens
        for span, (level, first, last) in enumerate(zip(shared.level, shared.first, shared.last, strict=True)):
            rows = shared.rows[shared.start[span] : shared.start[span + 1]]
            pages = self._tables[0][step.slots[rows], : last // self._sizes[0]]
            if first % page_size or last % page_size or first >= last or (pages != pages[0]).any():
                self._note(step, f"span {span} does not share tokens {first} to {last}")
            if (reached[0, rows] != level).any() or (reached[1, rows] != first).any() or len(set(rows.tolist())) < 2:
                self._note(step, f"span {span} does not follow the spans before it")
            if (step.context[rows] < last).any() or rows.max() >= step.num_decodes:
                self._note(step, f"span {span} is not one of decode rows that long")
            reached[0, rows], reached[1, rows] = level + 1, last


def _num_drafts(step: Step, row: int) -> int:
    return int(step.drafts[row]) if row < len(step.drafts) else 0


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

    needs_masks = False

    def __init__(self, step: Step, token: int) -> None:
        self.step = step
        self._token = token

    def sample(self, masks: Mask) -> None:
        raise RuntimeError("this runner has no masks")

    def wait(self) -> Outcome:
        tokens = np.full((self.step.num_rows, 1), self._token, np.int32)
        return Outcome(tokens=tokens, counts=self.step.samples.astype(np.int32))


class NullRunner:
    """Answers at once with the step's number, to measure everything but the device."""

    def __init__(self, limits: RunnerLimits) -> None:
        self.limits = limits

    def launch(self, step: Step) -> NullLaunched:
        return NullLaunched(step, step.index % self.limits.vocab_size)

    def clear(self) -> None:
        """Nothing is queued."""
