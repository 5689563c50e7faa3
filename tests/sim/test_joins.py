"""Joined contexts on the oracle model: what a request reads through the pages is the branches, one behind the other."""

from __future__ import annotations

import random

import pytest

from bough.bench.fake_runner import lone_output
from bough.core.messages import FlushCache, JoinBranches, Recall, Reply, joined_namespace, unpack_ids
from bough.core.step import Step
from tests.sim.harness import VOCAB, Client, Sim, expected

PARENT = [(5 * i + 2) % VOCAB for i in range(22)]


def keep(sim: Sim, prompt: list[int], namespace: str = "") -> Client:
    client = sim.ask(prompt, max_new=0, namespace=namespace)
    client.ask.keep = True
    return client


def call_join(sim: Sim, parent: Client, branches: list[Client], session: str, shifts: tuple[int, ...] = ()) -> Reply:
    call = 1000 + len(sim.replies)
    names = tuple(branch.ask.rid for branch in branches)
    joined = joined_namespace("", session)
    sim.inbox.messages.append(
        JoinBranches(
            call=call,
            namespace="",
            branches=names,
            starts=(len(parent.prompt),) * len(names),
            shifts=shifts,
            joined=joined,
        )
    )
    sim.turn()
    return sim.replies[-1]


def prefill_and_join(sim: Sim, own: list[list[int]], session: str = "s", parent: list[int] = PARENT) -> list[int]:
    """Joins branches that were prefilled; returns the tokens of the result."""
    top = keep(sim, parent)
    branches = [keep(sim, parent + tokens) for tokens in own]
    sim.run()
    reply = call_join(sim, top, branches, session)
    assert not reply.error
    assert reply.body["computed_tokens"] == 0
    ids: list[int] = unpack_ids(reply.body["ids"]).tolist()
    assert ids == parent + [token for tokens in own for token in tokens]
    return ids


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("lengths", [(1, 1), (5, 3, 7), (0, 4), (2, 0, 0), (12, 9), (6,), (4, 4, 2)])
def test_a_joined_context_is_read_and_nothing_of_it_computed(lengths: tuple[int, ...], depth: int) -> None:
    sim = Sim(num_pages=128, depth=depth)
    own = [[(i + 11 * at) % VOCAB for i in range(length)] for at, length in enumerate(lengths)]
    ids = prefill_and_join(sim, own)
    before = sim.runner.num_tokens
    text = [7, 7, 9]
    client = sim.ask(ids + text, max_new=10, namespace=joined_namespace("", "s"))
    sim.run()
    assert client.tokens == lone_output(ids + text, vocab_size=VOCAB, limit=10)[0]
    assert client.end.cached_tokens == len(ids)
    assert sim.runner.num_tokens - before == len(text) + 9
    again = sim.ask([*ids, 3], max_new=4, namespace=joined_namespace("", "s"))
    nothing_new = sim.ask(ids, max_new=4, namespace=joined_namespace("", "s"))
    sim.run()
    assert again.end.cached_tokens == len(ids)
    assert again.tokens == lone_output([*ids, 3], vocab_size=VOCAB, limit=4)[0]
    assert nothing_new.end.cached_tokens == len(ids) - 1
    assert nothing_new.tokens == lone_output(ids, vocab_size=VOCAB, limit=4)[0]


