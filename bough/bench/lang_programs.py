"""The work of `bough bench lang`, written twice: as programs of the language, and with OpenAI's client and asyncio.

Both sides ask for the same texts and decide by the same likelihoods. The plain side uses what the API offers: a text to
continue, and `echo` with `logprobs` to score given texts.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import bough.lang as lang
from bough.bench.prompts import WordList
from bough.core.errors import ConfigError

JOINED = "\n\nTaken together, "
VERDICT = "\nWhoever reads this will find it"
VERDICTS = (" hardly worth the time", " of some use", " clear and convincing")
OVERALL = "\n\nOn the whole it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class LangSizes:
    """How much work there is. Lengths are tokens, more or less."""

    programs: int = 2
    """Of each kind but few-shot, at the same time."""
    context_len: int = 256
    """What every branch of a program begins with."""
    branches: int = 16
    """Of fork-join."""
    output_len: int = 64
    """Of each of those branches, and of the answer over all of them."""
    width: int = 2
    """Thoughts of the tree of thought a level, and sides of the judge."""
    depth: int = 2
    """Levels of the tree of thought."""
    thought_len: int = 16
    """Of each thought, and of each remark of the judge."""
    examples_len: int = 512
    """What every question of a few-shot batch begins with."""
    questions: int = 32
    """Of the few-shot batch whose answers are written."""
    choice_questions: int = 4
    """Of the few-shot batch whose answers are chosen."""
    answer_len: int = 16
    own_len: int = 16
    """Of each branch's tip, each question and each choice but its first words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The texts of all requests, the same for both sides."""

    contexts: list[str]
    tips: list[str]
    examples: str
    questions: list[str]
    choices: list[tuple[str, ...]]
    """Of each question, as far as answers are chosen."""


def make_texts(sizes: LangSizes, seed: int) -> Texts:
    rng = random.Random(seed)
    words = WordList(tokenizer=None)
    return Texts(
        contexts=[words.random_text(sizes.context_len, rng) for _ in range(sizes.programs)],
        tips=[f"Tip {n + 1}: {words.random_text(sizes.own_len, rng)}:" for n in range(sizes.branches)],
        examples=words.random_text(sizes.examples_len, rng),
        questions=[f"Q: {words.random_text(sizes.own_len, rng)}? A:" for _ in range(sizes.questions)],
        choices=[
            tuple(f" {words.random_text(max(1, sizes.own_len // 4), rng)}." for _ in VERDICTS)
            for _ in range(sizes.choice_questions)
        ],
    )


class Side(Protocol):
    """One way to do the work. Each returns what was generated or decided last, in the order of what it was given."""

    def fork_join(self, texts: Texts, sizes: LangSizes) -> list[str]:
        """Branches over one context, their texts together, and an answer over all of them."""

    def tree_of_thought(self, texts: Texts, sizes: LangSizes) -> list[str]:
        """Thoughts about one context, each rated; the best is kept, and the next ones go on from it."""

    def judge(self, texts: Texts, sizes: LangSizes) -> list[str]:
        """Remarks on one context from several sides, a verdict on each, and one over all verdicts."""

    def few_shot_choices(self, texts: Texts, sizes: LangSizes) -> list[str]:
        """Questions behind the same examples, each answered by the likeliest of its choices."""

    def few_shot(self, texts: Texts, sizes: LangSizes) -> list[str]:
        """Questions behind the same examples, each answered in the model's words."""


def idea(level: int, number: int) -> str:
    return f"\nStep {level + 1}, idea {number + 1}:"


def remark(number: int) -> str:
    return f"\n\nRemark {number + 1}:"


def best_of(verdicts: Sequence[str]) -> int:
    """The number of the best verdict; the first of equals."""
    return max(range(len(verdicts)), key=lambda n: VERDICTS.index(verdicts[n]))


# -- the language


