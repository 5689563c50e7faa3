"""Ranks that look at the machine at different moments must decide the same."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bough.config.concerns import Config
from bough.config.default_model import default_model_path
from bough.config.hf import open_checkpoint
from bough.config.resolve import Resolved
from bough.config.resolve_facts import MachineFacts, ModelPlanFacts
from bough.config.server_args import build_config
from bough.core.errors import ConfigError
from bough.engine import build
from bough.engine.agree import agree, least
from bough.engine.decide import decide
from bough.engine.early import Early
from bough.ipc import Launch, write_checkpoint
from bough.ipc.link import Listener
from bough.ipc.store import StoreServer
from bough.platform.facts import DeviceFacts, detect

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 49_152,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
GIB = 2**30


@pytest.fixture
def machines() -> list[DeviceFacts]:
    """A GPU as two ranks see it: the second looks when the first has opened its context."""
    gpu = replace(
        detect("cpu"), kind="cuda", arch="sm90", capability=(9, 0), total_bytes=140 * GIB, free_bytes=139 * GIB,
        num_sms=132, num_devices=2,
    )  # fmt: skip
    return [gpu, replace(gpu, free_bytes=139 * GIB - 517 * 2**20)]


def test_ranks_have_as_many_pages_and_the_same_types(tmp_path: Path, machines: list[DeviceFacts]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    config = build_config(
        model_path=str(model), tokenizer=str(default_model_path()), load_format="dummy", device="cuda", tp_size=2
    )
    alone = [decide(config, machine).resolved for machine in machines]
    assert alone[0].plan.num_pages != alone[1].plan.num_pages, "or there is nothing to agree on"
    store = StoreServer([]).local()

    def one(rank: int) -> Resolved:
        return decide(config, machines[rank], lambda seen: agree(seen, store, rank, 2)).resolved

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(one, range(2))
    assert first.plan == second.plan
    assert first.config == second.config
    assert first.plan.num_pages == min(each.plan.num_pages for each in alone), "it must fit on each"


def test_what_was_measured_is_the_first_ranks(tmp_path: Path) -> None:
    seen = [
        MachineFacts(device="cpu", total_bytes=9, free_bytes=5, fastest_dtype="float32"),
        MachineFacts(device="cpu", total_bytes=9, free_bytes=7, fastest_dtype="bfloat16"),
    ]
    found: dict[int, MachineFacts] = {}
    store = StoreServer([]).local()
    threads = [
        threading.Thread(target=lambda rank=rank: found.update({rank: agree(seen[rank], store, rank, 2)}))
        for rank in (1, 0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1] == seen[0]


def test_ranks_of_a_cpu_share_its_memory_and_use_what_all_have() -> None:
    seen = [
        MachineFacts(
            device="cpu", total_bytes=90, free_bytes=60, host_free_bytes=60, attention_backends=("cpu", "torch")
        ),
        MachineFacts(device="cpu", total_bytes=90, free_bytes=40, host_free_bytes=40),
    ]
    store = StoreServer([]).local()
    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(lambda rank: agree(seen[rank], store, rank, 2, sharing=2), range(2))
    assert first == second
    assert (first.free_bytes, first.host_free_bytes, first.attention_backends) == (20, 20, ("torch",))


def test_ranks_on_different_kinds_of_device_are_refused() -> None:
    seen = [MachineFacts(device=device, total_bytes=9, free_bytes=9) for device in ("cuda", "cpu")]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rank 0 runs on cuda, rank 1 on cpu"):
        least(seen)


class _Enough(Exception):
    """The start has come as far as the test wants."""


def test_a_rank_decides_by_what_all_have_seen(
    tmp_path: Path, machines: list[DeviceFacts], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    config = build_config(model_path=str(model), load_format="dummy", device="cuda", tp_size=2)
    launch = Launch(config=config, directory=str(tmp_path), parent_pid=os.getpid())
    write_checkpoint(launch.endpoints, open_checkpoint(str(model), load_format="dummy"))
    smallest = MachineFacts(device="cuda", total_bytes=100 * GIB, free_bytes=77 * GIB)
    server = StoreServer([Listener(launch.endpoints.meeting)])
    server.local().set("machine/0", msgspec.json.encode(smallest))
    decided: list[MachineFacts] = []

    def note(_: Config, machine: MachineFacts, __: ModelPlanFacts) -> Resolved:
        decided.append(machine)
        raise _Enough

    early = Early(replace(config, device=replace(config.device, device="cpu")), 1)
    monkeypatch.setattr(early, "facts", lambda: machines[1])
    monkeypatch.setattr("bough.engine.decide.resolve", note)
    with pytest.raises(_Enough):
        build.run_rank(launch, 1, early, 0.0)
    server.close()
    assert [each.free_bytes for each in decided] == [77 * GIB]
