"""Layers that keep a state: rows of several tokens, and one token of several rows."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bough.kernels.causal_conv import reference as conv_reference, triton as conv
from bough.kernels.delta_rule import reference as delta_reference, triton as delta
from bough.kernels.selective_scan import reference as selective_reference, triton as selective
from bough.kernels.ssd import reference as ssd_reference, triton as ssd
from triton_cases.bed import Bed, Cases, close, poison


def state_cases(bed: Bed) -> Cases:
    """Layers that keep a state: rows of several tokens, and one token of several rows."""
    lengths = (2, 64, 65, 1000) if bed.large else (2, 37, 65)
    widths = ((512, 4), (300, 3)) if bed.large else ((40, 4), (7, 2))
    for length, (channels, width), has_bias, dtype in bed.cover(lengths, widths, (False, True), bed.dtypes):
        name = f"causal_conv {length}x{channels}:{width} bias {has_bias} {dtype}"
        yield name, partial(_conv, bed, length, channels, width, has_bias, dtype)
    heads = ((24, 64, 8, 128), (16, 64, 1, 256), (6, 32, 2, 16)) if bed.large else ((4, 16, 2, 16), (3, 40, 1, 20))
    for length, shape in bed.cover(lengths, heads):
        yield f"ssd {length}x{shape}", partial(_ssd, bed, length, *shape)
    for length, (channels, states) in bed.cover(lengths, ((512, 16), (77, 8)) if bed.large else ((40, 16), (7, 3))):
        yield f"selective_scan {length}x{channels}x{states}", partial(_selective, bed, length, channels, states)
    nets = ((4, 8, 128, 128), (2, 6, 64, 96)) if bed.large else ((1, 2, 16, 16), (2, 4, 8, 40))
    for length, sizes in bed.cover(lengths, nets):
        for rates in (1, sizes[2]):
            yield f"delta_rule {length}x{sizes}x{rates}", partial(_delta, bed, length, *sizes, rates)


def _apart(bed: Bed, rows: int) -> Tensor:
    """Numbers of states, with others between them."""
    return bed.ints([5, 2, 1, 6, 0, 3][: 2 * rows], torch.int64)[::2]


def _advanced(ours: Any, theirs: Any, state: Tensor, at: Tensor | None) -> None:
    """Calls both with a copy of the state; what they return and leave there agrees."""
    rows = () if at is None else (at,)
    states = [state.clone(), state.clone()]
    with poison():
        got = ours(states[0], *rows)
    close(got, theirs(states[1], *rows), torch.float32)
    close(states[0], states[1], torch.float32)


def _conv(bed: Bed, length: int, channels: int, width: int, has_bias: bool, dtype: torch.dtype) -> None:
    x = bed.normal(length, 2 * channels, dtype=dtype)[:, :channels]
    weight, bias = bed.normal(channels, width), bed.normal(channels) if has_bias else None
    one = bed.normal(channels, width - 1)
    theirs = {each: partial(getattr(conv_reference, each), silu=has_bias) for each in ("conv_row", "conv_ones")}
    ours = {each: partial(getattr(conv, each), silu=has_bias) for each in theirs}
    _advanced(partial(ours["conv_row"], x, weight, bias), partial(theirs["conv_row"], x, weight, bias), one, None)
    x, many, at = x[:3], bed.normal(7, channels, width - 1), _apart(bed, min(length, 3))
    _advanced(partial(ours["conv_ones"], x, weight, bias), partial(theirs["conv_ones"], x, weight, bias), many, at)


def _scanned(bed: Bed, ours: Any, theirs: Any, row: list[Tensor], constant: list[Tensor], shape: list[int]) -> None:
    """`row`: inputs, steps, B and C by token. `constant`: rates and D."""
    (x, dt, b, c), (a, d) = row, constant
    given = (x, dt, a, b, c, d)
    _advanced(partial(ours.scan_row, *given), partial(theirs.scan_row, *given), bed.normal(*shape), None)
    rows = min(len(x), 3)
    given = (x[:rows], dt[:rows], a, b[:rows], c[:rows], d)
    at = _apart(bed, rows)
    _advanced(partial(ours.step_rows, *given), partial(theirs.step_rows, *given), bed.normal(7, *shape), at)


def _ssd(bed: Bed, length: int, heads: int, width: int, groups: int, states: int) -> None:
    sizes = [heads * width, groups * states, groups * states]
    x, b, c = bed.normal(length, sum(sizes)).split(sizes, 1)  # as they leave the convolution
    row = [
        x.unflatten(1, (heads, width)),
        bed.normal(length, heads).sigmoid(),
        b.unflatten(1, (groups, states)),
        c.unflatten(1, (groups, states)),
    ]
    constant = [-bed.normal(heads).exp(), bed.normal(heads)]
    _scanned(bed, ssd, ssd_reference, row, constant, [heads, width, states])


def _delta(bed: Bed, length: int, groups: int, heads: int, keys: int, values: int, rates: int) -> None:
    """`rates`: of a head's decay, 1 or `keys`."""
    sizes = [groups * keys, groups * keys, heads * values]
    q, k, v = bed.normal(length, sum(sizes)).split(sizes, 1)  # as they leave the convolution
    row = (
        q.unflatten(1, (groups, keys)),
        k.unflatten(1, (groups, keys)),
        v.unflatten(1, (heads, values)),
        -3 * bed.normal(length, heads, rates).sigmoid(),
        bed.normal(length, heads).sigmoid(),
    )
    one = bed.normal(heads, keys, values)
    _advanced(partial(delta.scan_row, *row), partial(delta_reference.scan_row, *row), one, None)
    ones = tuple(each[:3] for each in row)
    at = _apart(bed, min(length, 3))
    _advanced(
        partial(delta.step_rows, *ones), partial(delta_reference.step_rows, *ones),
        bed.normal(7, heads, keys, values), at,
    )  # fmt: skip


def _selective(bed: Bed, length: int, channels: int, states: int) -> None:
    b, c = bed.normal(length, 2 * states).chunk(2, 1)
    row = [bed.normal(length, channels), bed.normal(length, channels).sigmoid(), b, c]
    constant = [-bed.normal(channels, states).exp(), bed.normal(channels)]
    _scanned(bed, selective, selective_reference, row, constant, [channels, states])
