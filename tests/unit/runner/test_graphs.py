"""Which graph serves which step, without a device: captures are only noted."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from bough.runner.graphs import WORTH_IT, GraphKey, Graphs, token_sizes


class NotedGraphs(Graphs):
    def __init__(self, largest: int = 512) -> None:
        super().__init__(forward=None, max_tokens=largest, context_length=1024, spare_slot=8)  # type: ignore[arg-type]
        self.captures: list[GraphKey] = []

    def _record(self, key: GraphKey) -> Any:
        self.captures.append(key)
        return SimpleNamespace(key=key)

    def key_for(self, tokens: int, rows: int, shared: bool = False) -> GraphKey | None:
        served: Any = self.serve(tokens, rows, "sampled", shared)
        return None if served is None else served.key


def test_sizes_grow_finely_and_never_beyond_the_largest():
    sizes = token_sizes(300)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] <= 300
    assert all(b <= 2 * a for a, b in pairwise(sizes))


def test_a_decode_size_is_captured_at_once_and_found_again():
    graphs = NotedGraphs()
    first = graphs.key_for(100, 100)
    assert first is not None
    assert first.decode
    assert first.tokens >= 100
    assert graphs.key_for(97, 97) == first
    assert graphs.captures == [first]


def test_a_larger_graph_stands_in_and_the_size_is_wanted_for_later():
    graphs = NotedGraphs()
    graphs.warm_up([(64, 64), (256, 256)])
    assert graphs.key_for(3, 3) == GraphKey(64, 64, "sampled", False, True)
    assert graphs.key_for(200, 200) == GraphKey(256, 256, "sampled", False, True)
    assert len(graphs.captures) == 2
    assert graphs.capture_one_wanted()
    assert graphs.capture_one_wanted()
    assert not graphs.capture_one_wanted()
    assert graphs.key_for(3, 3) == GraphKey(4, 4, "sampled", False, True)


def test_a_graph_that_suits_better_takes_the_stand_ins_place():
    graphs = NotedGraphs()
    graphs.warm_up([(64, 64)])
    assert [graphs.key_for(3, 3) for _ in range(2)] == [GraphKey(64, 64, "sampled", False, True)] * 2
    graphs.capture(GraphKey(8, 8, "sampled", False, True))
    assert [graphs.key_for(3, 3) for _ in range(2)] == [GraphKey(8, 8, "sampled", False, True)] * 2


def test_too_much_padding_is_not_accepted():
    graphs = NotedGraphs()
    graphs.warm_up([(256, 256)])
    key = graphs.key_for(100, 100)
    assert key is not None
    assert key.tokens < 256


def test_rare_mixtures_run_eagerly_and_frequent_ones_get_a_graph():
    graphs = NotedGraphs()
    for _ in range(WORTH_IT):
        assert graphs.key_for(130, 5) is None
    key = graphs.key_for(130, 5)
    assert key is not None
    assert not key.decode
    assert key.rows >= 5


def test_any_larger_graph_serves_a_mixture():
    """Launching one kernel by kernel takes the host longer than the largest graph takes the device."""
    graphs = NotedGraphs()
    graphs.warm_up([(512, 65), (256, 8)])
    assert graphs.key_for(10, 3) == GraphKey(256, 8, "sampled", False, False)
    assert graphs.key_for(30, 20) == GraphKey(512, 512, "sampled", False, False)
    assert len(graphs.captures) == 2
    assert graphs.capture_one_wanted()
    assert graphs.captures[-1].tokens == 32


def test_decode_graphs_never_serve_mixtures_nor_shared_steps():
    graphs = NotedGraphs()
    graphs.warm_up([(64, 64)])
    assert graphs.key_for(60, 3) is None
    shared = graphs.key_for(60, 60, shared=True)
    assert shared is not None
    assert shared.shared


@pytest.mark.parametrize(("tokens", "rows"), [(513, 513), (8192, 1)])
def test_large_steps_have_no_graph(tokens: int, rows: int):
    assert NotedGraphs().key_for(tokens, rows) is None


def test_wanted_sizes_come_in_their_order():
    graphs = NotedGraphs()
    graphs.want([2, 4, 16])
    graphs.want([64], shared=True)
    while graphs.capture_one_wanted():
        pass
    assert [(key.tokens, key.shared) for key in graphs.captures] == [(2, False), (4, False), (16, False), (64, True)]
