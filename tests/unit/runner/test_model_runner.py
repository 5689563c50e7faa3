"""Steps laid out by hand, run on a tiny model, against transformers on the same weights."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bough.config.hf import open_checkpoint
from bough.core.messages import LogprobSpec
from bough.core.sampling import GrammarSpec, SamplingParams
from bough.core.step import FROM_DEVICE, RunnerLimits, SlotSetup, Step
from bough.kernels.attention import AttentionInputs, reference
from bough.layers.batch import attention_specs
from bough.memory.mha import KVPool, KVShape
from bough.models.load import build_model
from bough.platform import Device
from bough.runner import graphs
from bough.runner.model_runner import ModelRunner

VOCAB, PAGE = 97, 4
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[5, 17, 90, 3, 64, 2, 20, 33, 7, 8], [42, 41], [1, 2, 3, 4, 5, 6]]


class ReferenceAttention:
    def __init__(self, inputs: AttentionInputs) -> None:
        self.forward = partial(self._forward, inputs)

    @staticmethod
    def _forward(inputs, spec, q, k, v):
        return reference.forward(spec, inputs, q, k, v)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[Path, LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.4,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def runner(checkpoint) -> ModelRunner:
    cpu = Device("cpu")
    model = build_model(open_checkpoint(str(checkpoint[0])), dtype=torch.float32, device=cpu.torch_device)
    limits = RunnerLimits(
        num_slots=4, num_pages=64, page_size=PAGE, pages_per_slot=16, context_length=64, max_step_tokens=64,
        vocab_size=VOCAB,
    )  # fmt: skip
    shapes = [KVShape(s.num_kv_heads, s.head_dim, s.head_dim) for s in attention_specs(model)]
    pool = KVPool(shapes, limits.num_pages, PAGE, torch.float32, cpu.torch_device)
    return ModelRunner(model, pool, limits, ReferenceAttention, cpu)


def logits_of(checkpoint, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return checkpoint[1](torch.tensor([ids])).logits[0]


def greedy_of(checkpoint, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits_of(checkpoint, ids)[-1].argmax()))
    return ids[len(prompt) :]


class Rows:
    """Lays out steps: slot i owns pages 1 + 16 i and up."""

    def __init__(self) -> None:
        self.length = dict.fromkeys(range(4), 0)

    def step(self, rows: list[tuple[int, list[int], bool]], setups=(), decodes=0, **more) -> Step:
        slots = np.array([slot for slot, _, _ in rows], np.int32)
        context = np.array([self.length[slot] for slot, _, _ in rows], np.int32)
        at, pages = [], []
        for slot, tokens, _ in rows:
            first = -(-self.length[slot] // PAGE)
            self.length[slot] += len(tokens)
            for index in range(first, -(-self.length[slot] // PAGE)):
                at.append(slot * 16 + index)
                pages.append(1 + 16 * slot + (index * 7) % 15)
        return Step(
            index=0,
            num_decodes=decodes,
            slots=slots,
            num_query=np.array([len(tokens) for _, tokens, _ in rows], np.int32),
            context=context,
            samples=np.array([samples for _, _, samples in rows]),
            tokens=np.array([t for _, tokens, _ in rows for t in tokens], np.int32),
            table_at=np.array(at, np.int64),
            table_pages=np.array(pages, np.int32),
            setups=list(setups),
            **more,
        )


def test_ragged_prefill_then_decode_from_the_device(runner, checkpoint):
    rows = Rows()
    setups = [SlotSetup(slot=slot, sampling=GREEDY) for slot in range(3)]
    outcome = runner.launch(rows.step([(s, p, True) for s, p in enumerate(PROMPTS)], setups)).wait()
    got = [[int(t)] for t in outcome.tokens[:, 0]]
    for _ in range(7):
        step = rows.step([(slot, [FROM_DEVICE], True) for slot in (2, 0, 1)], decodes=3)
        for slot, token in zip((2, 0, 1), runner.launch(step).wait().tokens[:, 0], strict=True):
            got[slot].append(int(token))
    assert got == [greedy_of(checkpoint, prompt, 8) for prompt in PROMPTS]


def test_chunks_mixed_with_decodes(runner, checkpoint):
    rows = Rows()
    a, b = PROMPTS[1], PROMPTS[0]
    first = runner.launch(rows.step([(1, a, True)], [SlotSetup(slot=1, sampling=GREEDY)])).wait()
    mixed = rows.step([(1, [FROM_DEVICE], True), (0, b[:7], False)], [SlotSetup(slot=0, sampling=GREEDY)], decodes=1)
    second = runner.launch(mixed).wait()
    assert second.counts.tolist() == [1, 0]
    third = runner.launch(rows.step([(1, [FROM_DEVICE], True), (0, b[7:], True)], decodes=1)).wait()
    assert [int(o.tokens[0, 0]) for o in (first, second, third)] == greedy_of(checkpoint, a, 3)
    assert int(third.tokens[1, 0]) == greedy_of(checkpoint, b, 1)[0]


def test_prompt_and_output_scores_equal_transformers_across_chunks(runner, checkpoint):
    prompt = PROMPTS[0]
    spec = LogprobSpec(start=2, top=3, token_ids=(4, 5))
    rows, scored = Rows(), np.array([0], np.int32)
    setup = SlotSetup(slot=0, sampling=GREEDY, logprobs=spec)
    part = runner.launch(
        rows.step([(0, prompt[:6], False)], [setup], prompt_logprobs=scored, following=np.array([prompt[6]], np.int32))
    ).wait()
    last = runner.launch(
        rows.step([(0, prompt[6:], True)], prompt_logprobs=scored, following=np.array([-1], np.int32))
    ).wait()
    expected = torch.log_softmax(logits_of(checkpoint, prompt), -1)
    ids = [int(t) for o in (part, last) for t in o.prompt_logprobs.token_ids]
    assert ids == prompt[2:]
    values = np.concatenate([part.prompt_logprobs.logprobs, last.prompt_logprobs.logprobs])
    assert np.allclose(values, [expected[i - 1, prompt[i]] for i in range(2, len(prompt))], atol=1e-4)
    token = int(last.tokens[0, 0])
    assert abs(float(last.output_logprobs.logprobs[0]) - float(expected[-1, token])) < 1e-4
    assert last.output_logprobs.top_ids[0].tolist() == expected[-1].topk(3).indices.tolist()
    assert np.allclose(last.output_logprobs.chosen_logprobs[0], expected[-1, [4, 5]], atol=1e-4)


def test_constrained_rows_wait_for_masks_and_the_next_step_reads_their_token(runner, checkpoint):
    rows = Rows()
    grammar = SamplingParams(temperature=0.0, grammar=GrammarSpec(kind="regex", source="x"))
    setups = [SlotSetup(slot=0, sampling=GREEDY), SlotSetup(slot=1, sampling=grammar)]
    launched = runner.launch(
        rows.step([(0, PROMPTS[0], True), (1, PROMPTS[1], True)], setups, constrained=np.array([1], np.int32))
    )
    assert launched.needs_masks
    masks = np.zeros((1, -(-VOCAB // 32)), np.int32)
    masks[0, 60 // 32] = 1 << (60 % 32)
    launched.sample(masks)
    outcome = launched.wait()
    assert outcome.tokens[:, 0].tolist() == [greedy_of(checkpoint, PROMPTS[0], 1)[0], 60]
    following = rows.step([(1, [FROM_DEVICE], True)], [SlotSetup(slot=1, sampling=GREEDY)], decodes=1)
    assert runner.launch(following).wait().tokens[0, 0] == greedy_of(checkpoint, [*PROMPTS[1], 60], 1)[0]


def test_page_copies_happen_before_the_forward_pass(runner, checkpoint):
    rows = Rows()
    prompt = PROMPTS[0][:8]
    runner.launch(rows.step([(0, prompt, False)], [SlotSetup(slot=0, sampling=GREEDY)])).wait()
    source = runner.forward.state.page_table[0, :2].numpy().copy()
    target = np.array([60, 61], np.int32)
    rows.length[3] = 8
    step = rows.step(
        [(3, PROMPTS[0][8:], True)],
        [SlotSetup(slot=3, sampling=GREEDY)],
        copy_from=source,
        copy_to=target,
    )
    step.table_at = np.append(step.table_at, [3 * 16, 3 * 16 + 1])
    step.table_pages = np.append(step.table_pages, target)
    assert runner.launch(step).wait().tokens[0, 0] == greedy_of(checkpoint, PROMPTS[0], 1)[0]


def test_a_seeded_row_draws_the_same_alone_and_in_a_batch(runner):
    def draws(with_others: bool) -> list[int]:
        rows = Rows()
        seeded = SlotSetup(slot=0, sampling=SamplingParams(temperature=1.0, seed=7), rng_seed=7)
        setups, batch = [seeded], [(0, PROMPTS[0], True)]
        if with_others:
            setups.append(SlotSetup(slot=1, sampling=SamplingParams(temperature=0.7), rng_seed=99))
            batch.append((1, PROMPTS[2], True))
        tokens = [int(runner.launch(rows.step(batch, setups)).wait().tokens[0, 0])]
        for _ in range(6):
            step = rows.step([(slot, [FROM_DEVICE], True) for slot, _, _ in batch], decodes=len(batch))
            tokens.append(int(runner.launch(step).wait().tokens[0, 0]))
        return tokens

    assert draws(False) == draws(True)


def test_a_step_leaves_nothing_to_the_collector(runner: ModelRunner) -> None:
    """What it held on the device is free when it is done, not at the next collection."""
    made: list[weakref.ref[object]] = []
    attention = runner.forward._attention

    def watched(inputs: AttentionInputs) -> object:
        made.append(weakref.ref(inputs.loc_T))
        assert inputs.tail is not None
        return attention(inputs)

    runner.forward._attention = watched  # type: ignore[assignment]
    rows = Rows()
    gc.disable()
    try:
        step = rows.step([(0, list(range(12)), True)], [SlotSetup(slot=0, sampling=GREEDY)])
        runner.launch(step).wait()
        assert [each() for each in made] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize(("decode", "narrows"), [(False, True), (True, False)])
def test_a_graph_lists_fresh_rows_and_narrows_the_last_layer_of_prompts(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, decode: bool, narrows: bool
) -> None:
    """What is recorded for steps whose rows the host does not know."""
    seen: list[tuple[bool, bool, bool]] = []
    attention = runner.forward._attention

    def watched(inputs: AttentionInputs) -> object:
        seen.append((inputs.host is None, inputs.lists_fresh, inputs.tail is not None))
        return attention(inputs)

    runner.forward._attention = watched  # type: ignore[assignment]
    monkeypatch.setattr(graphs, "capture", lambda run, _: (None, run()))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    made = graphs.Graphs(runner.forward, max_tokens=64, context_length=64, spare_slot=runner.limits.num_slots)
    rows = 16 if decode else 1
    captured = made.capture(graphs.GraphKey(16, rows, rows, 1, "sampled", False, decode))
    assert captured.result.shape == (rows,)
    assert seen == [(True, True, narrows)]
