"""Weights as other packages wrote them (`tests/golden/write_quantised.py`): ours are worth exactly what theirs are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bough.config.hf import StoredShape
from bough.core.errors import WeightsError
from bough.kernels.packed_linear import Codes, dequantise, pack_codes
from bough.quantization.coded import check_cut
from bough.quantization.layouts import layout_of
from bough.quantization.layouts.layout import scale_check
from bough.quantization.loading import PartLoader, Source, dequantised
from bough.quantization.names import tensor_name
from bough.quantization.read import read_rules
from bough.quantization.scheme import Part
from bough.weights.from_safetensors import open_safetensors

FOLDER = Path(__file__).parents[2] / "golden" / "quantised"
NAMES = sorted(path.stem for path in FOLDER.glob("*.safetensors") if path.stem != "mxfp4_experts")
LAYER = "model.layers.0.mlp.down_proj"
CPU = torch.device("cpu")


def test_there_are_golden_files() -> None:
    assert len(NAMES) > 30


def read(name: str, rows: slice, cols: slice) -> tuple[Codes, Tensor]:
    """Our codes of a part of a weight, and the other package's floats of all of it."""
    path = FOLDER / f"{name}.safetensors"
    with safe_open(path, framework="pt") as file:
        config = json.loads(file.metadata()["config"])
        dense = file.get_tensor("dense")
    rules = read_rules(config)
    form = rules.of(LAYER, "linear")
    assert form is not None
    with open_safetensors((path,)) as stored:
        tensors = {tensor_name(f"{LAYER}.{key}"): value for key, value in stored.items() if key != "dense"}
        headers = {key: StoredShape(value.kind, value.shape, 0) for key, value in tensors.items()}
        layout = layout_of(form, LAYER, headers)
        shape = (dense.shape[0], dense.shape[1])
        part = Part("", shape, rows, cols)
        check_cut(LAYER, layout, part)
        loader = PartLoader(Source(part, form, layout), torch.float32, CPU)
        slots = {f"{LAYER}.{key}": slot for key, slot in loader.slots().items()}
        assert {key for key, slot in slots.items() if not slot.optional} <= tensors.keys() <= slots.keys()
        for key, value in tensors.items():
            slot = slots[key]
            assert value.shape in (slot.shape, *slot.also), key
            assert slot.kinds is None or value.kind in slot.kinds, key
            if slot.check is not None:
                slot.check(value)
            slot.put(value)
    result = loader.result()
    assert isinstance(result, Codes)
    return result, dense


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """To the last bit of the type that the other package dequantises to; two levels of scales may be multiplied in another
    order, which moves the last bit of a float32."""
    assert ours.dtype == torch.float32
    if theirs.dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, rtol=3e-7, atol=0)
    else:
        assert torch.equal(ours.to(theirs.dtype), theirs)


@pytest.mark.parametrize("name", NAMES)
def test_dequantised_weights_are_theirs(name: str) -> None:
    codes, dense = read(name, slice(None), slice(None))
    assert_same(dequantised(codes), dense)
    assert torch.equal(dequantise(pack_codes(codes)), dequantised(codes))


@pytest.mark.parametrize("name", NAMES)
def test_scales_that_are_no_numbers_are_found_before_loading(name: str, tmp_path: Path) -> None:
    with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
        form = read_rules(json.loads(file.metadata()["config"])).of(LAYER, "linear")
        tensors = {tensor_name(f"{LAYER}.{key}"): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert form is not None
    dense = tensors.pop(f"{LAYER}.dense")
    headers = {key: StoredShape("", tuple(value.shape), 0) for key, value in tensors.items()}
    specs = layout_of(form, LAYER, headers).tensors((dense.shape[0], dense.shape[1]))
    scales = {key: spec for key, spec in specs.items() if spec.is_scale and f"{LAYER}.{key}" in tensors}
    assert scales
    for key, spec in scales.items():
        good = tensors[f"{LAYER}.{key}"]
        bad = good.clone().flatten()
        if bad.dtype == torch.uint8:
            bad[-1] = 255  # NaN in e8m0
        elif bad.dtype == torch.float8_e4m3fn:
            bad.view(torch.uint8)[-1] = 0x7F
        else:
            bad[-1] = torch.nan
        path = tmp_path / "scale.safetensors"
        save_file({"good": good, "bad": bad.view(good.shape)}, path)
        check = scale_check(spec)
        assert check is not None
        with open_safetensors((path,)) as stored:
            check(stored["good"])
            with pytest.raises(WeightsError, match="1 scales that are no numbers"):
                check(stored["bad"])


@pytest.mark.parametrize("name", NAMES)
def test_shares_of_ranks_are_cut_from_the_whole(name: str) -> None:
    _, dense = read(name, slice(None), slice(None))
    rows, cols = dense.shape
    for part in (0, 1):
        some = slice(part * cols // 2, (part + 1) * cols // 2)
        if name in ("ct_fp8_block", "transformers_fp8_block"):
            some = slice(0, 96) if part == 0 else slice(96, 160)
        codes, _ = read(name, slice(None), some)
        assert_same(dequantised(codes), dense[:, some])
        assert torch.equal(dequantise(pack_codes(codes)), dequantised(codes))
        some = slice(part * rows // 2, (part + 1) * rows // 2)
        codes, _ = read(name, some, slice(None))
        assert_same(dequantised(codes), dense[some])
