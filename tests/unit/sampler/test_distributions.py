"""What the engine draws, by chi-square against distributions made with numpy from the definitions.

A model of sixteen words whose next word depends on the last one only goes through the real scheduler, runner and sampler.
Each draw has a distribution of its own (penalties look back), so draws are judged by word, counting how often
each came and was to come, and by rank, where the probability of everything likelier must be uniform; and by two sums whose
mean and variance are known, the draws' own log-probabilities and how often they had been drawn before. Every case is also
held against a neighbour, parameters that are a little off: those must be rejected, or the test would see nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from in_process import DraftsOnDevice, InProcess, Setup
from scipy import stats
from torch import Tensor

from bough.core.sampling import SamplingParams
from bough.kernels import sampling as kernels
from bough.kernels.sampling.reference import kept
from bough.layers.batch import AttentionSpec, Batch
from bough.runner.accepting import AcceptRule, Rejection, Thresholds
from bough.runner.proposing import Drafting, Reads, TreeDrafts
from bough.speculative.proposers.tree import Frontier, TreeShape, grow_tree
from tests.covers import long

VOCAB = 16
TABLE = np.random.default_rng(7).normal(scale=1.5, size=(VOCAB, VOCAB)).astype(np.float32)
REQUESTS, TOKENS = 24, 160
REJECTED, ACCEPTED = 1e-5, 1e-3
Floats = npt.NDArray[np.float64]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tables are so small that threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Bigrams(torch.nn.Module):
    """Logits of the next word by the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = AttentionSpec(layer=0, num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0)
        self.table = torch.from_numpy(TABLE)

    def forward(self, batch: Batch) -> Tensor:
        ids = batch.ids_T if batch.logits_at is None else batch.ids_T[batch.logits_at]
        return torch.nn.functional.one_hot(ids, VOCAB).float()

    def logits(self, hidden_LD: Tensor) -> Tensor:
        return self.table[hidden_LD.argmax(-1)]


def distribution(prompt: list[int], said: list[int], params: SamplingParams) -> Floats:
    """The probabilities of the next word, by the definitions."""
    logits = TABLE[[*prompt, *said][-1]].astype(np.float64)
    for word in {*prompt, *said}:
        logits[word] = logits[word] / params.repetition_penalty if logits[word] > 0 else (
            logits[word] * params.repetition_penalty)  # fmt: skip
    for word in set(said):
        logits[word] -= params.frequency_penalty * said.count(word) + params.presence_penalty
    for word, bias in (params.logit_bias or {}).items():
        logits[word] += bias
    if len(said) < params.min_new_tokens:
        logits[list(params.stop_token_ids)] = -np.inf
    if params.allowed_token_ids is not None:
        logits[[word for word in range(VOCAB) if word not in params.allowed_token_ids]] = -np.inf
    for phrase in params.bad_words:
        if tuple(said[len(said) - len(phrase) + 1 :]) == phrase[:-1] and len(said) >= len(phrase) - 1:
            logits[phrase[-1]] = -np.inf
    if params.temperature == 0:
        return np.eye(VOCAB)[logits.argmax()]
    likely = np.exp((logits - logits.max()) / params.temperature)
    likely /= likely.sum()
    order = np.argsort(-likely)
    before = np.append(0.0, np.cumsum(likely[order])[:-1])
    keep = (before < params.top_p) & (likely[order] >= params.min_p * likely.max())
    if params.top_k > 0:
        keep[params.top_k :] = False
    kept: Floats = np.zeros(VOCAB)
    kept[order[keep]] = likely[order[keep]]
    return kept / kept.sum()


