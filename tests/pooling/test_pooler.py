"""The pooler on an engine that answers by rule: tokenising, cutting, choosing how to score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pooled_engine import minilm_folder

from bough.config.pooling_facts import PoolingFacts
from bough.core.errors import BoughError, ConfigError, InvalidRequest, Overloaded, PromptTooLong
from bough.core.messages import Delta, End, TokenLogprobs
from bough.engine_client import Pooler, PoolOptions, Request
from bough.engine_client.pooling import one_pass
from bough.engine_client.scores import as_weights, cosine, scaled
from bough.tokenizer import Tokenizer, TokenizerPool, load_tokenizer
from bough.tokenizer.tokenizer import shares

Rule = Callable[[Request], Delta]
CONTEXT = 32


class FakeStream:
    def __init__(self, delta: Delta, rid: str) -> None:
        self.delta, self.rid, self.aborted = delta, rid or "made", False

    async def collect(self) -> Delta:
        return self.delta

    def abort(self) -> None:
        self.aborted = True


class FakeEngineClient:
    context_length = CONTEXT

    def __init__(self, tokenizer: Tokenizer | None, rule: Rule) -> None:
        self.tokenizer, self.rule = tokenizer, rule
        self.tokenizers = TokenizerPool(tokenizer) if tokenizer else None
        self.vocab_size = tokenizer.vocab_size if tokenizer else 1000
        self.seen: list[Request] = []
        self.streams: list[FakeStream] = []

    async def submit_batch(self, requests: Sequence[Request]) -> list[list[FakeStream]]:
        self.seen += requests
        self.streams = [FakeStream(self.rule(request), request.rid) for request in requests]
        return [[stream] for stream in self.streams]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(minilm_folder())


@pytest.fixture(scope="module")
def hf_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(minilm_folder())


@contextmanager
def refused(kind: type[BoughError], text: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert text in caught.value.sentence()


def made(values: Sequence[float]) -> Delta:
    return Delta(id=1, embedding=np.array(values, "<f4").tobytes(), end=End(reason="stop"))


def pooler(
    tokenizer: Tokenizer | None, rule: Rule, template: str = "auto", **facts: Any
) -> tuple[Pooler, FakeEngineClient]:
    engine_client = FakeEngineClient(tokenizer, rule)
    pooling = PoolingFacts(**{"task": "embed", "family": "Bert", "width": 3, "normalise": True, **facts})
    told = {"pooling": msgspec.to_builtins(pooling)}
    return Pooler(engine_client, told, model="tiny", rerank_template=template), engine_client  # type: ignore[arg-type]


def generative(
    tokenizer: Tokenizer, rule: Rule, template: str = "auto", name: str = "tiny", context_length: int = CONTEXT
) -> tuple[Pooler, FakeEngineClient]:
    engine_client = FakeEngineClient(tokenizer, rule)
    engine_client.context_length = context_length
    return Pooler(engine_client, {"pooling": None}, model=name, rerank_template=template), engine_client  # type: ignore[arg-type]


async def test_texts_pairs_and_cuts_are_those_of_transformers(tokenizer: Tokenizer, hf_tokenizer: Any) -> None:
    words = "a rather long text that has more words than would fit into the room that there is for it here today"
    short = "a short one"
    for most in (None, 12, 15, 9):
        cut = {} if most is None else {"truncation": "longest_first", "max_length": most}
        for given in (short, words, (short, words), (words, short), (words, words)):
            found = tokenizer.encode_whole([given], most=most)[0]
            texts = (given,) if isinstance(given, str) else given
            expected = hf_tokenizer(*texts, return_token_type_ids=True, **cut)
            assert found.ids == expected["input_ids"]
            types = [int(0 < found.second_at <= at) for at in range(len(found.ids))]
            assert types == expected["token_type_ids"]


@pytest.mark.parametrize(
    ("lengths", "room", "left"),
    [([5], 9, [5]), ([9], 5, [5]), ([2, 9], 8, [2, 6]), ([9, 2], 8, [6, 2]), ([9, 9], 7, [3, 4]), ([9, 8], 7, [4, 3])],
)
def test_who_gives_way(lengths: list[int], room: int, left: list[int]) -> None:
    assert shares(lengths, room) == left


async def test_inputs_that_do_not_fit(tokenizer: Tokenizer) -> None:
    pool, engine_client = pooler(tokenizer, lambda _: made([1, 2, 3]))
    with refused(PromptTooLong, "at most 32 fit"):
        await pool.embed(["word " * 50])
    found = await pool.embed(["word " * 50], PoolOptions(truncate=-1))
    assert found[0].prompt_tokens == CONTEXT
    assert engine_client.seen[-1].prompt[-1] == tokenizer.id_of("[SEP]")
    assert (await pool.embed(["word " * 50], PoolOptions(truncate=5)))[0].prompt_tokens == 5
    assert (await pool.embed([list(range(50))], PoolOptions(truncate=7)))[0].prompt_tokens == 7
    for wrong in (0, -2, CONTEXT + 1):
        with refused(InvalidRequest, "truncate_prompt_tokens"):
            await pool.embed(["x"], PoolOptions(truncate=wrong))
    with refused(InvalidRequest, "token id 99999999"):
        await pool.embed([[99999999]])
    assert all(stream.aborted for stream in engine_client.streams)


async def test_prompts_and_endings(tokenizer: Tokenizer) -> None:
    pool, engine_client = pooler(
        tokenizer, lambda _: made([1, 2, 3]), prompts={"query": "search for "}, default_prompt="see "
    )
    await pool.embed(["rain"])
    await pool.embed(["rain"], PoolOptions(prompt_name="query"))
    assert [tokenizer.decode(each.prompt) for each in engine_client.seen] == ["see rain", "search for rain"]  # type: ignore[arg-type]
    with refused(InvalidRequest, "the model's prompts are: query"):
        await pool.embed(["rain"], PoolOptions(prompt_name="other"))

    closing, other = pooler(
        Tokenizer(codebook=tokenizer.codebook, eos_id=7), lambda _: made([1, 2, 3]), append_eos=True
    )  # fmt: skip
    await closing.embed(["rain", "word " * 50], PoolOptions(truncate=-1))
    assert [each.prompt[-1] for each in other.seen] == [7, 7]
    assert len(other.seen[1].prompt) == CONTEXT


async def test_cutting_an_embedding_keeps_its_length(tokenizer: Tokenizer) -> None:
    pool, _ = pooler(tokenizer, lambda _: made([0.6, 0.8, 0.0]), dimensions=(1, 2))
    assert (await pool.embed(["x"], dimensions=1))[0].values.tolist() == [1.0]
    assert (await pool.embed(["x"], dimensions=3))[0].values == pytest.approx([0.6, 0.8, 0.0])
    raw, _ = pooler(tokenizer, lambda _: made([0.6, 0.8, 0.0]), dimensions=(1, 2), normalise=False)
    assert (await raw.embed(["x"], dimensions=1))[0].values == pytest.approx([0.6])
    with refused(InvalidRequest, "send one of: 1, 2, 3"):
        await pool.embed(["x"], dimensions=5)


async def test_relevance_by_whatever_the_model_can_do(tokenizer: Tokenizer) -> None:
    vectors = {"q": [1, 0, 0], "same": [2, 0, 0], "half": [1, 1, 0]}

    def embedding(request: Request) -> Delta:
        return made(vectors[tokenizer.decode(request.prompt)])  # type: ignore[arg-type]

    pool, engine_client = pooler(tokenizer, embedding)
    found = await pool.relevance([("q", "same"), ("q", "half")])
    assert [row[0] for row in found.scores] == pytest.approx([1.0, 0.5**0.5])
    assert len(engine_client.seen) == 3, "a text that appears twice is computed once"

    sparse, _ = pooler(
        tokenizer, lambda r: made([3, 8, 0.5, 2.0] if len(r.prompt) == 3 else [8, 9, 4.0, 1.0]), task="sparse"
    )  # fmt: skip
    assert (await sparse.relevance([("q", "two words")])).scores == [[8.0]]

    cross, other = pooler(tokenizer, lambda _: made([0.0]), task="classify", width=1, labels=("x",), score="sigmoid")
    assert (await cross.relevance([("q", "doc")])).scores == [[0.5]]
    assert other.seen[0].second_at == 3
    many, _ = pooler(tokenizer, lambda _: made([0.0, 1.0]), task="classify", width=2, labels=("a", "b"))
    with refused(InvalidRequest, "2 labels"):
        await many.relevance([("q", "doc")])


async def test_a_generative_model_says_yes_or_no(tokenizer: Tokenizer, tmp_path: Path) -> None:
    yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))

    def rule(request: Request) -> Delta:
        assert request.logprobs is not None
        assert request.sampling.max_new_tokens == 1
        scores = {yes: np.log(0.3), no: np.log(0.1)}
        chosen = [[(each, float(scores[each])) for each in request.logprobs.token_ids]]
        return Delta(id=1, logprobs=TokenLogprobs([0], [0.0], chosen=chosen), end=End(reason="length"))

    pool, engine_client = generative(tokenizer, rule, name="Qwen3-Reranker-0.6B", context_length=128)
    found = await pool.relevance([("who?", "he")], instruct="find him")
    assert found.scores[0] == pytest.approx([0.75])
    asked = tokenizer.decode(engine_client.seen[0].prompt, skip_special_tokens=False)  # type: ignore[arg-type]
    assert "find him" in asked
    assert "who?" in asked
    await pool.relevance([("who?", "he " * 500)], PoolOptions(truncate=-1))
    cut = engine_client.seen[-1].prompt
    assert 100 < len(cut) < 128
    assert list(cut[-8:]) == list(engine_client.seen[0].prompt[-8:]), "what follows the document stays"

    file = tmp_path / "own.jinja"
    file.write_text("{# labels: no, yes #}{{ query }} / {{ document }}")
    own, _ = generative(tokenizer, rule, str(file))
    assert (await own.relevance([("who?", "he")])).scores[0] == pytest.approx([0.25])
    file.write_text("{% if %}")
    with refused(ConfigError, "rerank template"):
        generative(tokenizer, rule, str(file))
    with refused(ConfigError, "no rerank template"):
        generative(tokenizer, rule, "nonsense")


async def test_label_scores(tokenizer: Tokenizer) -> None:
    def rule(request: Request) -> Delta:
        assert request.logprobs is not None
        chosen = [[(each, float(np.log(each / 10))) for each in request.logprobs.token_ids]]
        return Delta(id=1, logprobs=TokenLogprobs([0], [0.0], chosen=chosen), end=End(reason="length"))

    pool, engine_client = generative(tokenizer, rule)
    found = await pool.label_scores([5, 6], [[7], [8, 9]], label_ids=[4, 1])
    assert found.scores[0] == pytest.approx([0.4, 0.1])
    assert [list(each.prompt) for each in engine_client.seen] == [[5, 6, 7], [5, 6, 8, 9]]
    assert found.prompt_tokens == 7
    found = await pool.label_scores([5, 6], [[7]], label_ids=[4, 1], softmax=True, item_first=True)
    assert found.scores[0] == pytest.approx([0.8, 0.2])
    assert list(engine_client.seen[-1].prompt) == [7, 5, 6]
    with refused(InvalidRequest, "label_token_ids"):
        await pool.label_scores([5], [[7]], label_ids=None)
    with refused(InvalidRequest, "both be texts"):
        await pool.label_scores("x", [[7]], label_ids=[1])


async def test_items_go_in_one_prompt_where_the_engine_takes_them(tokenizer: Tokenizer) -> None:
    """As many as fit, in their order; the server's delimiter stands before each unless the item comes first."""

    def rule(request: Request) -> Delta:
        assert request.logprobs is not None
        scores = TokenLogprobs([0], [0.0], chosen=[[(4, float(np.log(0.4)))] for _ in request.items or [0]])
        end = End(reason="length", cached_tokens=3)
        return Delta(id=1, prompt_logprobs=scores if request.items else None, logprobs=scores, end=end)

    engine_client = FakeEngineClient(tokenizer, rule)
    engine_client.context_length = 200
    facts = {"pooling": None, "score_items": True, "kv_tokens": 175}
    pool = Pooler(engine_client, facts, model="tiny", delimiter=11)  # type: ignore[arg-type]
    query, items = list(range(100, 180)), [[7], [8, 9], [10, 11, 12], [13], [14]]
    found = await pool.label_scores(query, items, label_ids=[4])
    assert [list(each.prompt) for each in engine_client.seen] == [
        [*query, 11, 7, 8, 9, 10, 11, 12],
        [*query, 11, 13, 14],
    ]
    assert [(each.items, each.logprobs and each.logprobs.start) for each in engine_client.seen] == [
        ((1, 2, 3), 81),
        ((1, 1), 81),
    ]
    assert found.scores == [[pytest.approx(0.4)]] * 5
    assert found.prompt_tokens == 5 * 81 + 8
    assert found.cached_tokens == 3 * 81 + 2 * 3
    engine_client.seen.clear()
    await pool.label_scores(query, items, label_ids=[4], item_first=True)
    assert [list(each.prompt) for each in engine_client.seen] == [[*item, *query] for item in items]
    with pytest.raises(ConfigError, match="multi-item-scoring-delimiter"):
        Pooler(engine_client, facts, model="tiny", delimiter=tokenizer.vocab_size)  # type: ignore[arg-type]


