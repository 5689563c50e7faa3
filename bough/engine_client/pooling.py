"""Pooling for all entrypoints: embeddings, classification, reranking, label probabilities. A pooling model returns one
vector per text. A generative model scores by the probabilities of its next token.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from bough.config.pooling_facts import PoolingFacts, RerankTokens, Task
from bough.core import bounds
from bough.core.errors import ConfigError, InvalidRequest, RequestFailed
from bough.core.messages import Delta, Ids, LogprobSpec
from bough.core.sampling import SamplingParams
from bough.engine_client.client import EngineClient
from bough.engine_client.embed_prompt import choose_embed_prompt
from bough.engine_client.endings import as_error
from bough.engine_client.pool_texts import PLAIN, Input, MediaText, PoolOptions, Side, Text, TextEncoder, bad_field
from bough.engine_client.prompt_template import PromptTemplate
from bough.engine_client.request import Request
from bough.engine_client.rerank_prompt import BUILT_IN, Renderer, choose_prompt, label_id
from bough.engine_client.scores import Floats, cosine, probabilities, scaled, shortened, sparse_dot

_NEXT_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
_NOTHING = SamplingParams(max_new_tokens=0, temperature=0.0, ignore_eos=True)
_WORTH_SHARING = 64
"""Minimum number of saved tokens for which a common prefix is computed before the prompts."""
_SEAM_TOKENS = 4
"""Number of tokens by which a text may grow when it is tokenised together with others."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """The result of one text."""

    values: Floats
    prompt_tokens: int
    rid: str
    seconds: float
    media_tokens: Mapping[str, int] = field(default_factory=dict)
    """Of the prompt's tokens: those of media, by kind."""


@dataclass(frozen=True, slots=True)
class PooledScores:
    """Scores of several texts, in their order, and what they cost."""

    scores: list[list[float]]
    prompt_tokens: int
    cached_tokens: int = 0
    """Prompt tokens that were cached, from earlier requests or from the first of these."""


