"""Requests that follow a kept one find its prompt to its last token; and requests are ended by their names."""

from __future__ import annotations

import random

import pytest

from bough.core.messages import AbortByName, FlushCache, owned_name
from tests.sim.harness import VOCAB, Client, Sim, check_answer


def keep(sim: Sim, prompt: list[int], namespace: str = "") -> Client:
    client = sim.ask(prompt, max_new=0, namespace=namespace)
    client.ask.keep = True
    return client


def follow(sim: Sim, kept: Client, own: list[int], max_new: int = 1, namespace: str = "") -> Client:
    client = sim.ask(kept.prompt + own, max_new=max_new, namespace=namespace)
    client.ask.follows = kept.ask.rid
    return client


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 15, 16, 17, 30])
def test_a_kept_prompt_is_computed_once(size: int, depth: int) -> None:
    sim = Sim(num_pages=128, depth=depth)
    kept = keep(sim, [(7 * i + 3) % VOCAB for i in range(size)])
    sim.run()
    before = sim.runner.num_tokens
    assert before == size
    own = [[(11 * at + i + 1) % VOCAB for i in range(1 + at % 3)] for at in range(6)]
    clients = [follow(sim, kept, tokens) for tokens in own]
    sim.run()
    assert sim.runner.num_tokens - before == sum(map(len, own))
    for client in clients:
        assert client.end.cached_tokens == size
        check_answer(sim, client)


def test_who_follows_nothing_or_something_else_is_served_all_the_same() -> None:
    sim = Sim(num_pages=128)
    prompt = [(5 * i + 2) % VOCAB for i in range(21)]
    kept = keep(sim, prompt)
    sim.run()
    other = sim.ask([*prompt[:10], 1, 2, 3], max_new=4)
    other.ask.follows = kept.ask.rid
    unknown = sim.ask([*prompt, 1], max_new=4)
    unknown.ask.follows = "nobody"
    apart = follow(sim, kept, [1], max_new=4, namespace="another")
    sim.run()
    for client in (other, unknown, apart):
        check_answer(sim, client)
    assert apart.end.cached_tokens == 0
    sim.inbox.messages.append(FlushCache(1))
    sim.turn()
    late = follow(sim, kept, [4, 5], max_new=4)
    sim.run()
    check_answer(sim, late)
    assert late.end.cached_tokens == 0


def test_what_a_tenant_keeps_is_followed_by_nobody_else() -> None:
    """By its plain name, which another tenant may give, it is not found: only to the last whole page, like any prompt."""
    sim = Sim(num_pages=128, page_size=4)
    kept = keep(sim, [(7 * i + 3) % VOCAB for i in range(18)])
    kept.ask.tenant = "one"
    sim.run()
    others, own = (follow(sim, kept, [1 + at]) for at in range(2))
    own.ask.follows = owned_name("one", kept.ask.rid)
    sim.run()
    assert (others.end.cached_tokens, own.end.cached_tokens) == (16, 18)


@pytest.mark.parametrize("seed", range(12))
def test_under_traffic_in_little_memory(seed: int) -> None:
    """Kept prompts come and go, are evicted and followed; what followers read is always their own prompt."""
    chance = random.Random(seed)
    sim = Sim(num_pages=24, num_slots=4, depth=seed % 2, max_step_tokens=chance.choice([8, 16, 64]))
    kept: list[Client] = []
    asked: list[Client] = []
    for _ in range(60):
        roll = chance.random()
        if roll < 0.3 or not kept:
            kept.append(keep(sim, [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 20))]))
        elif roll < 0.8:
            own = [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 6))]
            asked.append(follow(sim, chance.choice(kept), own, max_new=chance.randrange(1, 6)))
        for _ in range(chance.randrange(4)):
            sim.turn()
    sim.run()
    assert asked
    for client in (*kept, *asked):
        check_answer(sim, client)


def test_a_tenant_ends_its_own_requests_only() -> None:
    sim = Sim(num_slots=4)
    clients = [sim.ask([i, 1, 2, 3], max_new=30) for i in range(4)]
    for client, tenant in zip(clients, ("one", "two", "one", ""), strict=True):
        client.ask.rid, client.ask.tenant = "same", tenant
    for _ in range(3):
        sim.turn()
    sim.inbox.messages.append(AbortByName(1, "same", tenant="one"))
    sim.turn()
    assert sim.replies[-1].body["aborted"] == 2
    sim.inbox.messages.append(AbortByName(2, "", tenant="two"))
    sim.turn()
    assert sim.replies[-1].body["aborted"] == 1
    sim.run()
    assert [client.end.reason for client in clients] == ["abort", "abort", "abort", "length"]


def test_ending_by_name() -> None:
    sim = Sim(num_slots=2)
    clients = [sim.ask([i, 1, 2, 3], max_new=30) for i in range(4)]
    for _ in range(3):
        sim.turn()
    names = [client.ask.rid for client in clients]
    assert len(set(names)) == 4
    sim.inbox.messages.append(AbortByName(1, names[0]))
    sim.inbox.messages.append(AbortByName(2, names[3]))
    sim.inbox.messages.append(AbortByName(3, names[1][:-1] + "?"))
    sim.turn()
    assert [(reply.call, reply.body["aborted"]) for reply in sim.replies] == [(1, 1), (2, 1), (3, 0)]
    assert {client.end.reason for client in (clients[0], clients[3])} == {"abort"}
    sim.inbox.messages.append(AbortByName(4, ""))
    sim.turn()
    assert sim.replies[-1].body["aborted"] == 2
    sim.run()
    assert {client.end.reason for client in clients} == {"abort"}