def test_one_pass_holds_every_prompt() -> None:
    """Each prompt can be read from the one that holds it, none of which is too long."""
    rng = np.random.default_rng(0)
    packed = 0
    for _ in range(200):
        shared = rng.integers(0, 9, rng.integers(1, 120))
        prompts = [np.concatenate([shared, rng.integers(0, 9, rng.integers(1, 9))]) for _ in range(rng.integers(1, 12))]
        most = int(rng.integers(0, 200))
        found = one_pass(prompts, most)
        read = []
        for each in found:
            assert len(each.ids) <= most
            assert min(each.lengths) > 0
            borders = each.shared + np.concatenate(([0], np.cumsum(each.lengths)))
            assert borders[-1] == len(each.ids)
            for begin, end in pairwise(borders.tolist()):
                read.append([*each.ids[: each.shared], *each.ids[begin:end]])
        assert not found or read == [prompt.tolist() for prompt in prompts]
        packed += bool(found)
        assert found or max(map(len, prompts)) > most or len(shared) * (len(prompts) - 1) < 64 + 9 * len(prompts)
    assert packed > 20


async def test_a_failed_text_fails_the_request(tokenizer: Tokenizer) -> None:
    pool, engine_client = pooler(
        tokenizer, lambda _: Delta(id=1, end=End(reason="error", message="too many", status=429))
    )  # fmt: skip
    with refused(Overloaded, "too many"):
        await pool.embed(["a", "b"])
    assert all(stream.aborted for stream in engine_client.streams)


async def test_the_wrong_kind_of_model(tokenizer: Tokenizer) -> None:
    pool, _ = pooler(tokenizer, lambda _: made([1, 2, 3]))
    with refused(InvalidRequest, "can't do this"):
        await pool.classify(["x"])
    with refused(InvalidRequest, "no labels to score"):
        await pool.label_scores("a", ["b"], label_ids=[1])
    talker, _ = generative(tokenizer, lambda _: made([1.0]))
    with refused(InvalidRequest, "does not embed"):
        await talker.embed(["x"])
    mute, _ = pooler(None, lambda _: made([1, 2, 3]))
    with refused(InvalidRequest, "no tokenizer"):
        await mute.embed(["x"])


def test_arithmetic() -> None:
    logits = np.array([1.0, -2.0, 0.5], np.float32)
    assert scaled(logits, "softmax").sum() == pytest.approx(1.0)
    assert scaled(logits, "sigmoid") == pytest.approx(1 / (1 + np.exp(-logits)))
    assert cosine(np.zeros(3, np.float32), logits) == 0.0
    assert as_weights(np.array([3, 8, 0.5, 2.0], np.float32)) == {3: 0.5, 8: 2.0}