class Pooler:
    """Works on an `EngineClient`, in its event loop."""

    def __init__(
        self,
        engine_client: EngineClient,
        facts: Mapping[str, Any],
        *,
        model: str,
        rerank_template: str = "auto",
        embedding_template: str = "auto",
        delimiter: int = -1,
    ) -> None:
        """`facts`: what the engine said when it was ready. `delimiter`: the token between query and item for requests that
        name none; -1: none. Raises `ConfigError` for a template or a token that can't be used."""
        described, tokens = facts.get("pooling"), facts.get("rerank_tokens")
        self.pooling = msgspec.convert(described, PoolingFacts) if described is not None else None
        self._tokens = msgspec.convert(tokens, RerankTokens) if tokens is not None else None
        self._engine_client = engine_client
        self._texts = TextEncoder(
            engine_client.tokenizers,
            context_length=engine_client.context_length,
            vocab_size=engine_client.vocab_size,
            append_eos=self.pooling is not None and self.pooling.append_eos,
            spelling="own" if self.pooling is None else self.pooling.spelling,
        )
        self._keeps = bool(facts.get("kv_join"))
        self._most_items = 0
        """Tokens of a prompt that ends in several items at most; 0: the engine takes none."""
        if facts.get("score_items"):  # half of the cache: such a prompt must not wait until all others are done
            self._most_items = min(engine_client.context_length - 1, facts["kv_tokens"] // 2)
        self._prompt = choose_prompt(rerank_template, model)
        if self._prompt is None and self.pooling is None:
            self._prompt = BUILT_IN["qwen3" if self._tokens is not None else "plain"]
        self._renderer = Renderer(self._prompt) if self._prompt is not None else None
        self._embed_prompt: PromptTemplate | None = None
        if self.pooling is not None and self.pooling.task == "embed" and not self.pooling.apart:
            self._embed_prompt = choose_embed_prompt(embedding_template, model)
        if not -1 <= delimiter < engine_client.vocab_size:
            raise ConfigError(
                what=f"--multi-item-scoring-delimiter is {delimiter}",
                why=f"the model has {engine_client.vocab_size} tokens",
                fix=f"give a token id from 0 to {engine_client.vocab_size - 1}, or -1 for none",
                param="multi_item_scoring_delimiter",
            )
        self._delimiter = delimiter if delimiter >= 0 else None

    # -- vectors ---------------------------------------------------------------------------------------------------

    async def pool(self, inputs: Sequence[Input], options: PoolOptions = PLAIN) -> list[Pooled]:
        """The model's raw result for each input: an embedding, sparse pairs, or logits of labels."""
        pooling = self.needs("embed", "sparse", "classify")
        prefix = self._prefix(options) if pooling.task == "embed" else ""
        self._check_instruct(options)
        if self._embed_prompt is not None:
            inputs, prefix = await self._with_template(inputs, options, prefix, self._embed_prompt), ""
            options = replace(options, truncate=None)
        plain = [each for each in inputs if not isinstance(each, MediaText)]
        encoded = iter(await self._texts.encode(plain, options, prefix))
        counts: list[int | None] = []
        requests = []
        for at, each in enumerate(inputs):
            prompt: str | Ids
            if isinstance(each, MediaText):
                prompt, second_at, media = self._media_prompt(each, options, pooling), 0, each.media
                counts.append(None)
            else:
                ids, second_at = next(encoded)
                prompt, media = _padded(ids, pooling), ()
                counts.append(len(ids))
            requests.append(
                Request(
                    prompt=prompt, media=media, second_at=second_at, pool=pooling.task, want_text=False,
                    add_special_tokens=options.add_special_tokens, priority=options.priority, caller=options.caller,
                    deadline_s=options.deadline_s, rid=_rid(options.rid, at, len(inputs)),
                )
            )  # fmt: skip
        began = time.monotonic()
        deltas, names = await self._collect(requests)
        seconds = time.monotonic() - began
        return [_pooled(*each, seconds) for each in zip(deltas, counts, names, strict=True)]

    def _check_instruct(self, options: PoolOptions) -> None:
        if options.instruct and self._embed_prompt is None:
            raise bad_field(
                "instruct",
                "the served model has no template with a place for it",
                "leave it out, or start the server with --embedding-template",
            )

    async def _with_template(
        self, inputs: Sequence[Input], options: PoolOptions, prefix: str, template: PromptTemplate
    ) -> list[Input]:
        """Texts within the model's template; token ids and whole prompts as they are."""
        size = sum(len(each) for each in inputs if isinstance(each, str)) + template.num_chars * len(inputs)
        return await self._texts.beside_the_loop(
            lambda: [self._templated(each, options, prefix, template) for each in inputs], size
        )

    def _templated(self, given: Input, options: PoolOptions, prefix: str, template: PromptTemplate) -> Input:
        if isinstance(given, MediaText):
            if given.is_prompt:
                return given
            marks = self._marks(given)
            return replace(
                given, text=template.render(media=marks, text=prefix + given.text, instruct=options.instruct)
            )
        if not isinstance(given, str):
            return given
        tokenizer, most = self._engine_client.tokenizer, self._texts.limit(options)
        text = template.render(media="", text=prefix + given, instruct=options.instruct)
        if most is None or tokenizer is None:
            return text
        over = len(tokenizer.encode(text, add_special_tokens=options.add_special_tokens)) - most
        if over <= 0:
            return text
        ids = tokenizer.encode(prefix + given, add_special_tokens=False)
        kept = tokenizer.decode(ids[: max(0, len(ids) - over - _SEAM_TOKENS)])
        return template.render(media="", text=kept, instruct=options.instruct)

    def _marks(self, given: MediaText) -> str:
        """What stands for the media of an input in a prompt."""
        media = self._engine_client.media
        return "" if media is None else "".join(media.placer.marker_text(each.kind) for each in given.media)

    def _closing(self, text: str, options: PoolOptions, pooling: PoolingFacts) -> str:
        """The tokens missing at the end of a prompt, if every text must end with the tokenizer's end token."""
        tokenizer = self._engine_client.tokenizer
        if not pooling.append_eos or not options.add_special_tokens or tokenizer is None or tokenizer.eos_id is None:
            return ""
        end = tokenizer.token_text(tokenizer.eos_id)
        return "" if text.endswith(end) else end

    def _media_prompt(self, given: MediaText, options: PoolOptions, pooling: PoolingFacts) -> str | Ids:
        """What stands in the prompt of an input with media. Raises `InvalidRequest` if the model can't take it."""
        engine_media = self._engine_client.media
        if not pooling.media or engine_media is None:
            return given.text + self._closing(given.text, options, pooling)  # media are refused, as by every text model
        if not pooling.apart:
            return given.text + self._closing(given.text, options, pooling)
        where = given.media[0].param
        if given.text.strip() or len(given.media) > 1:
            raise InvalidRequest(
                what="an input has a text and an image" if given.text.strip() else "an input has several images",
                why="the served model embeds each text and each image by itself",
                fix="send them as inputs of their own",
                param=where,
            )
        return np.array([engine_media.desk.processor.marker(given.media[0].kind).token], np.int32)

    async def embed(
        self, inputs: Sequence[Input], options: PoolOptions = PLAIN, *, dimensions: int | None = None
    ) -> list[Pooled]:
        """Embeddings, cut to `dimensions` where the model allows it."""
        pooling = self.needs("embed", "sparse")
        if dimensions is not None and not pooling.allows(dimensions):
            raise InvalidRequest(
                what=f"dimensions is {dimensions}",
                why="the model's embeddings are not made to be cut to this size",
                fix=f"leave it out, or send one of: {pooling.legal_dimensions()}",
                param="dimensions",
            )
        found = await self.pool(inputs, options)
        if dimensions is None or dimensions == pooling.width:
            return found
        return [replace(each, values=shortened(each.values, dimensions, pooling.normalise)) for each in found]

    async def classify(self, inputs: Sequence[Input], options: PoolOptions = PLAIN) -> list[Pooled]:
        """Probabilities (or scores) of the labels."""
        pooling = self.needs("classify")
        return [replace(each, values=scaled(each.values, pooling.score)) for each in await self.pool(inputs, options)]

    # -- scores ----------------------------------------------------------------------------------------------------

    async def relevance(
        self, pairs: Sequence[tuple[Side, Side]], options: PoolOptions = PLAIN, *, instruct: str = ""
    ) -> PooledScores:
        """The relevance of each pair's second side to its first, by whichever method the model supports."""
        pooling = self.pooling
        texts = [(first, second) for first, second in pairs if isinstance(first, str) and isinstance(second, str)]
        if pooling is None:
            if len(texts) < len(pairs):
                return await self._by_answers_to_media(pairs, options, instruct)
            return await self._by_answers(texts, options, instruct)
        if pooling.task == "classify":
            if len(texts) < len(pairs):
                raise InvalidRequest(
                    what="a query or document has media", why="the served model compares texts", fix="send texts"
                )
            return await self._by_classifier(texts, options, instruct, pooling)
        sides = {_side_key(side): side for pair in pairs for side in pair}
        found = await self.pool(list(sides.values()), options)
        vectors = dict(zip(sides, (each.values for each in found), strict=True))
        compare = cosine if pooling.task == "embed" else sparse_dot
        scores = [[compare(vectors[_side_key(first)], vectors[_side_key(second)])] for first, second in pairs]
        return PooledScores(scores, sum(each.prompt_tokens for each in found))

    async def label_scores(
        self,
        query: Text,
        items: Sequence[Text],
        *,
        label_ids: Sequence[int] | None,
        softmax: bool = False,
        item_first: bool = False,
        delimiter: int | None = None,
        options: PoolOptions = PLAIN,
    ) -> PooledScores:
        """For each item, appended to the query: the probabilities that the next token is each of the labels.

        A classifier scores its own labels instead. The query is computed once, with all items behind it in one pass if the
        engine takes them so. `delimiter`: a token between query and item, which are tokenised apart then; the server's own
        is left out where the item comes first.
        """
        if delimiter is not None:
            if item_first:
                raise bad_field("multi_item_scoring_delimiter", "it follows the query", "leave item_first out")
        elif not item_first:
            delimiter = self._delimiter
        if delimiter is not None:
            query, items = await self._delimited(query, items, delimiter, options)
        texts = [_join(query, item, item_first) for item in items]
        if self.pooling is not None:
            if self.pooling.task != "classify":
                raise InvalidRequest(
                    what="the served model has no labels to score",
                    why="it makes embeddings",
                    fix="send text_1 and text_2, which it can compare",
                    param="items",
                )
            if label_ids is not None:
                raise bad_field("label_token_ids", "a classifier scores its own labels", "leave it out")
            found = await self.pool(texts, options)
            rows = [scaled(each.values, "softmax" if softmax else "identity").tolist() for each in found]
            return PooledScores(rows, sum(each.prompt_tokens for each in found))
        if not label_ids:
            raise bad_field("label_token_ids", "it says whose probabilities are wanted", "send at least one token id")
        bounds.count("label_token_ids", label_ids, "label_token_ids")
        return await self._next_token(texts, tuple(label_ids), softmax, options)

    async def _delimited(
        self, query: Text, items: Sequence[Text], delimiter: int, options: PoolOptions
    ) -> tuple[Text, list[Text]]:
        """Token ids of the query, and of each item with the delimiter before it."""
        plain = replace(options, add_special_tokens=False)
        ids, _ = (await self._texts.encode([query], options, ""))[0]
        inner = await self._texts.encode(items, plain, "")
        return ids.tolist(), [[delimiter, *item.tolist()] for item, _ in inner]

    async def _by_classifier(
        self, pairs: Sequence[tuple[str, str]], options: PoolOptions, instruct: str, pooling: PoolingFacts
    ) -> PooledScores:
        if pooling.width != 1:
            raise InvalidRequest(
                what="the served model can't rerank",
                why=f"it tells {pooling.width} labels apart; a reranker gives one score",
                fix="use /v1/classify",
            )
        inputs: Sequence[Input] = pairs
        if self._renderer is not None:
            inputs = await self._rendered(pairs, instruct, options, self._renderer)
            options = replace(options, add_special_tokens=False, truncate=None)
        found = await self.pool(inputs, options)
        rows = [scaled(each.values, pooling.score).tolist() for each in found]
        return PooledScores(rows, sum(each.prompt_tokens for each in found))

    async def _by_answers(self, pairs: Sequence[tuple[str, str]], options: PoolOptions, instruct: str) -> PooledScores:
        """The odds that a generative model says yes."""
        renderer, labels = self._asking()
        texts = await self._rendered(pairs, instruct, options, renderer)
        plain = replace(options, add_special_tokens=False, truncate=None)
        found = await self._next_token(texts, labels, len(labels) > 1, plain)
        return PooledScores([row[:1] for row in found.scores], found.prompt_tokens, found.cached_tokens)

    async def _by_answers_to_media(
        self, pairs: Sequence[tuple[Side, Side]], options: PoolOptions, instruct: str
    ) -> PooledScores:
        """The same for queries or documents with media. Nothing is truncated."""
        renderer, labels = self._asking()
        requests = []
        for at, pair in enumerate(pairs):
            query, document = (each if isinstance(each, MediaText) else MediaText(each, ()) for each in pair)
            text = renderer.render(self._marks(query) + query.text, self._marks(document) + document.text, instruct)
            media = (query.media + document.media) if renderer.query_first else (document.media + query.media)
            requests.append(
                Request(
                    prompt=text, media=media, add_special_tokens=False, sampling=_NEXT_TOKEN, want_text=False,
                    logprobs=LogprobSpec(token_ids=labels), priority=options.priority, caller=options.caller,
                    deadline_s=options.deadline_s, rid=_rid(options.rid, at, len(pairs)),
                )
            )  # fmt: skip
        deltas, _ = await self._collect(requests)
        rows = [delta.logprobs.chosen[0] if delta.logprobs and delta.logprobs.chosen else [] for delta in deltas]
        ends = [delta.end for delta in deltas if delta.end is not None]
        scores = _by_label(rows, labels, len(labels) > 1)
        return PooledScores(
            [row[:1] for row in scores], sum(end.prompt_tokens for end in ends), sum(end.cached_tokens for end in ends)
        )

    def _asking(self) -> tuple[Renderer, tuple[int, ...]]:
        """The prompt of a generative reranker, and the tokens of its answers. Raises `InvalidRequest` if there is
        none."""
        tokenizer = self._engine_client.tokenizer
        if tokenizer is None or self._renderer is None or self._prompt is None:
            raise InvalidRequest(
                what="this server can't rerank",
                why="a generative model reranks with a prompt, and the server has no tokenizer (--skip-tokenizer-init)",
                fix="use /v1/score with token ids",
            )
        if self._tokens is not None:
            false_id = self._tokens.false_id
            return self._renderer, (self._tokens.true_id, *(() if false_id is None else (false_id,)))
        return self._renderer, tuple(label_id(tokenizer, text) for text in (self._prompt.yes, self._prompt.no))

    async def _rendered(
        self, pairs: Sequence[tuple[str, str]], instruct: str, options: PoolOptions, renderer: Renderer
    ) -> list[str]:
        """The prompts of pairs. Where they must be cut it is the document that is, never what follows it."""
        size = sum(renderer.num_chars + len(instruct) + len(query) + len(document) for query, document in pairs)
        return await self._texts.beside_the_loop(lambda: self._render(pairs, instruct, options, renderer), size)

    def _render(
        self, pairs: Sequence[tuple[str, str]], instruct: str, options: PoolOptions, renderer: Renderer
    ) -> list[str]:
        tokenizer, most = self._engine_client.tokenizer, self._texts.limit(options)
        texts = [renderer.render(*pair, instruct) for pair in pairs]
        if most is None or tokenizer is None:
            return texts
        found = []
        for (query, document), text in zip(pairs, texts, strict=True):
            over = len(tokenizer.encode(text, add_special_tokens=False)) - most + 1  # room for the answer
            if over > 0:
                ids = tokenizer.encode(document, add_special_tokens=False)
                kept = ids[: max(0, len(ids) - over - _SEAM_TOKENS)]
                text = renderer.render(query, tokenizer.decode(kept), instruct)
            found.append(text)
        return found

    async def _next_token(
        self, texts: Sequence[Text], labels: tuple[int, ...], softmax: bool, options: PoolOptions
    ) -> PooledScores:
        encoded = await self._texts.encode(texts, options, "")
        spec = LogprobSpec(token_ids=labels)
        if prompts := one_pass([ids for ids, _ in encoded], self._most_items):
            return await self._items(prompts, labels, softmax, options)
        shared = await self._compute_shared([ids for ids, _ in encoded], options)
        requests = [
            Request(
                prompt=ids, follows=shared, sampling=_NEXT_TOKEN, logprobs=spec, want_text=False, priority=options.priority,
                caller=options.caller, deadline_s=options.deadline_s, rid=_rid(options.rid, at, len(encoded)),
            )
            for at, (ids, _) in enumerate(encoded)
        ]  # fmt: skip
        deltas, _ = await self._collect(requests)
        found = [delta.logprobs.chosen[0] if delta.logprobs and delta.logprobs.chosen else [] for delta in deltas]
        cached = sum(delta.end.cached_tokens for delta in deltas if delta.end is not None)
        return PooledScores(_by_label(found, labels, softmax), sum(len(ids) for ids, _ in encoded), cached)

    async def _items(
        self, prompts: Sequence[ItemPrompt], labels: tuple[int, ...], softmax: bool, options: PoolOptions
    ) -> PooledScores:
        """Scores of items that stand one behind another in a prompt and don't see each other: one pass over all of them."""
        requests = [
            Request(
                prompt=prompt.ids, items=prompt.lengths, sampling=_NOTHING, want_text=False, priority=options.priority,
                logprobs=LogprobSpec(token_ids=labels, start=prompt.shared), caller=options.caller,
                deadline_s=options.deadline_s, rid=_rid(options.rid, at, len(prompts)),
            )
            for at, prompt in enumerate(prompts)
        ]  # fmt: skip
        deltas, _ = await self._collect(requests)
        found = [row for delta in deltas if delta.prompt_logprobs is not None for row in delta.prompt_logprobs.chosen]
        if len(found) != sum(len(prompt.lengths) for prompt in prompts):
            raise RequestFailed(what="the engine returned no scores for some of the items")
        cached = sum(delta.end.cached_tokens for delta in deltas if delta.end is not None)
        again = sum(prompt.shared * (len(prompt.lengths) - 1) for prompt in prompts)
        return PooledScores(
            _by_label(found, labels, softmax), sum(len(prompt.ids) for prompt in prompts) + again, cached + again
        )

    async def _compute_shared(self, prompts: Sequence[Ids], options: PoolOptions) -> str:
        """Computes what all prompts begin with, ahead of them, and returns the name to follow; "" if it isn't worth it.

        The scheduler would have them share it as well, but in whole pages only.
        """
        size = _common(prompts)
        if not self._keeps or size * (len(prompts) - 1) < _WORTH_SHARING:
            return ""
        rid = f"shared-{secrets.token_hex(12)}"
        ahead = Request(
            prompt=prompts[0][:size], sampling=_NOTHING, want_text=False, priority=options.priority,
            caller=options.caller, deadline_s=options.deadline_s, rid=rid,
        )  # fmt: skip
        await self._collect([ahead])
        return rid

    # -- inside ----------------------------------------------------------------------------------------------------

    def needs(self, *tasks: Task) -> PoolingFacts:
        """How the model pools. Raises `InvalidRequest` if it does none of `tasks`."""
        pooling = self.pooling
        if pooling is None:
            raise InvalidRequest(
                what="the served model does not embed or classify",
                why="it is served to generate",
                fix="serve an embedding, reranking or classification model, or start with --is-embedding",
            )
        if pooling.task not in tasks:
            offers = {
                "embed": "it makes embeddings: use /v1/embeddings, /v1/rerank or /v1/score",
                "sparse": "it makes sparse embeddings: use /v1/embeddings, /v1/rerank or /v1/score",
                "classify": "it scores labels: use /v1/classify, /v1/rerank (if it has one label) or /v1/moderations",
            }
            raise InvalidRequest(what="the served model can't do this", why=offers[pooling.task])
        return pooling

    def _prefix(self, options: PoolOptions) -> str:
        pooling = self.pooling
        assert pooling is not None, "called for pooling models"
        if options.prompt_name is None:
            return pooling.default_prompt
        if options.prompt_name not in pooling.prompts:
            known = ", ".join(sorted(pooling.prompts)) or "none"
            raise bad_field("prompt_name", f"the model's prompts are: {known}", "send one of them, or leave it out")
        return pooling.prompts[options.prompt_name]

    async def _collect(self, requests: Sequence[Request]) -> tuple[list[Delta], list[str]]:
        """Complete answers of all requests. Raises the first failure and aborts the others."""
        if not requests:
            return [], []
        streams = [group[0] for group in await self._engine_client.submit_batch(requests)]
        try:
            deltas = []
            for stream in streams:
                delta = await stream.collect()
                if delta.end is not None and delta.end.reason in ("abort", "error"):
                    raise as_error(delta.end)
                deltas.append(delta)
            return deltas, [stream.rid for stream in streams]
        finally:
            for stream in streams:
                stream.abort()


def _side_key(side: Side) -> str | int:
    """Key by which equal queries and documents are recognised."""
    return side if isinstance(side, str) else id(side)


def _padded(ids: Ids, pooling: PoolingFacts) -> Ids:
    """Ids of a text, filled up where the model was trained so."""
    missing = pooling.pad_to - len(ids)
    if missing <= 0:
        return ids
    padding = np.full(missing, pooling.pad_id, np.int32)
    return np.concatenate([padding, ids] if pooling.pad_left else [ids, padding])


def _pooled(delta: Delta, count: int | None, rid: str, seconds: float) -> Pooled:
    """`count`: tokens of the input; None: as many as the engine has counted."""
    assert delta.end is not None, "it was collected"
    counted = delta.end.prompt_tokens if count is None else count
    return Pooled(np.frombuffer(delta.embedding, "<f4"), counted, rid, seconds, delta.end.media_tokens)


def _join(query: Text, item: Text, item_first: bool) -> Text:
    first, second = (item, query) if item_first else (query, item)
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    if isinstance(first, str) or isinstance(second, str):
        raise bad_field("items", "query and items must both be texts, or both be token ids", "send one kind")
    return [*first, *second]


def _by_label(
    found: Sequence[Sequence[tuple[int, float]]], labels: tuple[int, ...], softmax: bool
) -> list[list[float]]:
    """Probabilities of the labels from log-probabilities by token id. Raises `RequestFailed` where there are none."""
    rows = []
    for pairs in found:
        if not pairs:
            raise RequestFailed(what="the engine returned no scores for this request")
        by_id = dict(pairs)
        logprobs = np.array([by_id[label] for label in labels], np.float64)
        rows.append((probabilities(logprobs) if softmax else np.exp(logprobs)).tolist())
    return rows


@dataclass(frozen=True, slots=True)
class ItemPrompt:
    """Prompts that begin with the same tokens, as one: these, then what is each one's own."""

    ids: Ids
    shared: int
    lengths: tuple[int, ...]


def one_pass(prompts: Sequence[Ids], most: int) -> list[ItemPrompt]:
    """The prompts as a few that hold them all, of at most `most` tokens each, in their order; empty: they share too little,
    or there are too few of them."""
    shared = _common(prompts)
    if shared * (len(prompts) - 1) < _WORTH_SHARING:
        return []
    made: list[ItemPrompt] = []
    parts: list[Ids] = []
    for at, ids in enumerate(prompts):
        parts.append(ids[shared:])
        size = shared + sum(map(len, parts))
        following = len(prompts[at + 1]) - shared if at + 1 < len(prompts) else most
        if size > most:
            return []
        if size + following > most:
            whole = np.concatenate([prompts[0][:shared], *parts])
            made.append(ItemPrompt(whole, shared, tuple(map(len, parts))))
            parts = []
    return made


def _common(prompts: Sequence[Ids]) -> int:
    """How many tokens all prompts begin with, one of each left over."""
    size = min(map(len, prompts), default=1) - 1
    for each in prompts[1:]:
        differ = np.flatnonzero(each[:size] != prompts[0][:size])
        size = int(differ[0]) if len(differ) else size
    return max(size, 0)


def _rid(rid: str, at: int, count: int) -> str:
    return f"{rid}_{at}" if rid and count > 1 else rid
