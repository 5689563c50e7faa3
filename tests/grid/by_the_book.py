"""What a request must get when it is alone in the world: transformers' logits and the definitions of the API, nothing else.

An answer is judged token by token on the logits of its own whole sequence, computed at once: if every token is the one that
the definitions choose after those before it, the answer is the one that decoding alone would give.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from in_process import Setup
from tokenizers import pre_tokenizers
from whole_engine import EOS, VOCAB, Asked, Family

from bough.core.grammar import Matcher
from bough.core.messages import TokenLogprobs

Floats = npt.NDArray[np.float64]
CLOSE = 2e-4
SPECIAL = (0, 1, EOS)


@dataclass(kw_only=True)
class Params:
    """Native sampling parameters with their documented defaults, read without the project's own reader."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    sampling_seed: int | None = None
    n: int = 1
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    stop_regex: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[str, float] = field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    json_schema: str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    stream_interval: int = 1

    @property
    def constrained(self) -> bool:
        return self.json_schema is not None or self.regex is not None or self.choice is not None

    @property
    def penalised(self) -> bool:
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


@dataclass
class Pages:
    """What bounds an answer's length besides what was asked for."""

    context_length: int
    capacity: int

    @classmethod
    def of(cls, setup: Setup, num_pages: int) -> Pages:
        per_slot = -(-setup.context_length // setup.page_size)
        return cls(setup.context_length, min(num_pages - 1, per_slot) * setup.page_size)


class Thinking:
    """Reasoning that goes on until its end mark; after `budget` tokens the mark, or what is missing of it, must come."""

    def __init__(self, prompt: list[int], asked: dict[str, Any] | None, *, constrained: bool) -> None:
        self.mark: list[int] = list(asked["end"]) if asked else []
        self.budget: int = asked["budget"] if asked else -1
        self.seen = prompt[len(prompt) - len(self.mark) + 1 :] if len(self.mark) > 1 else []
        self.count = 0
        self.on = bool(self.mark) and (constrained or self.budget >= 0)

    def must(self) -> int | None:
        """The only token that may come next."""
        if not self.on or self.budget < 0 or self.count < self.budget:
            return None
        size = len(self.mark)
        done = max(n for n in range(size) if self.seen[len(self.seen) - n :] == self.mark[:n])
        return self.mark[done]

    def take(self, token: int) -> None:
        self.seen = [*self.seen, token]
        self.count += 1
        if self.seen[len(self.seen) - len(self.mark) :] == self.mark:
            self.on = False


class Book:
    """The definitions, for one architecture."""

    def __init__(self, family: Family) -> None:
        self.family = family
        unicode_of = _byte_letters()
        names = {number: name for name, number in family.library.get_vocab(with_added_tokens=True).items()}
        self.spelled = [
            b"" if number not in names
            else names[number].encode() if number in SPECIAL
            else bytes(unicode_of[letter] for letter in names[number])
            for number in range(VOCAB)
        ]  # fmt: skip

    @torch.inference_mode()
    def run(self, sequence: Sequence[int]) -> tuple[Floats, Floats]:
        """Logits and states after the last norm of every position."""
        out = self.family.theirs(torch.tensor([list(sequence)]), output_hidden_states=True)
        return out.logits[0].double().numpy(), out.hidden_states[-1][0].double().numpy()

    # -- the whole answer ---------------------------------------------------------------------------------------------

    def check(self, asked: Asked, index: int, pages: Pages, matcher: Matcher | None, *, may_fail: bool = False) -> None:
        """Raises `AssertionError` that says what is wrong with an answer, if anything is."""
        fields = asked.fields
        params = Params(**(fields.get("sampling_params") or {}))
        if params.constrained and "thinking" not in fields:
            params.ignore_eos = False  # it completes the grammar
        whole, prompt, output = asked.whole, asked.prompt, asked.output
        end = whole.end
        assert end is not None
        assert end.reason != "error" or may_fail, f"it failed: {end.message}"
        sequence = prompt + output
        logits, states = self.run(sequence)
        limit = max(0, min(params.max_new_tokens, pages.context_length - len(prompt), pages.capacity - len(prompt) + 1))
        assert len(output) <= limit, f"{len(output)} tokens of at most {limit}"
        shaped = [
            self.shape(logits[len(prompt) - 1 + at], prompt, output[:at], params) for at in range(len(output))
        ]  # fmt: skip
        jumps = not (params.penalised or params.bad_words or fields.get("return_logprob"))
        jumps = jumps and not fields.get("return_hidden_states")
        thinking = Thinking(prompt, fields.get("thinking"), constrained=params.constrained)
        ending = self.follow(shaped, output, params, matcher, thinking, index, limit, jumps)
        self.check_end(asked, params, ending, len(output), limit)
        assert end.reasoning_tokens == _before_mark(output, thinking.mark), "wrong number of reasoning tokens"
        assert end.prompt_tokens == len(prompt)
        assert end.completion_tokens == len(output), f"{end.completion_tokens} counted of {len(output)}"
        assert end.cached_tokens < len(prompt)
        start = fields.get("logprob_start_len", -1)
        if fields.get("return_logprob"):
            if start >= 0:
                assert end.cached_tokens <= max(start - 1, 0) or start >= len(prompt)
            if limit == 0:  # the token that would come is scored, not given
                shaped = [self.shape(logits[len(prompt) - 1], prompt, [], params)]
            if limit or not (fields.get("processed_logprobs") and (params.constrained or fields.get("thinking"))):
                self.check_scores(asked, logits, shaped, params, start)
        else:
            assert whole.logprobs is None
            assert whole.prompt_logprobs is None
        self.check_states(asked, states)
        self.check_json(asked)

    def check_json(self, asked: Asked) -> None:
        """Every object has all that came before it, and the last one has it all."""
        objects, whole = asked.as_json(), asked.whole
        for before, after in pairwise(objects):
            assert after["text"].startswith(before["text"])
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        last, meta = objects[-1], objects[-1]["meta_info"]
        assert last["text"] == whole.text
        assert last["output_ids"] == asked.output
        assert meta["completion_tokens"] == len(asked.output)
        assert meta["prompt_tokens"] == len(asked.prompt)
        if asked.fields.get("return_logprob"):
            scored = [entry[1] for entry in meta["output_token_logprobs"]]
            assert scored == asked.output or (not asked.output and len(scored) <= 1)
            assert meta["output_token_logprobs_length"] == len(scored)
        pieces = asked.as_json(incremental=True)
        assert "".join(piece["text"] for piece in pieces) == whole.text
        assert [token for piece in pieces for token in piece["output_ids"]] == asked.output
        for name, entries in meta.items():
            if name.endswith("_logprobs"):
                assert [entry for piece in pieces for entry in piece["meta_info"][name]] == entries

    def check_states(self, asked: Asked, states: Floats) -> None:
        wanted = asked.fields.get("return_hidden_states")
        got = asked.whole.hidden_states
        if not wanted or asked.cut:
            assert wanted or got is None
            return
        num_output = len(asked.output)
        expected = states[: len(asked.prompt) + max(num_output - 1, 0)]
        if wanted == "last":
            if not num_output:
                return
            assert got, "no hidden state"
            got, expected = got[-1:], expected[-1:]
        assert got is not None, "no hidden states"
        assert len(got) == len(expected), f"{len(got)} hidden states for {len(expected)} tokens"
        assert np.abs(np.array(got) - expected).max() < 20 * CLOSE, "wrong hidden states"

    def check_end(self, asked: Asked, params: Params, ending: tuple[str, Any], count: int, limit: int) -> None:
        end = asked.whole.end
        assert end is not None
        reason, matched = ending
        text, found = self.text_of(asked.output, params, ending)
        if asked.cut:
            assert end.message
        else:
            if found is not None:
                reason, matched = "stop", found
            assert end.reason == reason, f"it ended by {end.reason} ({end.matched!r}), not by {reason} ({matched!r})"
            assert end.matched == matched, f"matched {end.matched!r}, not {matched!r}"
            assert asked.whole.text == text, f"the text is {asked.whole.text!r}, not {text!r}"
        so_far = ""
        for delta in asked.deltas:
            so_far += delta.text
            if not asked.cut:
                assert text.startswith(so_far)

    # -- tokens -------------------------------------------------------------------------------------------------------

    def shape(self, logits: Floats, prompt: list[int], output: list[int], params: Params) -> Floats:
        """The logits that the next token is chosen by, before temperature."""
        out = logits.copy()
        if params.repetition_penalty != 1.0:
            seen = list({*prompt, *output})
            kept = out[seen]
            out[seen] = np.where(kept > 0, kept / params.repetition_penalty, kept * params.repetition_penalty)
        for token in set(output):
            out[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
        for token, bias in params.logit_bias.items():
            out[int(token)] += bias
        if len(output) < params.min_new_tokens:
            out[[*params.stop_token_ids, *([] if params.ignore_eos else [EOS])]] = -math.inf
        if params.allowed_token_ids is not None:
            others = np.ones(len(out), bool)
            others[params.allowed_token_ids] = False
            out[others] = -math.inf
        for word in params.bad_words:
            for form in (word, " " + word.lstrip()):
                ids = self.family.library.encode(form, add_special_tokens=False).ids
                if ids and (len(ids) == 1 or output[1 - len(ids) :] == ids[:-1]):
                    out[ids[-1]] = -math.inf
        return out

    def follow(
        self,
        shaped: list[Floats],
        output: list[int],
        params: Params,
        grammar: Matcher | None,
        thinking: Thinking,
        index: int,
        limit: int,
        jumps: bool,
    ) -> tuple[str, Any]:
        """Checks every token; says how the answer ends by its tokens ("" if it does not)."""
        stops = {*params.stop_token_ids, *([] if params.ignore_eos else [EOS])}
        seed = None if params.sampling_seed is None else params.sampling_seed + index
        for at, (logits, token) in enumerate(zip(shaped, output, strict=True)):
            matcher = None if thinking.on else grammar
            must = thinking.must()
            if must is not None:
                logits = np.where(np.arange(VOCAB) == must, logits, -math.inf)
                shaped[at] = logits
            elif thinking.on and grammar is not None and not params.ignore_eos and EOS not in thinking.mark:
                logits = np.where(np.arange(VOCAB) == EOS, -math.inf, logits)
                shaped[at] = logits
            if matcher is not None:
                mask = np.empty(-(-VOCAB // 32), np.int32)
                matcher.fill_mask(mask)
                allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
                logits = np.where(allowed, logits, -math.inf)
                shaped[at] = logits
            last = at + 1 == len(output)
            chosen = self.may_choose(logits, params, seed, at)
            is_stop = token in stops and at >= params.min_new_tokens
            if matcher is None or is_stop:
                assert token in chosen, f"token {at} is {token}, not {chosen[:3]}"
                if is_stop:
                    assert last, f"it went on after stop token {token}"
                    return "stop", token
                if thinking.on:
                    thinking.take(token)
                    if not thinking.on and grammar is not None and grammar.is_terminated():
                        return "stop", None
            elif self._accept(matcher, token, chosen, at, jumps=jumps and at + 1 < limit):
                assert last, "it went on after its grammar was complete"
                return "stop", None
        return ("length", None) if len(output) >= limit else ("", None)

    def _accept(self, matcher: Matcher, token: int, chosen: list[int], at: int, *, jumps: bool) -> bool:
        """Shows a grammar the token, which was chosen, or stands for one that was. True: nothing can follow."""
        for candidate in chosen:
            assert matcher.accept(candidate)
            better = matcher.respell() if jumps and not matcher.is_terminated() else None
            if better is not None:
                matcher.rollback(1)
                assert matcher.accept(better)
            if (candidate if better is None else better) == token:
                return matcher.is_terminated()
            matcher.rollback(1)
        raise AssertionError(f"token {at} is {token}, not {chosen[:3]} (constrained)")

    def may_choose(self, logits: Floats, params: Params, seed: int | None, at: int) -> list[int]:
        """The token that is chosen; several where rounding may decide, or chance."""
        best = logits.max()
        assert best > -math.inf, "nothing is allowed"
        if params.temperature == 0.0 or params.top_k == 1:
            return [int(i) for i in np.flatnonzero(logits >= best - CLOSE)]
        scaled = logits / params.temperature
        surely, maybe = self.kept(scaled, params, -1.0), self.kept(scaled, params, 1.0)
        if seed is None:
            return [int(i) for i in np.flatnonzero(maybe)]
        score = scaled + gumbel(seed, at, len(logits))
        slack = CLOSE / min(params.temperature, 1.0) + 1e-3
        best = score[surely].max() if surely.any() else -math.inf
        return [int(i) for i in np.flatnonzero(maybe & (score >= best - slack))]

    def kept(self, scaled: Floats, params: Params, slack: float) -> npt.NDArray[np.bool_]:
        """Which tokens pass top-k, top-p and min-p; with positive `slack` also those that nearly do, with negative only
        those that do for certain."""
        near = slack * CLOSE / min(params.temperature, 1.0)
        mass = np.exp(scaled - scaled.max())
        probability = mass / mass.sum()
        larger = (scaled[None, :] > scaled[:, None] + near).sum(1)
        before = np.array([probability[scaled > value + near].sum() for value in scaled])
        keep = larger < (params.top_k if params.top_k > 0 else len(scaled))
        if params.top_p < 1.0:
            keep &= before < params.top_p + slack * 1e-3
        keep &= mass >= params.min_p * (1.0 - slack * 1e-3)
        return keep & (scaled > -math.inf)

    # -- text ---------------------------------------------------------------------------------------------------------

    def text_of(self, output: list[int], params: Params, ending: tuple[str, Any]) -> tuple[str, str | None]:
        """The answer's text, and the stop string or pattern that ends it."""
        spoken = output
        if ending[0] == "stop" and ending[1] is not None and not params.no_stop_trim:
            spoken = output[:-1]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = ""
        for at, token in enumerate(spoken):
            silent = params.skip_special_tokens and token in SPECIAL
            text += decoder.decode(b"" if silent else self.spelled[token])
            found = self._first_stop(text, params)
            if found is not None:
                start, stop, name = found
                assert at + 1 == len(output), f"it went on after {name!r}"
                return text[: stop if params.no_stop_trim else start], name
        text += decoder.decode(b"", final=True)
        found = self._first_stop(text, params) if ending[0] else None
        if found is not None:  # half a character at the very end
            return text[: found[1] if params.no_stop_trim else found[0]], found[2]
        return text, None

    def _first_stop(self, text: str, params: Params) -> tuple[int, int, str] | None:
        """What is complete first; of those that end together, what began first."""
        found = [(at + len(stop), at, stop) for stop in params.stop if (at := text.find(stop)) >= 0]
        for pattern in params.stop_regex:
            match = re.search(pattern, text)
            if match is not None and match.end() > match.start():
                found.append((match.end(), match.start(), pattern))
        if not found:
            return None
        stop, start, name = min(found)
        return start, stop, name

    # -- scores -------------------------------------------------------------------------------------------------------

    def check_scores(self, asked: Asked, logits: Floats, shaped: list[Floats], params: Params, start: int) -> None:
        prompt, output = asked.prompt, asked.output
        raw = [log_softmax(row) for row in logits]
        scored = raw[len(prompt) - 1 : len(prompt) - 1 + len(shaped)]
        if asked.fields.get("processed_logprobs"):
            warmth = 1.0 if params.temperature == 0.0 or params.top_k == 1 else params.temperature
            scored = [log_softmax(row / warmth) for row in shaped]
        got = asked.whole.logprobs
        if output or (shaped and not asked.cut):
            assert got is not None, "no log-probabilities"
            self._compare(got, output or got.token_ids, list(scored), asked)
        else:
            assert got is None
        got = asked.whole.prompt_logprobs
        if asked.cut and not output:
            return  # it may not have got that far
        if not 0 <= start < len(prompt):
            assert got is None
            return
        assert got is not None, "no log-probabilities of the prompt"
        before = [None if at == 0 else raw[at - 1] for at in range(start, len(prompt))]
        self._compare(got, prompt[start:], before, asked)

    def _compare(self, got: TokenLogprobs, tokens: list[int], rows: list[Floats | None], asked: Asked) -> None:
        top = asked.fields.get("top_logprobs_num", 0)
        wanted = asked.fields.get("token_ids_logprob", [])
        assert got.token_ids == tokens, f"scores of {got.token_ids}, not {tokens}"
        assert len(got.logprobs) == len(tokens)
        assert len(got.top) == (len(tokens) if top else 0)
        assert len(got.chosen) == (len(tokens) if wanted else 0)
        for at, (token, row) in enumerate(zip(tokens, rows, strict=True)):
            value = got.logprobs[at]
            if row is None:
                assert value is None
                continue
            assert value is not None
            assert near(value, row[token]), f"score {at} of token {token} is {value}, not {row[token]}"
            if top:
                best = np.sort(row)[::-1][:top]
                assert len(got.top[at]) == min(top, len(row))
                assert len({token for token, _ in got.top[at]}) == len(got.top[at])
                for (other, score), expected in zip(got.top[at], best, strict=True):
                    assert near(score, expected), f"top score {at}: {score}, not {expected}"
                    assert near(score, row[other])
            if wanted:
                assert [other for other, _ in got.chosen[at]] == list(wanted)
                for other, score in got.chosen[at]:
                    assert near(score, row[other]), f"score {at} of {other}: {score}, not {row[other]}"


def fits(params: Params, text: str, *, whole: bool) -> bool:
    """Is the text what the constraint allows, by the language's own means? Not whole: only regexes and choices can tell."""
    if params.choice is not None:
        return text in params.choice if whole else any(choice.startswith(text) for choice in params.choice)
    if params.regex is not None:
        return re.fullmatch(params.regex, text) is not None if whole else True
    if whole and params.json_schema is not None:
        import jsonschema

        jsonschema.validate(json.loads(text), json.loads(params.json_schema))
    return True


def _before_mark(output: list[int], mark: list[int]) -> int:
    if not mark:
        return 0
    places = [at for at in range(len(output)) if output[at : at + len(mark)] == mark]
    return places[0] if places else len(output)


def near(a: float, b: float) -> bool:
    return a == b or abs(a - b) < CLOSE or (math.isinf(b) and a < -1e30)


def log_softmax(row: Floats) -> Floats:
    top = row.max()
    return row - top - np.log(np.exp(row - top).sum())


def gumbel(seed: int, counter: int, count: int) -> Floats:
    """Noise of one draw: Philox4x32-10 under the seed, block number and draw in the counter, four words a block."""
    low = 0xFFFFFFFF
    out = []
    for block in range(-(-count // 4)):
        c = [block & low, counter & low, (counter >> 32) & low, 0]
        k = [seed & low, (seed >> 32) & low]
        for _ in range(10):
            a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
            c = [(b >> 32) ^ c[1] ^ k[0], b & low, (a >> 32) ^ c[3] ^ k[1], a & low]
            k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
        out += c
    uniform = np.minimum((np.array(out[:count], np.float64) + 0.5) / 2.0**32, 1.0 - 2.0**-24)
    return -np.log(-np.log1p(-uniform))


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes with."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in plain]
    letters |= {chr(256 + at): byte for at, byte in enumerate(others)}
    assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    return letters