def draws(params: SamplingParams, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Prompts and what the engine said to each."""
    engine = InProcess(Bigrams(), VOCAB, Setup(context_length=256))
    prompts = [[at % VOCAB, (5 * at + 1) % VOCAB] for at in range(REQUESTS)]
    given = [msgspec.structs.replace(params, seed=seed * 10_000 + at) for at in range(REQUESTS)]
    ids = [engine.submit(prompt, each) for prompt, each in zip(prompts, given, strict=True)]
    return list(zip(prompts, (answer.tokens for answer in engine.finish(ids)), strict=True))


class Sum:
    """A sum of draws' values, and how far it is from what was to be expected."""

    def __init__(self) -> None:
        self.excess = self.variance = 0.0

    def add(self, word: int, values: Floats, likely: Floats) -> None:
        mean = float(values @ likely)
        self.excess += float(values[word]) - mean
        self.variance += float((values - mean) ** 2 @ likely)

    def p_value(self) -> float:
        if self.variance < 5:
            return 1.0
        return float(2 * stats.norm.sf(abs(self.excess) / self.variance**0.5))


def p_values(found: list[tuple[list[int], list[int]]], params: SamplingParams) -> tuple[float, ...]:
    """How likely draws like these are: by word, by rank, by surprise, by repeats. Zeros if one was impossible."""
    rng = np.random.default_rng(1)
    expected, observed = np.zeros(VOCAB), np.zeros(VOCAB)
    uniform = []
    surprise, repeats = Sum(), Sum()
    for prompt, said in found:
        for at, word in enumerate(said):
            likely = distribution(prompt, said[:at], params)
            if likely[word] == 0:
                return (0.0,)
            expected += likely
            observed[word] += 1
            uniform.append(likely[likely > likely[word]].sum() + rng.random() * likely[word])
            surprise.add(word, np.log(np.maximum(likely, 1e-30)), likely)
            repeats.add(word, np.bincount(said[:at], minlength=VOCAB).astype(np.float64), likely)
    usual = expected >= 5
    counts = np.append(observed[usual], observed[~usual].sum())
    hoped = np.append(expected[usual], expected[~usual].sum())
    if hoped[-1] < 5:
        counts, hoped = np.append(counts[:-2], counts[-2:].sum()), np.append(hoped[:-2], hoped[-2:].sum())
    by_word = stats.chi2.sf(((counts - hoped) ** 2 / hoped).sum(), len(hoped) - 1) if len(hoped) > 1 else 1.0
    binned, _ = np.histogram(uniform, bins=24, range=(0, 1))
    return float(by_word), float(stats.chisquare(binned).pvalue), surprise.p_value(), repeats.p_value()


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"temperature": 1.15}),
    "cool": ({"temperature": 0.6}, {"temperature": 0.7}),
    "hot": ({"temperature": 1.7}, {"temperature": 2.0}),
    "greedy": ({"temperature": 0.0}, {"temperature": 0.3}),
    "top_k": ({"top_k": 5}, {"top_k": 6}),
    "top_k of 1": ({"top_k": 1}, {"top_k": 2}),
    "top_p": ({"top_p": 0.8}, {"top_p": 0.86}),
    "min_p": ({"min_p": 0.1}, {"min_p": 0.06}),
    "top_k and top_p": ({"top_k": 6, "top_p": 0.75}, {"top_k": 6, "top_p": 0.85}),
    "all filters": (
        {"temperature": 1.4, "top_k": 8, "top_p": 0.9, "min_p": 0.08},
        {"temperature": 1.4, "top_k": 8, "top_p": 0.9, "min_p": 0.12},
    ),
    "filters at a temperature": ({"temperature": 0.5, "top_p": 0.8}, {"temperature": 0.5, "top_p": 0.7}),
    "frequency": ({"frequency_penalty": 0.3}, {"frequency_penalty": 0.45}),
    "negative frequency": ({"frequency_penalty": -0.05}, {"frequency_penalty": 0.0}),
    "presence": ({"presence_penalty": 1.5, "max_new_tokens": 12}, {"presence_penalty": 1.0, "max_new_tokens": 12}),
    "repetition": ({"repetition_penalty": 1.6, "max_new_tokens": 12}, {"repetition_penalty": 1.3, "max_new_tokens": 12}),
    "repetition below 1": (
        {"repetition_penalty": 0.6, "max_new_tokens": 12},
        {"repetition_penalty": 0.75, "max_new_tokens": 12},
    ),
    "all penalties": (
        {"frequency_penalty": 0.2, "presence_penalty": -0.7, "repetition_penalty": 1.3, "top_p": 0.95},
        {"frequency_penalty": 0.2, "presence_penalty": -0.7, "repetition_penalty": 1.1, "top_p": 0.95},
    ),
    "logit_bias": ({"logit_bias": {3: 1.5, 9: -2.0}}, {"logit_bias": {3: 1.0, 9: -2.0}}),
    "min_new_tokens": (
        {"min_new_tokens": 30, "stop_token_ids": (2, 3)},
        {"min_new_tokens": 40, "stop_token_ids": (2, 3)},
    ),
    "allowed_token_ids": ({"allowed_token_ids": (1, 4, 7, 8, 15)}, {"allowed_token_ids": (1, 4, 7, 8)}),
    "bad_words": ({"bad_words": ((5,), (1, 2), (9, 8, 7))}, {"bad_words": ((5,), (1, 3))}),
    "everything": (
        {"temperature": 0.9, "top_k": 10, "top_p": 0.9, "min_p": 0.02, "frequency_penalty": 0.1, "logit_bias": {4: 1.0}},
        {"temperature": 0.9, "top_k": 10, "top_p": 0.9, "min_p": 0.02, "frequency_penalty": 0.1, "logit_bias": {4: 0.6}},
    ),
}  # fmt: skip