def test_nobody_else_finds_it() -> None:
    sim = Sim(num_pages=128)
    ids = prefill_and_join(sim, [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    plain = sim.ask([*ids, 1], max_new=2)
    other = sim.ask([*ids, 1], max_new=2, namespace=joined_namespace("", "t"))
    sim.run()
    assert plain.end.cached_tokens == 24  # the parent and the first branch, as it was computed: whole pages
    assert other.end.cached_tokens == 0


def test_joins_of_joins() -> None:
    sim = Sim(num_pages=128)
    ids = prefill_and_join(sim, [[1, 2, 3], [4, 5, 6, 7]])
    inside = joined_namespace("", "s")
    parent = keep(sim, [*ids, 8], inside)
    branches = [keep(sim, [*ids, 8, 9, 9], inside), keep(sim, [*ids, 8, 10, 11, 12], inside)]
    sim.run()
    reply = call_join(sim, parent, branches, "s2")
    assert not reply.error
    both = [*ids, 8, 9, 9, 10, 11, 12]
    assert unpack_ids(reply.body["ids"]).tolist() == both
    client = sim.ask([*both, 1], max_new=5, namespace=joined_namespace("", "s2"))
    sim.run()
    assert client.end.cached_tokens == len(both)
    assert client.tokens == lone_output([*both, 1], vocab_size=VOCAB, limit=5)[0]


def test_what_was_kept_in_a_session_is_gone_on_from_there_only() -> None:
    """Elsewhere the same tokens were computed one after the other, and have another KV."""
    sim = Sim(num_pages=128)
    ids = prefill_and_join(sim, [[1, 2, 3], [4, 5, 6, 7]])
    inside = joined_namespace("", "s")
    kept = keep(sim, [*ids, 8], inside)
    sim.ask(kept.prompt, max_new=0)
    sim.run()
    followers = [sim.ask([*kept.prompt, 1, 2], max_new=2, namespace=where) for where in ("", inside)]
    for client in followers:
        client.ask.follows = kept.ask.rid
    sim.run()
    assert [client.end.cached_tokens for client in followers] == [28, 30]
    assert len(kept.prompt) == 30


def test_shifts_turn_keys_and_nothing_else() -> None:
    seen: list[Step] = []
    sim = Sim(num_pages=128, fail_launch=lambda step: seen.append(step))
    top, branches = keep(sim, PARENT), [keep(sim, PARENT + own) for own in ([1, 2], [3, 4, 5])]
    sim.run()
    assert not call_join(sim, top, branches, "s", shifts=(0, 5)).error
    ids = [*PARENT, 1, 2, 3, 4, 5]
    sim.ask([*ids, 6], max_new=1, namespace=joined_namespace("", "s"))
    sim.run()
    (moves,) = [moves for step in seen for moves in step.moves]
    turned = moves.turn.tolist()[: len(ids) // 4 * 4]  # those in the tree; the tail's follow
    assert turned == [0] * 24
    assert moves.turn.tolist()[24:] == [7, 7, 7]


def test_what_can_not_be_joined_is_refused_with_a_reason() -> None:
    sim = Sim(num_pages=128)
    top, stranger = keep(sim, PARENT), keep(sim, [*PARENT, 1], joined_namespace("", "other"))
    forgotten = sim.ask([*PARENT, 1], max_new=0)
    branch, talker = keep(sim, [*PARENT, 1]), sim.ask([*PARENT, 2], max_new=2)
    short, short_branch = keep(sim, [1]), keep(sim, [1, 2])
    sim.run()
    for bad, why in (
        (stranger, "the same context"),
        (forgotten, "can't be reached"),
        (talker, "can't be reached"),
    ):
        assert why in call_join(sim, top, [branch, bad], "s").error
    assert "a page has 4" in call_join(sim, short, [short_branch], "s").error
    assert "positions outside" in call_join(sim, top, [branch], "s", shifts=(90,)).error
    long = [keep(sim, PARENT + [at] * 40) for at in range(3)]
    sim.run()
    assert "142 tokens" in call_join(sim, top, long, "s").error
    sim.inbox.messages.append(Recall(1, joined_namespace("", "s")))
    sim.turn()
    assert "no such session" in sim.replies[-1].error


def test_what_was_joined_can_be_recalled_until_it_is_flushed() -> None:
    sim = Sim(num_pages=128)
    ids = prefill_and_join(sim, [[1, 2, 3], [4, 5, 6, 7]])
    joined = joined_namespace("", "s")
    sim.inbox.messages.append(Recall(1, joined))
    sim.turn()
    assert unpack_ids(sim.replies[-1].body["ids"][0]).tolist() == ids
    sim.inbox.messages += [FlushCache(2), Recall(3, joined)]
    sim.turn()
    assert sim.cache.pool.num_free == sim.cache.total
    assert "no such session" in sim.replies[-1].error
    client = sim.ask([*ids, 1], max_new=3, namespace=joined)  # the text is still true
    sim.run()
    assert client.end.cached_tokens == 0
    assert client.tokens == expected(sim, client)[0]


def test_kept_pages_give_way() -> None:
    sim = Sim(num_pages=12, context_length=48)
    for at in range(5):
        keep(sim, [at, 1, 2, 3, 4])
    sim.run()
    assert sim.cache.num_kept == 5
    client = sim.ask(PARENT, max_new=18)  # needs all pages but one
    sim.run()
    assert client.tokens == expected(sim, client)[0]
    assert sim.cache.num_kept < 5
    for at in range(40):
        keep(sim, [at % VOCAB, 5, at // VOCAB])
    sim.run()
    assert len(sim.cache.tails) <= 8


@pytest.mark.parametrize("seed", range(12))
def test_joins_in_traffic(seed: int) -> None:
    """Programs fork, join and go on among strangers, with little memory and steps that fail."""
    rng = random.Random(seed)
    failing = {rng.randrange(5, 400) for _ in range(rng.choice([0, 3]))}

    def fail(step: Step) -> Exception | None:
        return MemoryError("out of memory") if step.index in failing else None

    sim = Sim(
        num_pages=rng.choice([24, 40, 128]), depth=seed % 2, fail_launch=fail if seed % 3 else None,
        fail_wait=None if seed % 3 else fail, eviction=rng.choice(["lru", "lfu"]),
    )  # fmt: skip
    joined = 0
    for program in range(10):
        parent = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 16))]
        own = [[rng.randrange(VOCAB) for _ in range(rng.randrange(0, 9))] for _ in range(rng.randrange(1, 4))]
        top, branches = keep(sim, parent), [keep(sim, parent + tokens) for tokens in own]
        for _ in range(rng.randrange(4)):
            sim.ask([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))], max_new=rng.randrange(12))
        while not all(client.ends for client in (top, *branches)):
            sim.turn()
        session = f"s{program}"
        reply = call_join(sim, top, branches, session)
        joined += not reply.error
        if reply.error:
            continue
        ids = unpack_ids(reply.body["ids"]).tolist()
        for _ in range(rng.randrange(1, 4)):
            text = [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 6))]
            sim.ask(ids + text, max_new=rng.randrange(1, 10), namespace=joined_namespace("", session))
        for _ in range(rng.randrange(3)):
            sim.turn()
    sim.run()
    assert joined >= 3
    for client in sim.clients.values():
        if client.end.reason in ("stop", "length"):
            assert client.tokens == expected(sim, client)[0]
        else:
            assert client.end.code == "request_failed"
