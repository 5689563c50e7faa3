"""The door of Hopper's kernel for latents: what its source is given, that it fits, and which steps it takes."""

import random
import re
from dataclasses import replace

import pytest
import torch
from triton_cases.bed import Bed
from triton_cases.layers import attention_inputs, layer_of

from bough.kernels.attention import latent_hopper, plan as planning
from bough.kernels.attention.inputs import AttentionInputs, AttentionSpec
from bough.kernels.attention.plan import Kind

SHARED_BYTES_OF_A_BLOCK = 227 * 1024
STATIC_BYTES = 43 * 1024
"""Sums of eight warps for 16 heads, at most."""


def _spec(heads: int = 16) -> AttentionSpec:
    return layer_of(heads, 1, 576, v_head_dim=512, latent=True)


def _inputs(rows: int, queries: int = 1) -> AttentionInputs:
    bed = Bed(torch.device("cpu"), False, random.Random(1))
    return attention_inputs(bed, [(queries, 3)] * rows, _spec(), 64, torch.bfloat16, pad_rows=0, pad_tokens=0)


def test_a_block_fits_a_multiprocessor() -> None:
    assert latent_hopper.shared_bytes() + STATIC_BYTES <= SHARED_BYTES_OF_A_BLOCK


def test_the_source_is_given_what_it_expects() -> None:
    source = latent_hopper.SOURCE.read_text()
    for name in latent_hopper.defines(16, 4):
        assert re.search(rf"\b{name}\b", source)
    found = re.search(r"struct Inputs {(.*?)\n};", source, re.S)
    assert found
    declarations = re.sub(r"//.*|\[\w+\]", "", found[1])
    names = [re.sub(r".*[ *]", "", each.strip()) for each in re.split("[,;]", declarations) if each.strip()]
    assert names == [each[0] for each in latent_hopper._Inputs._fields_]


@pytest.mark.parametrize(("rows", "cluster"), [(1, 4), (4, 4), (5, 2), (32, 2), (33, 1), (128, 1)])
def test_few_rows_are_read_by_clusters(rows: int, cluster: int) -> None:
    inputs = _inputs(rows)
    shape = latent_hopper.shape_for(inputs)
    assert shape.sms_per_program == cluster
    plan = planning._room(Kind(16, 1, None, True), shape, rows, torch.device("cpu"))
    room = latent_hopper.LatentRoom.make(plan, torch.device("cpu"))
    assert room.holds(plan)
    assert len(room.counters) >= rows * cluster


def test_plans_have_no_more_chunks_than_clusters_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def loaded(device: torch.device, heads: int, cluster: int) -> latent_hopper._Loaded:
        asked.append(cluster)
        return latent_hopper._Loaded(None, 31)  # type: ignore[arg-type]

    monkeypatch.setattr(latent_hopper, "_loaded", loaded)
    for cluster, shape in latent_hopper.SHAPES.items():
        fitted = latent_hopper.fitted(shape, torch.device("cuda", 0), 16)
        assert fitted.most_programs == (31 if cluster > 1 else None)
        assert fitted.may_pad
    assert asked == [2, 4]
    plan = planning._room(Kind(16, 1, None, True), replace(shape, most_programs=3), 4, torch.device("cpu"))
    assert plan.num_chunks == plan.target <= 3


def test_other_steps_are_left_to_the_portable_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_hopper, "_is_ready", lambda *_: True)
    spec, inputs = _spec(), _inputs(2)
    q = torch.zeros(2, 16, 192, dtype=torch.bfloat16)
    assert latent_hopper.suits(spec, inputs, q)
    assert latent_hopper.suits(spec, _inputs(latent_hopper.MOST_ROWS), q)
    assert not latent_hopper.suits(spec, _inputs(latent_hopper.MOST_ROWS + 1), q)
    assert not latent_hopper.suits(spec, _inputs(2, queries=2), q)
    assert not latent_hopper.suits(_spec(32), inputs, q)
    assert not latent_hopper.suits(spec, inputs, q.half())
    assert not latent_hopper.suits(replace(spec, softcap=3.0), inputs, q)
    assert not latent_hopper.suits(spec, replace(inputs, page_size=16), q)