SHORT = {"all filters", "all penalties", "bad_words", "min_new_tokens"}
"""Cases that `make test` holds against a neighbour. It draws with all of them in
`test_rows_of_one_batch_keep_their_own_settings`."""


def sampling(given: dict[str, Any]) -> SamplingParams:
    params = SamplingParams(**{"max_new_tokens": TOKENS, "ignore_eos": True, **given})
    params.check(VOCAB)
    return params


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in CASES]
)
def test_draws_follow_their_distribution_and_no_near_one(case: str) -> None:
    asked, near = (sampling(each) for each in CASES[case])
    # short answers draw from several seeds, to have as much to judge
    found = [each for seed in range(max(1, 240 // asked.max_new_tokens)) for each in draws(asked, seed)]
    assert min(p_values(found, asked)) > ACCEPTED
    assert min(p_values(found, near)) < REJECTED


@pytest.mark.parametrize(("top_p", "count"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.51, 3), (0.2, 1), (1.0, 4)])
def test_a_token_at_the_border_of_top_p_is_out(top_p: float, count: int) -> None:
    """Four tokens of a quarter each, in an order: those before them have exactly 0, 1/4, 1/2 and 3/4."""
    logits = torch.tensor([[0.0, -1e-30, -2e-30, -3e-30]])
    assert torch.exp(logits.double()).tolist() == [[1.0] * 4]
    one, none = torch.ones(1), torch.zeros(1)
    keeps = kept(logits, one, torch.zeros(1, dtype=torch.int64), torch.tensor([top_p]), none)
    assert keeps.tolist() == [[at < count for at in range(4)]]


def test_filters_keep_what_brute_force_keeps() -> None:
    """Token by token, with ties; whatever is as likely as the last one that is kept is kept too."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        logits = rng.integers(-4, 5, (1, 12)).astype(np.float32) / 2
        temperature, top_k = float(rng.choice([0.5, 1.0, 2.0])), int(rng.integers(-1, 14))
        top_p, min_p = float(rng.choice([0.1, 0.5, 0.9, 1.0])), float(rng.choice([0.0, 0.2, 1.0]))
        likely = np.exp(logits[0].astype(np.float64) / temperature)
        likely /= likely.sum()
        expected = [
            bool(
                (top_k < 1 or (likely > each).sum() < top_k)
                and (top_p == 1.0 or likely[likely > each].sum() < top_p)
                and each >= min_p * likely.max()
            )
            for each in likely
        ]
        found = kept(
            torch.from_numpy(logits), torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p]),
            torch.tensor([min_p]),
        )  # fmt: skip
        assert found[0].tolist() == expected, (logits, temperature, top_k, top_p, min_p)


class TableProposer:
    """Drafts by another table that is like the model's: drawn one behind the other, or the likeliest ones as a tree."""

    reads = Reads()
    num_layers = 0

    def __init__(self, shape: TreeShape | None) -> None:
        self._shape = shape
        noise = np.random.default_rng(8).normal(size=TABLE.shape).astype(np.float32)
        self._table = torch.from_numpy(TABLE + 0.7 * noise)

    def propose(self, step: Drafting) -> list[Tensor] | TreeDrafts:
        last, made = step.rows.last_R, []
        if self._shape is not None and step.count:
            return grow_tree(self._table[last], self._behind, self._shape, step.count, None)
        for place in range(step.count):
            last = step.draw(self._table[last], place)
            made.append(last)
        return made

    def _behind(self, frontier: Frontier) -> Tensor:
        return self._table[frontier.tokens]


RULES: dict[str, AcceptRule] = {
    "rejection": Rejection(block=False),
    "block": Rejection(block=True),
    "not loose": Thresholds(1.0, 1.0),
}


def drafting_engine(drafts: str, rule: AcceptRule | None = None) -> InProcess:
    """`drafts`: none, deterministic ones of texts (ngram), those of a `TableProposer`, not drawn (tree) or drawn, and judged
    by one of `RULES` or by the usual one (chain)."""
    if drafts in ("none", "ngram"):
        return InProcess(Bigrams(), VOCAB, Setup(context_length=256, drafts=drafts))
    shape = TreeShape(3, 3) if drafts == "tree" else None
    proposer = DraftsOnDevice(TableProposer(shape), torch.nn.Module(), 0 if shape is None else shape.steps + 1)
    setup = Setup(context_length=256, drafts="device", most_drafts=3 if shape is None else 8)
    return InProcess(Bigrams(), VOCAB, setup, proposer=proposer, rule=rule or RULES.get(drafts))


@pytest.mark.parametrize("drafts", ["none", "rejection", *map(long, ("tree", "ngram", "chain", "block", "not loose"))])
def test_rows_of_one_batch_keep_their_own_settings(drafts: str) -> None:
    """All cases at once, in the same steps; with drafts, which are often right in texts of so few words, and often wrong."""
    engine = drafting_engine(drafts)
    params = [sampling({"max_new_tokens": 80, **asked}) for asked, _ in CASES.values()]
    pending = []
    for seed in range(8 if drafts == "none" else 4):
        for each in params:
            prompt = [seed, (3 * seed + 2) % VOCAB]
            pending.append((prompt, each, engine.submit(prompt, msgspec.structs.replace(each, seed=77_000 + seed))))
    answers = engine.finish([request for *_, request in pending])
    counters = engine.queues.counters
    assert counters.accepted_tokens >= (0 if drafts == "none" else 500)
    assert counters.draft_tokens - counters.accepted_tokens >= (0 if drafts == "none" else 500)
    said = [(prompt, each, answer.tokens) for (prompt, each, _), answer in zip(pending, answers, strict=True)]
    for each in params:
        found = [(prompt, tokens) for prompt, own, tokens in said if own is each]
        assert min(p_values(found, each)) > ACCEPTED, each


def test_a_seed_draws_the_same_whatever_the_batch() -> None:
    asked = sampling({"seed": 5, "top_p": 0.9, "frequency_penalty": 0.2})
    alone = InProcess(Bigrams(), VOCAB, Setup(context_length=256)).generate([[1, 2]], asked)[0]
    engine = InProcess(Bigrams(), VOCAB, Setup(context_length=256, chunk_tokens=3))
    others = [engine.submit([at, 3], sampling({"seed": at, "temperature": 1.3})) for at in range(5)]
    mine = engine.submit([1, 2], asked)
    assert engine.finish([*others, mine])[-1].tokens == alone
    again = sampling({"seed": 6, "top_p": 0.9, "frequency_penalty": 0.2})
    assert engine.generate([[1, 2]], again)[0] != alone


@pytest.mark.parametrize("case", ["all penalties", long("bad_words"), long("min_new_tokens")])
def test_a_seed_draws_the_same_with_drafts(case: str) -> None:
    asked = [msgspec.structs.replace(sampling({"max_new_tokens": 80, **CASES[case][0]}), seed=at) for at in range(4)]
    said = []
    for drafts in ("none", "ngram", "chain", "tree"):
        engine = drafting_engine(drafts)
        ids = [engine.submit([at, 3], each) for at, each in enumerate(asked)]
        said.append([answer.tokens for answer in engine.finish(ids)])
        assert drafts == "none" or engine.queues.counters.accepted_tokens > 10
    assert said[1:] == said[:1] * 3


def accepted_share(rule: AcceptRule | None, drafts: str = "chain") -> tuple[float, list[list[int]]]:
    """Of the drafts, and what was said."""
    engine = drafting_engine(drafts, rule)
    asked = [sampling({"seed": at, "temperature": 1.2, "max_new_tokens": 80}) for at in range(REQUESTS)]
    answers = engine.finish([engine.submit([at % VOCAB, 3], each) for at, each in enumerate(asked)])
    counters = engine.queues.counters
    return counters.accepted_tokens / counters.draft_tokens, [answer.tokens for answer in answers]


def test_rejection_accepts_more_than_equal_noise_and_blocks_most() -> None:
    usual, rejection, block = (accepted_share(rule)[0] for rule in (None, RULES["rejection"], RULES["block"]))
    assert usual < rejection < block


@pytest.mark.parametrize("drafts", ["chain", long("tree")])
def test_thresholds_accept_what_is_likely_enough(drafts: str) -> None:
    usual, said = accepted_share(None, drafts)
    unchanged, same = accepted_share(Thresholds(1.0, 1.0), drafts)
    assert (unchanged, same) == (usual, said)
    assert accepted_share(Thresholds(1.0, 0.5), drafts)[0] > usual + 0.03
    assert accepted_share(Thresholds(0.2, 1.0), drafts)[0] > usual + 0.03
    everything, _ = accepted_share(Thresholds(1e-9, 1.0), drafts)
    assert everything > (0.99 if drafts == "chain" else usual + 0.03)  # of a tree one path at most


@pytest.mark.parametrize("rule", [Thresholds(0.1, 0.5), *RULES.values()])
def test_no_rule_changes_greedy_answers(rule: AcceptRule) -> None:
    asked = sampling({"temperature": 0.0, "frequency_penalty": 0.3, "max_new_tokens": 80})
    plain = InProcess(Bigrams(), VOCAB, Setup(context_length=256)).generate([[1, 2]], asked)
    assert drafting_engine("chain", rule).generate([[1, 2]], asked) == plain


def test_without_a_seed_requests_differ() -> None:
    engine = InProcess(Bigrams(), VOCAB, Setup(context_length=256))
    found = engine.generate([[1, 2]] * 8, sampling({"max_new_tokens": 40}))
    assert len({tuple(each) for each in found}) == 8


@pytest.mark.parametrize("shift", [(1, 0), (0, 1), (1 << 32, 0), (0, 1 << 32)], ids=str)
def test_neighbouring_seeds_and_draws_are_independent(shift: tuple[int, int]) -> None:
    """Two draws that differ by one in their seed or their number: the table of pairs has the product's distribution."""
    rows, vocab = 40_000, 6
    logits = torch.from_numpy(np.linspace(-1.0, 1.0, vocab, dtype=np.float32)).repeat(rows, 1)
    ones = torch.ones(rows)
    seeds, counters = torch.arange(rows) * 2, torch.arange(rows) * 2 % 4099
    first, second = (
        kernels.sample(
            logits, ones, torch.zeros(rows, dtype=torch.int32), ones, 0 * ones, seeds + by, counters + number
        )
        for by, number in ((0, 0), shift)
    )
    pairs = np.bincount((first * vocab + second).numpy(), minlength=vocab * vocab)
    likely = np.exp(np.linspace(-1.0, 1.0, vocab))
    likely /= likely.sum()
    assert stats.chisquare(pairs, rows * np.outer(likely, likely).ravel()).pvalue > ACCEPTED
