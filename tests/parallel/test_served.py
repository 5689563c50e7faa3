"""Every way of spreading a model over processes, through `bough serve`: the answers of transformers, and of weights, KV and
states what is planned for each rank. `test_matrix.py` has more models, with ranks as threads."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster import NEW_TOKENS, PROMPTS, Cluster, free_port, greedy
from families import EXPERTS, LATENTS, STATES
from held_bytes import check_served
from tiny import make_tiny

from bough.config.layout import Layout

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
LONG = pytest.mark.long
LONG_PROMPTS = [[(7 * i + 3) % 120 + 3 for i in range(180)], [(5 * i + 1) % 120 + 3 for i in range(200)]]
"""Split over ranks that share contexts, and several chunks elsewhere."""
UNEVEN = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 83}


@dataclass(frozen=True)
class Way:
    """A model over ranks."""

    model: str
    layout: Layout
    flags: str = ""
    extra: dict[str, Any] | None = None
    """Of the model's config."""

    @property
    def sizes(self) -> str:
        layout = self.layout
        return (
            f"--tp-size {layout.tp} --pp-size {layout.pp} --ep-size {layout.ep} --attn-dp-size {layout.dp} "
            f"--attn-cp-size {layout.cp} --chunked-prefill-size 150 --load-balance-method round_robin {self.flags}"
        )


ALLTOALL, ALLGATHER = "--moe-a2a-backend alltoall", "--moe-a2a-backend allgather"
WAYS = {
    "tp": Way("llama", Layout(tp=2)),
    "uneven tp": Way("llama", Layout(tp=2), extra=UNEVEN),
    "tp, with fewer heads than ranks": Way("llama", Layout(tp=4)),
    "tp of experts": Way("qwen3_moe", Layout(tp=2)),
    "tp of states": Way("qwen3_next", Layout(tp=2)),
    "pp": Way("llama", Layout(pp=2)),
    "three stages": Way("gemma3", Layout(pp=3), "--pp-async-batch-depth 1 --pp-max-micro-batch-size 2"),
    "uneven pp": Way("llama", Layout(pp=2, stage_sizes=(1, 3)), "--pp-layer-partition 1,3"),
    "tp x pp": Way("llama", Layout(tp=2, pp=2)),
    "ep": Way("qwen3_moe", Layout(tp=2, ep=2)),
    "tp x ep": Way("qwen2_moe", Layout(tp=4, ep=2, whole_shared=True), ALLGATHER),
    "pp x ep": Way("qwen3_moe", Layout(pp=2, tp=2, ep=2)),
    "dp attention": Way("llama", Layout(tp=2, dp=2)),
    "dp attention x ep": Way("qwen3_moe", Layout(tp=4, dp=2, ep=4, whole_shared=True), ALLTOALL),
    "dp attention of latents": Way("deepseek_v3", Layout(tp=4, dp=2, ep=2)),
    "cp": Way("llama", Layout(tp=2, cp=2)),
    "cp of windows": Way("gemma3", Layout(tp=4, cp=2)),
    "cp x dp attention x ep": Way("deepseek_v3", Layout(tp=4, cp=2, dp=2, ep=4, whole_shared=True), ALLTOALL),
}
SHORT = ("pp", "cp")
"""In `make test`, where `test_hosts.py` has tp, `test_replicas.py` dp, and `test_experts.py` dp attention x ep."""


def made(way: Way, folder: Path) -> Any:
    prefix, extra = {**EXPERTS, **LATENTS, **STATES}.get(way.model, (way.model, {}))
    return make_tiny(prefix, folder, **{**extra, **(way.extra or {})})


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in SHORT else LONG) for way in WAYS])
def test_processes_answer_as_one(way: str, tmp_path: Path) -> None:
    layout = WAYS[way].layout
    reference = made(WAYS[way], tmp_path)
    prompts = [*PROMPTS, *LONG_PROMPTS]
    expected = greedy(reference, prompts, 8)
    with Cluster(tmp_path, *WAYS[way].sizes.split()) as served:
        assert served.ask(prompts, 8) == expected
        assert served.ask(prompts, 8) == expected, "with cached prefixes"
        assert under_load(served, prompts, expected) == []
        for replica in range(layout.dp) if layout.dp > 1 else ():  # the others run empty steps meanwhile
            assert served.ask(prompts[:2], 8, replica=replica) == expected[:2]
        check_scores(served, expected[-1])
        loads = httpx.get(f"{served.url}/v1/loads", timeout=30).json()["loads"]
        held = served.info()["engine"]["ranks"]
    assert [each["dp_rank"] for each in loads] == list(range(layout.dp))
    assert all(each["num_cached_tokens"] > 0 for each in loads), "each has a cache of its own"
    check_served(tmp_path, layout, held)


def check_scores(served: Cluster, expected: list[int]) -> None:
    """Scores come with the sample, of prompts that are split, too."""
    body = {
        "input_ids": LONG_PROMPTS[1], "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True, "logprob_start_len": 0,
    }  # fmt: skip
    scored = httpx.post(f"{served.url}/generate", json=body, timeout=60).json()["meta_info"]
    assert [entry[1] for entry in scored["output_token_logprobs"]] == expected[:4]
    assert len(scored["input_token_logprobs"]) == len(LONG_PROMPTS[1])


def under_load(served: Cluster, prompts: list[list[int]], expected: list[list[int]]) -> list[Any]:
    """Clients that come and go at their own pace. Returns what was wrong."""
    wrong: list[Any] = []

    def client(number: int) -> None:
        for turn in range(3):
            at = (number + turn) % len(prompts)
            answer = served.ask([prompts[at]], 8)[0]
            if answer != expected[at]:
                wrong.append((at, answer))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


@LONG
@pytest.mark.parametrize("way", ["pp", "cp"])
def test_on_two_machines(way: str, tmp_path: Path) -> None:
    """A stage on each, or a part of every context."""
    reference = made(WAYS[way], tmp_path)
    meeting = f"--nnodes 2 --dist-init-addr 127.0.0.1:{free_port()} --dist-secret a-long-secret"
    flags = f"{WAYS[way].sizes} {meeting}".split()
    with Cluster(tmp_path, *flags, per_node=[("--node-rank", "0"), ("--node-rank", "1")]) as served:
        assert served.ask(LONG_PROMPTS, 8) == greedy(reference, LONG_PROMPTS, 8)
        held = served.info()["engine"]["ranks"]
    check_served(tmp_path, WAYS[way].layout, held)


@LONG
def test_drafts_where_ranks_split_states(tmp_path: Path) -> None:
    """What was right of them is taken in on every rank, and what was wrong on none."""
    reference = made(WAYS["tp of states"], tmp_path)
    prompts = [prompt * 3 for prompt in PROMPTS]
    flags = ("--speculative-algorithm", "NGRAM", "--no-speculative-adaptive", "--speculative-num-draft-tokens", "4")
    with Cluster(tmp_path, "--tp-size", "2", *flags) as served:
        assert served.ask(prompts, 3 * NEW_TOKENS) == greedy(reference, prompts, 3 * NEW_TOKENS)
        assert served.ask(prompts, 3 * NEW_TOKENS) == greedy(reference, prompts, 3 * NEW_TOKENS), "from the history"
