"""Which graph serves which step, without a device: captures are only noted."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from bough.runner.graphs import WORTH_IT, Extents, GraphKey, Graphs, token_sizes


class NotedGraphs(Graphs):
    def __init__(self, largest: int = 512) -> None:
        super().__init__(forward=None, max_tokens=largest, context_length=1024, spare_slot=8)  # type: ignore[arg-type]
        self.captures: list[GraphKey] = []

    def _record(self, key: GraphKey) -> Any:
        self.captures.append(key)
        return SimpleNamespace(key=key)

    def key_for(self, tokens: int, rows: int, shared: bool = False) -> GraphKey | None:
        served: Any = self.serve(size(tokens, rows), "sampled", shared)
        return None if served is None else served.key


def size(tokens: int, rows: int) -> Extents:
    return Extents(tokens, rows, rows, max_query=1 if tokens == rows else tokens)


def key(tokens: int, rows: int, *, decode: bool) -> GraphKey:
    return GraphKey(tokens, rows, rows, 1, "sampled", False, decode)


def test_sizes_grow_finely_and_never_beyond_the_largest():
    sizes = token_sizes(300)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] <= 300
    assert all(b <= 2 * a for a, b in pairwise(sizes))


def test_sizes_go_on_as_far_as_they_are_wanted():
    sizes = token_sizes(8192)
    assert sizes[-1] == 8192
    assert all(b - a <= 192 for a, b in pairwise(sizes))


def test_a_large_graph_serves_mixtures_that_are_not_much_smaller():
    graphs = NotedGraphs(largest=1280)
    graphs.warm_up([size(1200, 1)])
    assert graphs.key_for(1100, 1) == key(1280, 1, decode=False)
    assert graphs.key_for(600, 1) is None, "half of it would be padding"
    graphs.warm_up([size(700, 300)])
    assert graphs.captures[-1] == key(768, 512, decode=False), "fewer rows than tokens, since logits are large"


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
    graphs.warm_up([size(64, 64), size(256, 256)])
    assert graphs.key_for(3, 3) == key(64, 64, decode=True)
    assert graphs.key_for(200, 200) == key(256, 256, decode=True)
    assert len(graphs.captures) == 2
    assert graphs.capture_one_wanted()
    assert graphs.capture_one_wanted()
    assert not graphs.capture_one_wanted()
    assert graphs.key_for(3, 3) == key(3, 3, decode=True)


def test_a_graph_that_suits_better_takes_the_stand_ins_place():
    graphs = NotedGraphs()
    graphs.warm_up([size(64, 64)])
    assert [graphs.key_for(3, 3) for _ in range(2)] == [key(64, 64, decode=True)] * 2
    graphs.capture(key(8, 8, decode=True))
    assert [graphs.key_for(3, 3) for _ in range(2)] == [key(8, 8, decode=True)] * 2


def test_too_much_padding_is_not_accepted():
    graphs = NotedGraphs()
    graphs.warm_up([size(256, 256)])
    found = graphs.key_for(100, 100)
    assert found is not None
    assert found.tokens < 256


def test_rare_mixtures_run_eagerly_and_frequent_ones_get_a_graph():
    graphs = NotedGraphs()
    for _ in range(WORTH_IT):
        assert graphs.key_for(130, 5) is None
    found = graphs.key_for(130, 5)
    assert found is not None
    assert not found.decode
    assert found.rows >= 5


def test_any_larger_graph_serves_a_mixture():
    """Launching one kernel by kernel takes the host longer than the largest graph takes the device."""
    graphs = NotedGraphs()
    graphs.warm_up([size(512, 65), size(256, 8)])
    assert graphs.key_for(10, 3) == key(256, 8, decode=False)
    assert graphs.key_for(30, 20) == key(512, 512, decode=False)
    assert len(graphs.captures) == 2
    assert graphs.capture_one_wanted()
    assert graphs.captures[-1].tokens == 32


def test_decode_graphs_never_serve_mixtures_nor_shared_steps():
    graphs = NotedGraphs()
    graphs.warm_up([size(64, 64)])
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
    assert [(each.tokens, each.shared) for each in graphs.captures] == [(2, False), (4, False), (16, False), (64, True)]


def verifying(rows: int, width: int, tokens: int = 0) -> Extents:
    tokens = tokens or rows * width
    return Extents(tokens, rows, tokens, width, width)


def test_a_step_with_drafts_has_a_graph_of_rows_and_queries():
    graphs = NotedGraphs()
    served: Any = graphs.serve(verifying(60, 4), "sampled", False)
    assert served.key == GraphKey(240, 64, 240, 4, "sampled", False, True)
    assert graphs.serve(verifying(57, 3, tokens=140), "sampled", False) is not served, "too much padding"


def test_a_graph_of_more_queries_stands_in_for_one_of_fewer_but_not_for_none():
    graphs = NotedGraphs()
    wide: Any = graphs.serve(verifying(4, 8), "sampled", False)
    assert graphs.serve(verifying(3, 5), "sampled", False) is wide
    plain: Any = graphs.serve(size(4, 4), "sampled", False)
    assert plain.key.width == 1


def test_prompts_beside_drafts_run_in_a_mixture_with_room_for_their_samples():
    graphs = NotedGraphs()
    step = Extents(tokens=100, rows=9, samples=33, width=4, max_query=68)
    for _ in range(WORTH_IT):
        assert graphs.serve(step, "sampled", False) is None
    served: Any = graphs.serve(step, "sampled", False)
    assert not served.key.decode
    assert served.key.samples >= 33
    assert served.key.width == 4
