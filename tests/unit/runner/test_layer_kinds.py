"""Layers are alike if their modules, settings and shapes are; a few stand for all that follow each other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import nn

from bough.runner.layer_kinds import kind_of, unlike_layers


@dataclass(frozen=True)
class Spec:
    layer: int
    window: int | None


class Layer(nn.Module):
    def __init__(
        self, number: int, width: int = 8, window: int | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 8, dtype=dtype)
        self.spec = Spec(number, window)


def test_the_place_makes_no_other_kind() -> None:
    assert kind_of(Layer(0)) == kind_of(Layer(1))


@pytest.mark.parametrize("other", [Layer(0, width=16), Layer(0, window=5), Layer(0, dtype=torch.bfloat16)])
def test_what_kernels_depend_on_makes_another(other: Layer) -> None:
    assert kind_of(other) != kind_of(Layer(0))


def test_a_table_in_place_of_a_product_makes_another() -> None:
    layer = Layer(0)
    layer.table = torch.zeros(3, 8)
    assert kind_of(layer) != kind_of(Layer(0))


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [
        ("a", {0}),
        ("aaaaaa", {0, 1, 5}),
        ("baaaaa", {0, 1, 2, 5}),
        ("ababab", {0, 1, 2, 5}),
        ("ababcc", {0, 1, 2, 3, 4, 5}),
        ("aaabaaab", {0, 1, 3, 4, 7}),
    ],
)
def test_each_kind_follows_what_it_follows(kinds: str, chosen: set[int]) -> None:
    layers = [Layer(number, width=8 * (1 + ord(kind))) for number, kind in enumerate(kinds)]
    found = unlike_layers(layers)
    run = [kinds[number] for number in sorted(found)]
    pairs = set(pairwise(kinds))
    assert pairs <= set(pairwise(run))
    assert found == chosen