@lang.function
def _fork_join(s, context, tips, new):  # type: ignore[no-untyped-def]
    s += context
    branches = s.fork(len(tips))
    for branch, tip in zip(branches, tips, strict=True):
        branch += "\n\n" + tip + lang.gen("part", max_tokens=new)
    branches.join("concate_and_append")
    s += JOINED + lang.gen("whole", max_tokens=new)


@lang.function
def _tree_of_thought(s, context, depth, width, new):  # type: ignore[no-untyped-def]
    s += context
    for level in range(depth):
        thoughts = s.fork(width)
        for n, branch in enumerate(thoughts):
            branch += idea(level, n) + lang.gen("thought", max_tokens=new)
            branch += VERDICT + lang.select("verdict", VERDICTS)
        best = best_of([branch["verdict"] for branch in thoughts])
        s += idea(level, best) + thoughts[best]["thought"]
    s += JOINED + lang.gen("whole", max_tokens=new)


@lang.function
def _judge(s, context, width, new):  # type: ignore[no-untyped-def]
    s += context
    sides = s.fork(width)
    sides += lambda n: remark(n) + lang.gen("remark", max_tokens=new) + VERDICT + lang.select("verdict", VERDICTS)
    sides.join()
    for n, verdict in enumerate(s["verdict"]):
        s += remark(n) + verdict
    s += OVERALL + lang.select("overall", VERDICTS)


@lang.function
def _few_shot_choices(s, examples, question, choices):  # type: ignore[no-untyped-def]
    s += examples
    s += "\n\n" + question + lang.select("answer", choices)


@lang.function
def _few_shot(s, examples, question, new):  # type: ignore[no-untyped-def]
    s += examples
    s += "\n\n" + question + lang.gen("answer", max_tokens=new)


class Language:
    """The work as programs."""

    def __init__(self, url: str, key: str) -> None:
        self.backend = lang.RuntimeEndpoint(url, api_key=key or None)
        self.joins: Counter[str] = Counter()
        """How branches were joined: by KV, or by text."""

    def fork_join(self, texts: Texts, sizes: LangSizes) -> list[str]:
        batch = [{"context": each, "tips": texts.tips, "new": sizes.output_len} for each in texts.contexts]
        states = self._run(_fork_join, batch)
        self.joins.update(state.get_meta_info("join")["kind"] for state in states)
        return [str(state["whole"]) for state in states]

    def tree_of_thought(self, texts: Texts, sizes: LangSizes) -> list[str]:
        shape = {"depth": sizes.depth, "width": sizes.width, "new": sizes.thought_len}
        states = self._run(_tree_of_thought, [{"context": each, **shape} for each in texts.contexts])
        return [str(state["whole"]) for state in states]

    def judge(self, texts: Texts, sizes: LangSizes) -> list[str]:
        shape = {"width": sizes.width, "new": sizes.thought_len}
        states = self._run(_judge, [{"context": each, **shape} for each in texts.contexts])
        return [str(state["overall"]) for state in states]

    def few_shot_choices(self, texts: Texts, sizes: LangSizes) -> list[str]:
        batch = [
            {"examples": texts.examples, "question": question, "choices": choices}
            for question, choices in zip(texts.questions, texts.choices, strict=False)
        ]
        return [str(state["answer"]) for state in self._run(_few_shot_choices, batch)]

    def few_shot(self, texts: Texts, sizes: LangSizes) -> list[str]:
        batch = [{"examples": texts.examples, "question": each, "new": sizes.answer_len} for each in texts.questions]
        return [str(state["answer"]) for state in self._run(_few_shot, batch)]

    def _run(self, program: lang.Function, batch: list[dict[str, Any]]) -> list[lang.ProgramState]:
        states: list[lang.ProgramState] = program.run_batch(
            batch, backend=self.backend, temperature=0.0, ignore_eos=True
        )
        return states


# -- the plain client


