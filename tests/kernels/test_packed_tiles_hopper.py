"""The door of the Hopper kernel for experts in codes in tiles, without a device: whom it serves, what a launch is given, and
how it takes codes apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bough.config.model_facts import ClampedGate
from bough.kernels.codes_source import CodeForm
from bough.kernels.moe.triton import Sorted
from bough.kernels.packed_linear.codes import Codes
from bough.kernels.packed_linear.decode import DeviceCodes, lay_out
from bough.kernels.packed_moe import tiles_hopper
from bough.kernels.packed_moe.tiles_hopper import Tile, TiledProduct

EXPERTS, WIDTH, INNER = 4, 576, 288


def stacked(rows: int, cols: int) -> DeviceCodes:
    rows *= EXPERTS
    scales = torch.ones(rows, cols // 32, dtype=torch.bfloat16)
    made = lay_out(Codes("float4", torch.zeros(rows, cols, dtype=torch.uint8), scales, 32))
    assert made is not None
    return made


class Kernel:
    def __init__(self) -> None:
        self.launches: list[tuple[int, Any]] = []

    def launch(self, blocks: int, arguments: Any, stream: int) -> None:
        self.launches.append((blocks, arguments))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(tiles_hopper, "_kernel", lambda *given: made)
    monkeypatch.setattr(tiles_hopper, "_is_ready", lambda *_: True)
    monkeypatch.setattr(tiles_hopper, "num_sms", lambda _: 132)
    monkeypatch.setattr(
        tiles_hopper, "tensor_map", lambda matrix, rows, columns, swizzled=False: (matrix, rows, columns, swizzled)
    )
    monkeypatch.setattr(tiles_hopper, "current_stream", lambda _: 0)
    return made


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("per_expert", "activation", "dtype", "taken"),
    [
        (0.5, "silu", torch.bfloat16, False),
        (1, "silu", torch.bfloat16, True),
        (40, "silu", torch.bfloat16, True),
        (40, "gelu_tanh", torch.bfloat16, False),
        (40, "silu", torch.float16, False),
    ],
)
def test_whom_it_serves(per_expert: float, activation: str, dtype: torch.dtype, taken: bool) -> None:
    x = torch.zeros(4, WIDTH, dtype=dtype)
    gate_up, down = stacked(2 * INNER, WIDTH), stacked(WIDTH, INNER)
    pairs = int(EXPERTS * per_expert)
    assert tiles_hopper.suits(x, gate_up, down, EXPERTS, pairs, activation, None, has_bias=False) is taken


@pytest.mark.parametrize(("halves", "blocks"), [(2, 5 * 3), (1, 5 * 3)])
def test_a_launch_covers_all_rows(halves: int, blocks: int, kernel: Kernel) -> None:
    """288 rows of a half are three tiles of 96; 576 are three of 192. 576 columns end within a box of 128."""
    rows = INNER if halves == 2 else 2 * INNER
    weight = stacked(halves * rows, WIDTH)
    x, out = torch.zeros(2, WIDTH, dtype=torch.bfloat16), torch.zeros(6, rows, dtype=torch.bfloat16)
    order = Sorted(torch.zeros(160, dtype=torch.int32), torch.zeros(5, dtype=torch.int32), 5, EXPERTS)
    clamp = ClampedGate(alpha=1.5, limit=7.0) if halves == 2 else None
    tiles_hopper.product(x, weight, out, order, tile=Tile(32, 3), per_token=3, halves=halves, clamp=clamp)
    ((launched, (codes, scales, coded, work, sums, flags)),) = kernel.launches
    assert sums is flags is None
    assert launched == blocks
    assert (codes[0] is weight.codes, codes[1:]) == (True, (192 // halves, 64, True))
    assert (scales[0] is weight.scales, scales[1:]) == (True, (4, 192 // halves, False))
    assert (coded.width, coded.groups) == (weight.num_rows, WIDTH // 32)
    assert (work.rows, work.depth, work.boxes, work.num_batches) == (rows, WIDTH, 5, 5)


def test_sums_are_handed_over_where_tiles_are_cut(kernel: Kernel) -> None:
    """Room for every multiprocessor's sums, and a flag for each of its warps, the same for both products."""
    tile = Tile(16, 4, evenly=True)
    given = []
    for halves in (2, 1):
        weight = stacked(halves * INNER, WIDTH)
        x, out = torch.zeros(2, WIDTH, dtype=torch.bfloat16), torch.zeros(6, INNER, dtype=torch.bfloat16)
        order = Sorted(torch.zeros(80, dtype=torch.int32), torch.zeros(5, dtype=torch.int32), 5, EXPERTS)
        tiles_hopper.product(x, weight, out, order, tile=tile, per_token=3, halves=halves)
        given.append(kernel.launches[-1][1][4:])
    sums, flags = given[0]
    assert sums.numel() >= 132 * 256 * 16
    assert flags.numel() >= 132 * 16
    assert not flags.any()
    assert (sums is given[1][0], flags is given[1][1]) == (True, True)


