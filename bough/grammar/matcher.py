"""One request's state in its grammar: masks and forced tokens. Where a grammar allows only one text, it is tokenised as
the tokenizer would, and only those tokens are allowed: the model then sees the spelling it was trained on, and the
scheduler can jump ahead. The last of these tokens are left to the model if one allowed token covers the same text and
more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from bough.core.step import I32
from bough.grammar.backend import GrammarBackend, NativeMatcher
from bough.grammar.bits import clear_bit, count_bits, first_bit, has_bit, set_bit
from bough.grammar.sights import FEW, Sight, Sights, make_sights
from bough.grammar.states import LOST, Spot, States
from bough.grammar.vocabulary import Vocabulary

_LISTED = 64
"""Maximum number of allowed tokens that are examined individually."""
_CONTEXT = 4
"""Number of tokens before forced text that are considered when it is tokenised."""
_OPEN_END = 3
"""Number of last tokens of forced text that may be replaced by a longer token."""


class TokenMatcher:
    """A `core.grammar.Matcher`. If the places of its grammar are numbered, it shares the masks of places with other
    matchers."""

    __slots__ = ("_chosen", "_ended", "_forced", "_mask", "_places", "_sight", "_sights", "_states", "_vocabulary",
                 "native", "tokens")  # fmt: skip

    def __init__(
        self,
        native: NativeMatcher,
        vocabulary: Vocabulary,
        states: States | None = None,
        sights: Sights | None = None,
    ) -> None:
        self.native = native
        self.tokens: list[int] = []
        """What was accepted."""
        self._vocabulary = vocabulary
        self._states = states if sights is not None else None
        self._sights = sights
        self._places = [states.start] if states is not None and sights is not None else [LOST]
        """The places before each token and after the last."""
        self._ended = False
        self._sight: Sight | None = self.find_sight()
        """What the grammar allows next; computed on demand."""
        self._mask: I32 | None = None
        """The mask without tokens that are only the beginning of another allowed token, if there were such tokens."""
        self._forced: list[int] | None = None
        self._chosen = False
        """The last token was chosen by the model, not forced."""

    def accept(self, token: int) -> bool:
        if self._ended:
            return False
        places = self._places
        if token in self._vocabulary.tokens.stop_ids:
            if not self._is_complete():
                return False
            self._ended = True
            places.append(places[-1])
        elif not self.native.accept(token):
            return False
        elif self._states is not None:
            places.append(self._states.after(places[-1], self._vocabulary.bytes_of(token)))
        else:
            places.append(LOST)
        self.tokens.append(token)
        self._chosen = self._forced == []
        self._mask = self._forced = None
        self._sight = None if self._ended else self.find_sight()
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens <= 0:
            return
        del self.tokens[-num_tokens:]
        del self._places[-num_tokens:]
        self.native.rollback(num_tokens - self._ended)
        self._ended = self._chosen = False
        self._mask = self._forced = None
        self._sight = self.find_sight()

    def fill_mask(self, out: I32) -> None:
        sight = self._sight
        if sight is not None and sight.is_open:
            self._forced = []
            out[:] = sight.mask
            return
        forced = self._certain()
        if forced:
            out[:] = 0
            set_bit(out, forced[0])
        else:
            out[:] = self._allowed()

    @property
    def is_open(self) -> bool:
        sight = self._sight
        return sight is not None and sight.is_open

    def is_terminated(self) -> bool:
        if self._ended:
            return True
        return self._is_complete() and self.look().is_end

    def forced(self) -> list[int]:
        return list(self._certain())

    def ends_with(self, tokens: Sequence[int]) -> bool:
        spot, key = self._spot(), tuple(tokens)
        found = spot.ends.get(key)
        if found is None:
            found = spot.ends[key] = self._would_end(key)
        return found

    def _would_end(self, tokens: tuple[int, ...]) -> bool:
        accepted, ends = 0, False
        for token in tokens:
            if not self.accept(token):
                self.rollback(accepted)
                raise ValueError(f"it forces token {token} and does not accept it")
            accepted += 1
        ends = self.is_terminated()
        self.rollback(accepted)
        return ends

    def respell(self) -> int | None:
        text = self._certain_text() if self._chosen else ""
        if not text:
            return None
        token = self.tokens[-1]
        said = self._vocabulary.bytes_of(token)
        ids = self._cut(self.tokens[-1 - _CONTEXT : -1], said + text.encode())
        if not ids or not self._longer(ids[0], token):
            return None
        before = np.empty(self.num_words, np.int32)
        self.native.rollback(1)
        self.native.fill(before)
        settled = self._settled(ids, before)
        if not self.native.accept(token):
            raise ValueError(f"token {token} was accepted and is not accepted again")
        return settled[0] if settled else None

    # -- looking ----------------------------------------------------------------------------------

    @property
    def needs_sight(self) -> bool:
        return self._sight is None and not self._ended

    @property
    def num_words(self) -> int:
        """Width of a mask."""
        return -(-self._vocabulary.size // 32)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._vocabulary.tokens.stop_ids

    @property
    def view(self) -> tuple[int, int] | None:
        """Number of the place in the grammar: equal for all matchers with the same continuations. None: unknown."""
        states, place = self._states, self._places[-1]
        return (states.number, states.view(place)) if states is not None and place != LOST else None

    def find_sight(self) -> Sight | None:
        """The cached continuation of this place, if there is one."""
        view = self.view if self._sights is not None else None
        return self._sights.find(view) if self._sights is not None and view is not None else None

    def give_sight(self, sight: Sight) -> None:
        """Stores the sight of this place, which was computed together with others', for all matchers that get here."""
        self._sight = sight
        view = self.view
        if self._sights is not None and view is not None:
            self._sights.keep(view, sight)

    def look(self) -> Sight:
        """What the grammar allows next."""
        if self._sight is None:
            masks = np.empty((1, self.num_words), np.int32)
            self.native.fill(masks[0])
            self.give_sight(*make_sights(masks, [self.native], self._vocabulary.tokens.stop_ids))
            assert self._sight is not None, "it has just been given"
        return self._sight

    def _allowed(self) -> I32:
        return self.look().mask if self._mask is None else self._mask

    def _is_complete(self) -> bool:
        return self._sight.is_complete if self._sight is not None else self.native.is_complete()

    def _certain(self) -> list[int]:
        if self._forced is None:
            self._forced = self._look_ahead()
        return self._forced

    def _look_ahead(self) -> list[int]:
        if self._ended:
            return []
        sight = self.look()
        if sight.num_allowed > FEW:
            return []
        spot, forced = self._spot(), []
        text = self._text(spot)
        if text:
            ids = self._cut(self.tokens[-_CONTEXT:], text.encode()) or self._alone(text)
            found = spot.settled.get(ids)
            forced = spot.settled[ids] = self._settled(ids, sight.mask) if found is None else found
        if not forced and not sight.is_complete and sight.num_allowed == 1:
            return [first_bit(sight.mask)]
        if not forced and sight.num_allowed <= _LISTED:
            self._close_detours(sight.mask, spot)
        return forced

    def _spot(self) -> Spot:
        return self._states.spot(self._places[-1]) if self._states is not None else Spot()

    def _text(self, spot: Spot) -> str:
        """What must follow; empty where the answer is complete."""
        if spot.text is None:
            spot.text = "" if self._is_complete() else self.native.certain_text()
        return spot.text

    def _certain_text(self) -> str:
        """Forced text, if it can be tokenised in several ways: not if a single token is allowed, nor if many are."""
        if self._ended or (self._sight is not None and self._sight.num_allowed > FEW):
            return ""
        text = self._text(self._spot())
        return text if text and 1 < count_bits(self._allowed()) <= FEW else ""

    def _cut(self, before: Sequence[int], following: bytes) -> tuple[int, ...]:
        """Tokens of `following` as the tokenizer splits it after `before`; empty if it would merge the two."""
        vocabulary = self._vocabulary
        said = b"".join(vocabulary.bytes_of(token) for token in before)
        try:
            ids = vocabulary.cut((said + following).decode())
        except UnicodeDecodeError:
            return ()
        length = 0
        for at, token in enumerate(ids):
            if length == len(said):
                return ids[at:]
            length += len(vocabulary.bytes_of(token))
        return ()

    def _alone(self, text: str) -> tuple[int, ...]:
        """Tokens of a text that does not begin at a token boundary of the tokenizer."""
        return self._vocabulary.cut(text)

    def _longer(self, token: int, other: int) -> bool:
        return len(self._vocabulary.bytes_of(token)) > len(self._vocabulary.bytes_of(other))

    def _close_detours(self, mask: I32, spot: Spot) -> None:
        """If few tokens are allowed, removes those that are only the beginning of another allowed token within a word:
        the tokenizer would not stop there if the rest is forced."""
        if spot.detours is None:
            spot.detours = tuple(self._find_detours(mask))
        for token, said in spot.detours:
            ids = self._cut(self.tokens[-_CONTEXT:], said)
            if ids and self._longer(ids[0], token) and has_bit(mask, ids[0]):
                if self._mask is None:
                    mask = self._mask = mask.copy()
                clear_bit(mask, token)

    def _find_detours(self, mask: I32) -> Iterator[tuple[int, bytes]]:
        """Allowed tokens that have only one continuation, with the text of that continuation."""
        native = self.native
        for token, name in self._vocabulary.stems(mask):
            if native.accept(token):
                text = "" if native.is_complete() else native.certain_text()
                native.rollback(1)
                if text:
                    yield token, name + text.encode()

    def _settled(self, ids: tuple[int, ...], mask: I32) -> list[int]:
        """The tokens up to the point where the model might choose a longer one."""
        native, vocabulary = self.native, self._vocabulary
        settled: list[int] = []
        for at, token in enumerate(ids):
            if at >= len(ids) - _OPEN_END:
                if at:
                    mask = np.empty_like(mask)
                    native.fill(mask)
                if vocabulary.extends(b"".join(vocabulary.bytes_of(each) for each in ids[at:]), mask):
                    break
            if not native.accept(token):
                break
            settled.append(token)
        native.rollback(len(settled))
        return settled


def prepare(matchers: Sequence[TokenMatcher], backend: GrammarBackend) -> None:
    """Computes the continuations of places that are not cached yet, for several matchers at once."""
    wanted = [each for each in matchers if each.needs_sight]
    if len(wanted) < 2:
        return
    alike: dict[object, list[TokenMatcher]] = {}
    for each in wanted:
        alike.setdefault(each.view or id(each), []).append(each)
    natives = [some[0].native for some in alike.values()]
    masks = np.empty((len(natives), wanted[0].num_words), np.int32)
    backend.fill_all(natives, masks)
    for some, sight in zip(alike.values(), make_sights(masks, natives, wanted[0].stop_ids), strict=True):
        for each in some:
            each.give_sight(sight)