class PlainClient:
    """The work as a Python programmer writes it without the language: OpenAI's client and asyncio."""

    def __init__(self, url: str, key: str, model: str) -> None:
        try:
            from openai import AsyncOpenAI
        except ImportError as error:
            raise ConfigError(
                what="bench lang compares with the openai client", why="it is not installed", fix="pip install openai"
            ) from error
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0)
        self._runner = asyncio.Runner()
        self._model = model

    def fork_join(self, texts: Texts, sizes: LangSizes) -> list[str]:
        async def one(context: str) -> str:
            new = sizes.output_len
            parts = await asyncio.gather(*(self._complete(f"{context}\n\n{tip}", new) for tip in texts.tips))
            branches = "".join(f"\n\n{tip}{part}" for tip, part in zip(texts.tips, parts, strict=True))
            return await self._complete(context + branches + JOINED, new)

        return self._gather([one(context) for context in texts.contexts])

    def tree_of_thought(self, texts: Texts, sizes: LangSizes) -> list[str]:
        async def thought(text: str, level: int, number: int) -> tuple[str, str]:
            text += idea(level, number)
            text += await self._complete(text, sizes.thought_len)
            return text, await self._choose(text + VERDICT, VERDICTS)

        async def one(text: str) -> str:
            for level in range(sizes.depth):
                thoughts = await asyncio.gather(*(thought(text, level, n) for n in range(sizes.width)))
                text = thoughts[best_of([verdict for _, verdict in thoughts])][0]
            return await self._complete(text + JOINED, sizes.thought_len)

        return self._gather([one(context) for context in texts.contexts])

    def judge(self, texts: Texts, sizes: LangSizes) -> list[str]:
        async def side(text: str, number: int) -> str:
            text += remark(number)
            text += await self._complete(text, sizes.thought_len)
            return await self._choose(text + VERDICT, VERDICTS)

        async def one(text: str) -> str:
            verdicts = await asyncio.gather(*(side(text, n) for n in range(sizes.width)))
            text += "".join(remark(n) + verdict for n, verdict in enumerate(verdicts))
            return await self._choose(text + OVERALL, VERDICTS)

        return self._gather([one(context) for context in texts.contexts])

    def few_shot_choices(self, texts: Texts, sizes: LangSizes) -> list[str]:
        asked = zip(texts.questions, texts.choices, strict=False)
        return self._gather([self._choose(f"{texts.examples}\n\n{question}", choices) for question, choices in asked])

    def few_shot(self, texts: Texts, sizes: LangSizes) -> list[str]:
        new = sizes.answer_len
        return self._gather([self._complete(f"{texts.examples}\n\n{question}", new) for question in texts.questions])

    def _gather(self, work: Sequence[Coroutine[Any, Any, str]]) -> list[str]:
        async def run() -> list[str]:
            return list(await asyncio.gather(*work))

        return self._runner.run(run())

    async def _complete(self, text: str, new: int) -> str:
        reply = await self._client.completions.create(
            model=self._model, prompt=text, max_tokens=new, temperature=0.0, extra_body={"ignore_eos": True}
        )
        return reply.choices[0].text

    async def _choose(self, text: str, choices: Sequence[str]) -> str:
        """The choice whose tokens are likeliest on average. All choices go in one request, each with the whole text."""
        reply = await self._client.completions.create(
            model=self._model,
            prompt=[text + choice for choice in choices],
            max_tokens=0,
            echo=True,
            logprobs=1,
            temperature=0.0,
        )
        scores = []
        for scored in sorted(reply.choices, key=lambda each: each.index):
            scored_tokens = scored.logprobs
            assert scored_tokens is not None
            assert scored_tokens.text_offset is not None
            assert scored_tokens.token_logprobs is not None
            own = [
                logprob
                for at, logprob in zip(scored_tokens.text_offset, scored_tokens.token_logprobs, strict=True)
                if at >= len(text) and logprob is not None
            ]
            scores.append(sum(own) / max(1, len(own)))
        return choices[max(range(len(choices)), key=scores.__getitem__)]
