"""The door of Hopper's decode kernels: what their source is given, that they fit, and which of them takes a step."""

import random
import re

import pytest
import torch
from triton_cases.bed import Bed
from triton_cases.layers import attention_inputs, layer_of

from bough.kernels.attention import decode_hopper
from bough.kernels.attention.decode_hopper import FORMS, NARROW, Layer

SHARED_BYTES_OF_A_BLOCK = 227 * 1024
STATIC_BYTES = 36 * 1024
"""At most: sums of eight warps for eight heads, where they put them together."""


@pytest.mark.parametrize("group", [1, 7, 8])
def test_blocks_fit_a_multiprocessor(group: int) -> None:
    layers = [Layer(dtype, 128, group, 4) for dtype in FORMS] + [Layer(torch.bfloat16, 64, group, 4)]
    for layer in layers:
        assert decode_hopper.shared_bytes(layer, layer.form, many=False) + STATIC_BYTES <= SHARED_BYTES_OF_A_BLOCK
        assert decode_hopper.shared_bytes(layer, layer.form, many=True) + 1024 <= SHARED_BYTES_OF_A_BLOCK


def test_the_source_is_given_what_it_expects() -> None:
    source = decode_hopper.SOURCE.read_text()
    for name in decode_hopper.defines(Layer(torch.bfloat16, 64, 8, 8), NARROW):
        assert re.search(rf"\b{name}\b", source)
    found = re.search(r"struct Inputs {(.*?)\n};", source, re.S)
    assert found
    declarations = re.sub(r"//.*|\[\w+\]", "", found[1])
    names = [re.sub(r".*[ *]", "", each.strip()) for each in re.split("[,;]", declarations) if each.strip()]
    assert names == [each[0] for each in decode_hopper._Inputs._fields_]


@pytest.mark.parametrize(
    ("rows", "kv_heads", "width", "together"),
    [
        (24, 8, 128, True),
        (33, 8, 128, True),
        (34, 8, 128, False),
        (49, 4, 128, True),  # three quarters of the pairs: more rows have more queries to wait for
        (50, 4, 128, False),
        (33, 8, 64, True),
        (34, 8, 64, False),
    ],
)
def test_many_rows_are_taken_by_a_warp_each(
    rows: int, kv_heads: int, width: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_hopper, "num_sms", lambda _: 132)
    spec = layer_of(2 * kv_heads, kv_heads, width)
    bed = Bed(torch.device("cpu"), False, random.Random(1))
    inputs = attention_inputs(bed, [(1, 3)] * rows, spec, 64, torch.bfloat16, pad_rows=0, pad_tokens=0)
    form = NARROW if width == 64 else FORMS[torch.bfloat16]
    assert decode_hopper.shape_for(spec, inputs) is (form.few if together else form.many)


@pytest.mark.parametrize(
    ("rows", "width", "slower"), [(8, 64, False), (9, 64, True), (33, 64, True), (34, 64, False), (24, 128, False)]
)
def test_narrow_heads_of_some_rows_are_left_to_the_portable_kernel(rows: int, width: int, slower: bool) -> None:
    assert decode_hopper.is_slower(layer_of(64, 8, width), rows, 132) is slower
