"""Packed steps against a model of them that goes token by token, over random steps, page sizes and paddings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from bough.core.sampling import SamplingParams
from bough.core.step import FROM_DEVICE, SharedSpans, SlotSetup, Step
from bough.platform import Device
from bough.runner.inputs import Layout, Packer, Sizes, StepTensors
from bough.runner.staging import ALIGN, Stages
from bough.sampler.state import SlotParams

SLOTS, VOCAB = 12, 1000
KINDS = ("one prompt", "one decode", "decodes", "prompts", "mixture", "one chunk without a sample")


def lengths(kind: str, room: int, rng: np.random.Generator) -> list[tuple[int, int, bool]]:
    """(query tokens, context, samples) of each row."""

    def prompt() -> tuple[int, int, bool]:
        context = int(rng.integers(0, room - 1))
        return int(rng.integers(1, room - context + 1)), context, bool(rng.integers(2))

    def decode() -> tuple[int, int, bool]:
        return 1, int(rng.integers(0, room)), True

    count = int(rng.integers(2, SLOTS + 1))
    match kind:
        case "one prompt":
            return [(*prompt()[:2], True)]
        case "one decode":
            return [decode()]
        case "decodes":
            return [decode() for _ in range(count)]
        case "prompts":
            return [prompt() for _ in range(count)]
        case "one chunk without a sample":
            return [(*prompt()[:2], False)]
    return [decode() for _ in range(count // 2)] + [prompt() for _ in range(count - count // 2)]


def random_step(
    kind: str, table: dict[int, int], page_size: int, pages_per_slot: int, rng: np.random.Generator
) -> Step:
    """A step with some page-table writes, which it also makes in `table`."""
    rows = lengths(kind, page_size * pages_per_slot, rng)
    slots = rng.permutation(SLOTS)[: len(rows)].astype(np.int32)
    at = [slot * pages_per_slot + i for slot in slots.tolist() for i in range(pages_per_slot) if rng.random() < 0.7]
    pages = rng.integers(1, 5000, len(at)).astype(np.int32)
    table.update(zip(at, pages.tolist(), strict=True))
    shared = None
    if kind == "decodes" and rng.random() < 0.5:
        cut = int(rng.integers(1, len(rows)))
        shared = SharedSpans(
            rows=rng.permutation(len(rows)).astype(np.int32),
            start=np.array([0, cut, len(rows)], np.int32),
            num_tokens=np.array([page_size, 2 * page_size], np.int32),
        )
    num_query = np.array([row[0] for row in rows], np.int32)
    tokens = rng.integers(0, VOCAB, num_query.sum()).astype(np.int32)
    tokens[rng.random(len(tokens)) < 0.2] = FROM_DEVICE
    return Step(
        index=0,
        num_decodes=0,
        slots=slots,
        num_query=num_query,
        context=np.array([row[1] for row in rows], np.int32),
        samples=np.array([row[2] for row in rows], np.bool_),
        tokens=tokens,
        table_at=np.array(at, np.int64),
        table_pages=pages,
        shared=shared,
    )


def expected(
    step: Step, sizes: Sizes, table: dict[int, int], page_size: int, pages_per_slot: int, asked: dict[int, SlotSetup]
) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {field.name: [] for field in fields(StepTensors)}
    start = 0
    out["query_start_R1"].append(0)
    for row, slot in enumerate(step.slots.tolist()):
        query, context = int(step.num_query[row]), int(step.context[row])
        for position in range(context, context + query):
            page = table.get(slot * pages_per_slot + position // page_size, 0)
            out["ids_T"].append(int(step.tokens[start + position - context]))
            out["positions_T"].append(position)
            out["token_slots_T"].append(slot)
            out["loc_T"].append(page * page_size + position % page_size)
        start += query
        out["query_start_R1"].append(start)
        out["kv_len_R"].append(context + query)
        out["slots_R"].append(slot)
        if step.samples[row]:
            sampling = asked[slot].sampling
            out["last_at_R"].append(start - 1)
            out["sample_slots_R"].append(slot)
            out["top_k_R"].append(sampling.top_k if sampling.top_k > 0 else VOCAB)
            out["seed_R"].append(asked[slot].rng_seed)
            out["counter_R"].append(asked[slot].num_output)
            out["temperature_R"].append(np.float32(sampling.temperature))
            out["top_p_R"].append(np.float32(sampling.top_p))
            out["min_p_R"].append(np.float32(sampling.min_p))
    out["table_at_U"] = step.table_at.tolist()
    out["table_pages_U"] = step.table_pages.tolist()
    if step.shared is not None:
        out["group_rows_R"] = step.shared.rows.tolist()
        out["group_start_R1"] = step.shared.start.tolist()
        out["group_tokens_R"] = step.shared.num_tokens.tolist()
    padding = {
        "token_slots_T": SLOTS, "loc_T": -1, "query_start_R1": start, "slots_R": SLOTS, "sample_slots_R": SLOTS,
        "table_at_U": SLOTS * pages_per_slot, "top_p_R": 1.0, "top_k_R": 1, "group_start_R1": len(out["group_rows_R"]),
    }  # fmt: skip
    room = {"T": sizes.tokens, "R": sizes.rows, "R1": sizes.rows + 1, "U": sizes.writes}
    for name, values in out.items():
        values += [padding.get(name, 0)] * (room[name.rpartition("_")[2]] - len(values))
    return out


def setup(slot: int, rng: np.random.Generator) -> SlotSetup:
    sampling = SamplingParams(
        temperature=float(rng.random()) + 0.1,
        top_p=float(rng.random()),
        min_p=float(rng.random()),
        top_k=int(rng.choice([-1, 2, 50])),
    )
    return SlotSetup(slot=slot, sampling=sampling, rng_seed=int(rng.integers(-(2**62), 2**62)), num_output=3)


@pytest.mark.parametrize("page_size", [1, 3, 16, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_every_array_of_random_steps(kind: str, page_size: int):
    rng = np.random.default_rng(page_size)
    pages_per_slot = 7
    packer, params = Packer(SLOTS, pages_per_slot, page_size), SlotParams(SLOTS, VOCAB)
    asked = {slot: setup(slot, rng) for slot in range(SLOTS)}
    table: dict[int, int] = {}
    for _ in range(12):
        step = random_step(kind, table, page_size, pages_per_slot, rng)
        for each in asked.values():
            params.fill(each)
        plain = params.gather(step)
        more = rng.integers(0, 10, 3) * rng.integers(0, 2)
        sizes = Sizes(step.num_tokens + int(more[0]), step.num_rows + int(more[1]), len(step.table_at) + int(more[2]))
        layout = Layout(sizes)
        buffer = torch.full((layout.num_bytes,), 0xAB, dtype=torch.uint8)
        packer.pack(step, plain, layout, buffer.numpy())
        tensors = layout.tensors(buffer)
        wanted = expected(step, sizes, table, page_size, pages_per_slot, asked)
        for name, values in wanted.items():
            if step.shared is None and name in ("group_rows_R", "group_tokens_R"):
                continue  # nobody reads them: there are no groups
            got = getattr(tensors, name)
            assert got.tolist() == values, name
            assert (got.data_ptr() - buffer.data_ptr()) % ALIGN == 0, name


def test_a_step_of_its_own_size_is_uploaded_as_it_is_packed():
    rng = np.random.default_rng(0)
    packer, params, table = Packer(SLOTS, 4, 8), SlotParams(SLOTS, VOCAB), {}
    asked = {slot: setup(slot, rng) for slot in range(SLOTS)}
    for each in asked.values():
        params.fill(each)
    step = random_step("mixture", table, 8, 4, rng)
    stage = Stages(Device("cpu"), 64).take()
    tensors = packer.upload(step, params.gather(step), stage)
    sizes = Sizes(step.num_tokens, step.num_rows, len(step.table_at))
    wanted = expected(step, sizes, table, 8, 4, asked)
    assert tensors.loc_T.tolist() == wanted["loc_T"]
    assert tensors.min_p_R.tolist() == wanted["min_p_R"]


def test_a_gather_advances_the_streams_of_rows_that_sample_and_finds_the_rich_ones():
    params = SlotParams(4, VOCAB)
    rich = SamplingParams(frequency_penalty=1.0)
    for slot, sampling in enumerate((SamplingParams(), rich, SamplingParams(), rich)):
        params.fill(SlotSetup(slot=slot, sampling=sampling, num_output=10 * slot))
    step = random_step("decodes", {}, 1, 4, np.random.default_rng(0))
    step.slots = np.array([3, 2, 1, 0], np.int32)
    step.samples = np.array([True, True, True, False])
    assert params.gather(step).counter.tolist() == [30, 20, 10]
    again = params.gather(step)
    assert again.counter.tolist() == [31, 21, 11]
    assert again.rich.tolist() == [0, 2]
    for slot in (1, 3):
        params.fill(SlotSetup(slot=slot, sampling=SamplingParams()))
    assert params.gather(step).rich.tolist() == []
    assert params.counter[:4].tolist() == [0, 1, 23, 1]
