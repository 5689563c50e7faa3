"""Packed steps, completed on the device, against a model of them that goes token by token."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from bough.core.kv import one_line
from bough.core.sampling import SamplingParams
from bough.core.step import FIRST_DRAFT, FROM_DEVICE, SharedSpans, SlotSetup, Step
from bough.kernels.step_start import SlotState, cpu, reference
from bough.platform import Device
from bough.runner.inputs import Packer, Sizes, StepLayout, StepTensors
from bough.runner.staging import ALIGN, Stages
from bough.sampler.state import SlotParams

SLOTS, VOCAB, MOST_DRAFTS = 12, 1000, 4
KINDS = (
    "one prompt", "one decode", "decodes", "prompts", "mixture", "one chunk without a sample", "drafts",
    "drafts and prompts",
)  # fmt: skip


def lengths(kind: str, room: int, rng: np.random.Generator) -> tuple[list[tuple[int, int, bool]], int]:
    """(query tokens, context, samples) of each row, and how many of them decode."""

    def prompt() -> tuple[int, int, bool]:
        context = int(rng.integers(0, room - 1))
        return int(rng.integers(1, room - context + 1)), context, bool(rng.integers(2))

    def decode(most_drafts: int = 0) -> tuple[int, int, bool]:
        query = 1 + int(rng.integers(0, most_drafts + 1))
        return query, int(rng.integers(1, room - query + 1)), True

    count = int(rng.integers(2, SLOTS + 1))
    match kind:
        case "one prompt":
            return [(*prompt()[:2], True)], 0
        case "one decode":
            return [decode()], 1
        case "decodes":
            return [decode() for _ in range(count)], count
        case "prompts":
            return [prompt() for _ in range(count)], 0
        case "one chunk without a sample":
            return [(*prompt()[:2], False)], 0
        case "drafts":
            return [decode(MOST_DRAFTS) for _ in range(count)], count
    decodes = count // 2
    drafts = MOST_DRAFTS if "drafts" in kind else 0
    return [decode(drafts) for _ in range(decodes)] + [prompt() for _ in range(count - decodes)], decodes


def random_step(
    kind: str, table: dict[int, int], page_size: int, pages_per_slot: int, rng: np.random.Generator
) -> Step:
    """A step with some page-table writes, which it also makes in `table`."""
    rows, decodes = lengths(kind, page_size * pages_per_slot, rng)
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
            first=np.array([0, page_size], np.int32),
            last=np.array([page_size, 3 * page_size], np.int32),
            level=np.array([0, 1], np.int32),
        )
    num_query = np.array([row[0] for row in rows], np.int32)
    tokens = rng.integers(0, VOCAB, num_query.sum()).astype(np.int32)
    drafted = int(num_query[:decodes].sum())
    places = np.arange(drafted) - np.repeat(np.cumsum(num_query[:decodes]) - num_query[:decodes], num_query[:decodes])
    on_device = (rng.random(drafted) < 0.5) & (places > 0)
    tokens[:drafted][on_device] = FIRST_DRAFT + 1 - places[on_device]
    tokens[:drafted][places == 0] = FROM_DEVICE
    return Step(
        index=0,
        num_decodes=decodes,
        slots=slots,
        num_query=num_query,
        context=np.array([row[1] for row in rows], np.int32),
        samples=np.array([row[2] for row in rows], np.bool_),
        tokens=tokens,
        drafts=num_query[:decodes] - 1 if "drafts" in kind else np.empty(0, np.int32),
        table_at=np.array(at, np.int64),
        table_pages=pages,
        shared=shared,
    )


def random_state(step: Step, pages_per_slot: int, rng: np.random.Generator) -> SlotState:
    """Decode rows are as long as the step says, or shorter."""
    state = SlotState.make(SLOTS, pages_per_slot, torch.device("cpu"), most_drafts=MOST_DRAFTS)
    for row in range(step.num_decodes):
        context = int(step.context[row])
        state.kv_len[int(step.slots[row])] = max(1, context - int(rng.integers(0, 4)))
    state.last_token[:] = torch.from_numpy(rng.integers(0, VOCAB, SLOTS + 1))
    state.num_output[:] = torch.from_numpy(rng.integers(0, 100, SLOTS + 1))
    state.drafts[:] = torch.from_numpy(rng.integers(0, VOCAB, (SLOTS + 1, MOST_DRAFTS)))
    return state


def expected(
    step: Step,
    sizes: Sizes,
    state: SlotState,
    table: dict[int, int],
    page_size: int,
    pages_per_slot: int,
    asked: dict[int, SlotSetup],
) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {field.name: [] for field in fields(StepTensors)}
    start = 0
    out["query_start_R1"].append(0)
    out["derived"] = [0, step.num_decodes, 0]
    for row, slot in enumerate(step.slots.tolist()):
        decodes = row < step.num_decodes
        query = int(step.num_query[row])
        drafts = int(step.drafts[row]) if decodes and len(step.drafts) else 0
        context = int(state.kv_len[slot]) if decodes else int(step.context[row])
        for place in range(query):
            position, token = context + place, int(step.tokens[start + place])
            page = table.get(slot * pages_per_slot + position // page_size, 0)
            if token == FROM_DEVICE:
                token = int(state.last_token[slot])
            elif token < 0:
                token = int(state.drafts[slot, FIRST_DRAFT - token])
            out["ids_T"].append(token)
            out["positions_T"].append(position)
            out["token_slots_T"].append(slot)
            out["loc_T"].append(page * page_size + position % page_size)
        start += query
        out["query_start_R1"].append(start)
        out["kv_len_R"].append(context + query)
        out["slots_R"].append(slot)
        if decodes:
            out["derived"][0] += query
            out["derived"][2] += 1 + drafts
        if not step.samples[row]:
            continue
        out["sample_start_R1"].append(len(out["sample_at_L"]))
        sampling, before = asked[slot].sampling, int(state.num_output[slot]) if decodes else asked[slot].num_output
        for place in range(1 + drafts):
            out["sample_at_L"].append(start - 1 - drafts + place)
            out["sample_slots_L"].append(slot)
            out["top_k_L"].append(sampling.top_k if sampling.top_k > 0 else VOCAB)
            out["seed_L"].append(asked[slot].rng_seed)
            out["counter_L"].append(before + place)
            out["temperature_L"].append(np.float32(sampling.temperature))
            out["top_p_L"].append(np.float32(sampling.top_p))
            out["min_p_L"].append(np.float32(sampling.min_p))
    out["table_at_U"] = step.table_at.tolist()
    out["table_pages_U"] = step.table_pages.tolist()
    if step.shared is not None:
        out["span_rows_M"] = step.shared.rows.tolist()
        out["span_start_R1"] = step.shared.start.tolist()
        out["span_first_R"] = step.shared.first.tolist()
        out["span_last_R"] = step.shared.last.tolist()
        out["span_level_R"] = step.shared.level.tolist()
    padding = {
        "token_slots_T": SLOTS, "loc_T": -1, "query_start_R1": start, "slots_R": SLOTS, "sample_slots_L": SLOTS,
        "table_at_U": SLOTS * pages_per_slot, "top_p_L": 1.0, "top_k_L": 1, "span_start_R1": len(out["span_rows_M"]),
        "sample_start_R1": len(out["sample_at_L"]),
    }  # fmt: skip
    room = {
        "T": sizes.tokens, "R": sizes.rows, "R1": sizes.rows + 1, "L": sizes.samples, "U": sizes.writes,
        "M": sizes.members, "derived": 3,
    }  # fmt: skip
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


@pytest.mark.parametrize("start", [reference.start_step, cpu.start_step])
@pytest.mark.parametrize("page_size", [1, 3, 16, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_every_array_of_random_steps(kind: str, page_size: int, start: Any):
    rng = np.random.default_rng(page_size)
    pages_per_slot = 9
    packer, params = Packer(SLOTS, pages_per_slot, one_line(page_size)), SlotParams(SLOTS, VOCAB)
    asked = {slot: setup(slot, rng) for slot in range(SLOTS)}
    for each in asked.values():
        params.fill(each)
    table: dict[int, int] = {}
    for _ in range(12):
        before = dict(table)
        step = random_step(kind, table, page_size, pages_per_slot, rng)
        samples = params.gather(step)
        more = rng.integers(0, 10, 4) * rng.integers(0, 2)
        sizes = Sizes(
            step.num_tokens + int(more[0]), step.num_rows + int(more[1]), samples.count + int(more[2]),
            writes=len(step.table_at) + int(more[3]), members=0 if step.shared is None else step.num_rows + int(more[0]),
        )  # fmt: skip
        layout = StepLayout(sizes)
        buffer = torch.full((layout.num_bytes,), 0xAB, dtype=torch.uint8)
        packer.pack(step, samples, layout, buffer.numpy())
        tensors = layout.tensors(buffer)
        state = random_state(step, pages_per_slot, rng)
        for at, page in before.items():
            state.page_table.view(-1)[at] = page
        start(state, tensors, page_size)
        wanted = expected(step, sizes, state, table, page_size, pages_per_slot, asked)
        assert {at: int(state.page_table.view(-1)[at]) for at in table} == table
        for name, values in wanted.items():
            if step.shared is None and name in ("span_first_R", "span_last_R", "span_level_R"):
                continue  # nothing reads them: there are no spans
            if not len(step.drafts) and name == "sample_start_R1":
                continue
            got = getattr(tensors, name)
            assert got.tolist() == values, name
            assert (got.data_ptr() - buffer.data_ptr()) % ALIGN == 0, name


def test_a_position_beyond_the_rows_pages_is_not_written():
    """However wrong a bound may be, no other request's page is overwritten."""
    rng = np.random.default_rng(1)
    packer, params = Packer(SLOTS, 9, one_line(4)), SlotParams(SLOTS, VOCAB)
    step = random_step("drafts", {}, 4, 9, rng)
    for start in (reference.start_step, cpu.start_step):
        tensors = packer.upload(step, params.gather(step), Stages(Device("cpu"), 64).take())
        state = random_state(step, 9, rng)
        state.kv_len[step.slots] = torch.from_numpy(step.context.astype(np.int64)) + 2
        start(state, tensors, 4)
        room = np.repeat(step.context + step.num_query, step.num_query)
        beyond = tensors.positions_T.numpy() >= room
        assert beyond.any()
        assert ((tensors.loc_T.numpy() == -1) == beyond).all()