def share(block: int, blocks: int, items: int, boxes: int) -> list[tuple[int, int, int]]:
    """What a block has, as the kernel finds it: (item, first box, end)."""
    turns = items // blocks
    idle, cut, at, end = (turns + 1) * blocks - items, items, 0, 0
    if turns > 0 and idle < blocks and idle * boxes > tiles_hopper._CUT_BOXES * blocks:
        cut = (turns - 1) * blocks
        at, end = ((items - cut) * boxes * each // blocks for each in (block, block + 1))
    parts = [(item, 0, boxes) for item in range(block, cut, blocks)]
    while at < end:
        first = at % boxes
        to = min(boxes, first + end - at)
        parts.append((cut + at // boxes, first, to))
        at += to - first
    return parts


@pytest.mark.parametrize("boxes", [1, 3, 6, 23])
@pytest.mark.parametrize("blocks", [1, 7, 132])
def test_shares_cover_all_columns_once_and_evenly(blocks: int, boxes: int) -> None:
    for items in {
        1,
        blocks - 1,
        blocks,
        blocks + 1,
        2 * blocks - 1,
        930,
        1388,
        5 * blocks,
        7 * blocks + blocks // 2,
    } - {0}:
        shares = [share(block, blocks, items, boxes) for block in range(blocks)]
        owned: dict[int, list[tuple[int, int, int]]] = {}
        for block, parts in enumerate(shares):
            for place, (item, first, end) in enumerate(parts):
                owned.setdefault(item, []).append((first, end, block))
                # Sums are handed over before any are waited for.
                assert first == 0 or all(each[1:] == (0, boxes) for each in parts[:place])
                assert first == 0 or end == boxes
        assert sorted(owned) == list(range(items))
        for parts in owned.values():
            parts.sort()
            if len(parts) == 2:
                (_, middle, head), (start, _, tail) = parts
                assert (middle, tail) == (start, head + 1)
            assert (parts[0][0], parts[-1][1], len(parts) <= 2) == (0, boxes, True)
        longest = max(sum(end - first for _, first, end in parts) for parts in shares)
        even = -(-items * boxes // blocks)
        assert longest <= max(boxes, even + tiles_hopper._CUT_BOXES + 1)


def test_every_tile_fits_a_multiprocessor() -> None:
    for kind, form in (
        ("float4", CodeForm(3, 1, 32, 1, 1)),
        ("float8", CodeForm(1, 1, 128, 128)),
        ("int4", CodeForm(2)),
    ):
        tiles = {tiles_hopper.tile_for(kind, pairs, 1) for pairs in (4, 10, 50, 1000)} | {Tile(16, 4), Tile(32, 4)}
        for tile in tiles - {None}:
            for halves in (1, 2):
                assert tile is not None
                cut = TiledProduct(tile, halves, form)
                lists = 4 * (2 + 2 * tile.groups) * tile.tokens + 16 * cut.stages + 16
                assert cut.shared_bytes + lists <= 227 << 10
                assert 0 < cut.lag < cut.stages


def test_one_product_moves_a_code_to_where_bfloat16_has_its_bits() -> None:
    """As the kernel does it, of all codes of 4 bits at all their places in a word."""
    meant = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    meant = torch.cat((meant, -meant))
    for low in range(16):
        for high in range(16):
            for nibble, (shift, mask, factor) in enumerate(
                ((0, 0x000F000F, 0x1040), (0, 0x00F000F0, 0x0104), (8, 0x000F000F, 0x1040), (8, 0x00F000F0, 0x0104))
            ):
                others = 0xFFFFFFFF ^ ((0x000F000F << 4 * nibble) & 0xFFFFFFFF)
                word = others | (low << 4 * nibble) | (high << (16 + 4 * nibble))
                moved = (((word >> shift) & mask) * factor) & 0x81C081C0
                bits = torch.tensor([moved & 0xFFFF, moved >> 16], dtype=torch.int32).to(torch.uint16)
                found = bits.view(torch.bfloat16).double() * 2.0**126
                assert found.tolist() == meant[[low, high]].double().tolist()


def test_an_addition_raises_scales_as_a_product_would() -> None:
    """As the kernel does it: normal scales of either sign up to 2^61 times 2^66; what is smaller stays below 2^-60."""
    exponents = torch.arange(-126, 62).double()
    normal = torch.cat([sign * 2.0**exponents * part for sign in (1, -1) for part in (1.0, 1.5)])
    tiny = torch.tensor([0.0, 2.0**-127, 2.0**-133]).double()
    for scales, is_tiny in ((normal[normal.abs() <= 2.0**61], False), (tiny, True)):
        bits = scales.bfloat16().view(torch.int16).long() & 0xFFFF
        words = bits * 0x10001 + 0x21002100
        assert bool((words >> 16 & 0xFFFF == words & 0xFFFF).all())
        low = (words & 0xFFFF).to(torch.int32).to(torch.uint16).view(torch.bfloat16).double()
        if is_tiny:
            assert bool((low.abs() <= 2.0**-60).all())
        else:
            assert low.tolist() == (scales * 2.0**66).tolist()


def test_tokens_are_gathered_in_the_order_in_which_matrices_bring_codes() -> None:
    """Lane l of a quad is given bytes 4 l to 4 l + 3 of 16; tensor cores multiply its first two values with columns 2 l and
    2 l + 1 of the tokens, and its others with those eight columns further on."""
    gathered = [-1] * 64  # by place in a token's line of 64: the column that lies there
    for chunk in range(8):  # eight columns, which a thread copies in pairs
        for pair in range(4):
            at = (chunk & 6) * 16 + chunk % 2 * 8
            to = (at ^ 16 if pair % 2 else at) + pair // 2 * 4
            gathered[to // 2 : to // 2 + 2] = [8 * chunk + 2 * pair, 8 * chunk + 2 * pair + 1]
    assert sorted(gathered) == list(range(64))
    for step in range(4):
        line = gathered[16 * step : 16 * step + 16]
        for lane in range(4):
            stored = [16 * step + 4 * lane + byte for byte in range(4)]
            word = [stored[place] for place in (0, 2, 1, 3)]  # as 0x3120 permutes bytes
            assert [line[2 * lane], line[2 * lane + 1]] == word[0::2]
            assert [line[2 * lane + 8], line[2 * lane + 9]] == word[1::2]


@pytest.mark.parametrize(("half_bytes", "halves"), [(True, 1), (True, 2), (False, 1), (False, 2)])
def test_lanes_name_the_rows_and_pieces_that_threads_are_given(half_bytes: bool, halves: int) -> None:
    """The addresses of `ldmatrix` against those that each thread would load from itself: rows of 64 or 128 bytes, whose
    pieces of 16 are swizzled."""
    row_bytes, words = (64, 2) if half_bytes else (128, 4)
    apart = 96 * row_bytes if halves == 2 else 8 * row_bytes

    def swizzle(row: int) -> int:
        return row // 2 % 4 if half_bytes else row % 8

    def address(lane: int, chunk: int, call: int) -> int:
        named, piece = first_of_warp + lane % 8, lane // 8 % 2 if half_bytes else lane // 8
        at = named * row_bytes + (piece ^ swizzle(named)) * 16 + (lane // 16 * apart if half_bytes else 0)
        return (at ^ (chunk * words * 16)) + call * apart

    for first_of_warp in (0, 8, 40):
        for chunk in range(2):
            for lower in range(2):
                for w in range(words):
                    call, matrix = (0, 2 * lower + w) if half_bytes else (lower, w)
                    for row in range(8):  # given to lanes 4 * row to 4 * row + 3
                        own = first_of_warp + row
                        piece = chunk * words + w
                        want = own * row_bytes + (piece ^ swizzle(own)) * 16 + lower * apart
                        assert address(8 * matrix + row, chunk, call) == want