def test_a_step_of_its_own_size_is_uploaded_as_it_is_packed():
    rng = np.random.default_rng(0)
    packer, params, table = Packer(SLOTS, 4, one_line(8)), SlotParams(SLOTS, VOCAB), {}
    asked = {slot: setup(slot, rng) for slot in range(SLOTS)}
    for each in asked.values():
        params.fill(each)
    step = random_step("mixture", table, 8, 4, rng)
    stage = Stages(Device("cpu"), 64).take()
    samples = params.gather(step)
    tensors = packer.upload(step, samples, stage)
    state = random_state(step, 4, rng)
    cpu.start_step(state, tensors, 8)
    members = 0 if step.shared is None else len(step.shared.rows)
    sizes = Sizes(step.num_tokens, step.num_rows, samples.count, len(step.table_at), members)
    wanted = expected(step, sizes, state, table, 8, 4, asked)
    assert tensors.loc_T.tolist() == wanted["loc_T"]
    assert tensors.min_p_L.tolist() == wanted["min_p_L"]


def test_a_gather_finds_the_rich_samples_and_leaves_the_counting_of_decode_rows_to_the_device():
    params = SlotParams(4, VOCAB)
    rich = SamplingParams(frequency_penalty=1.0)
    for slot, sampling in enumerate((SamplingParams(), rich, SamplingParams(), rich)):
        params.fill(SlotSetup(slot=slot, sampling=sampling, num_output=10 * slot))
    step = random_step("prompts", {}, 1, 9, np.random.default_rng(0))
    step.slots = np.array([3, 2, 1, 0], np.int32)
    step.samples = np.array([True, True, True, False])
    step.num_decodes = 2
    samples = params.gather(step)
    assert samples.longs[2].tolist() == [0, 0, 10]
    assert samples.num_derived == 2
    assert samples.rich.tolist() == [0, 2]
    step.drafts = np.array([2, 0], np.int32)
    samples = params.gather(step)
    assert samples.longs[2].tolist() == [0, 1, 2, 0, 10]
    assert samples.rich.tolist() == [0, 1, 2, 4]
    assert samples.of_rows(np.array([0, 2])).tolist() == [0, 1, 2, 4]
    for slot in (1, 3):
        params.fill(SlotSetup(slot=slot, sampling=SamplingParams()))
    assert params.gather(step).rich.tolist() == []
