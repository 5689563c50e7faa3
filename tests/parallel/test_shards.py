"""Checkpoints cut for single ranks: a rank's file has what it reads, and no rank reads more than its share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import PROMPTS, SETTINGS, Cluster, greedy
from families import DENSE, EARLIER, EXPERTS, LATENTS
from quantised_files import quantise_checkpoint
from thread_engine import ThreadEngine
from tiny import make_tiny

from bough.cli.config_flags import parse
from bough.cli.main import main
from bough.config.hf import open_checkpoint, pack_checkpoint, unpack_checkpoint
from bough.config.layout import Layout
from bough.config.shares import rank_parameters
from bough.core.errors import ConfigError, WeightsError
from bough.distributed.collectives import ALONE
from bough.distributed.mesh import SINGLE, Mesh, make_mesh
from bough.engine.decide import Decided, decide
from bough.engine.expert_plan import plan_experts
from bough.layers.spread import TokenSpread
from bough.models.load import build_model, reads_of
from bough.platform.facts import detect
from bough.weights.load import open_tensors
from bough.weights.shards import TracedReads

SPREADS: dict[str, list[str]] = {
    "llama": ["--tp-size", "2"],
    "uneven": ["--tp-size", "3"],
    "gpt2": ["--tp-size", "2"],
    "stages": ["--tp-size", "2", "--pp-size", "2", "--pp-layer-partition", "1,2"],
    "qwen3_moe": ["--tp-size", "4", "--ep-size", "2"],
    "gpt_oss": ["--tp-size", "2", "--ep-size", "2", "--moe-a2a-backend", "allgather"],
    "deepseek_v3": ["--tp-size", "4", "--attn-dp-size", "2"],
    "fp8": ["--tp-size", "2"],
}


def make(case: str, folder: Path) -> torch.nn.Module | None:
    if case == "uneven":
        return make_tiny(
            "llama", folder, num_attention_heads=6, num_key_value_heads=3, head_dim=8, intermediate_size=83
        )
    if case == "stages":
        return make_tiny("llama", folder, num_hidden_layers=3)
    if case == "fp8":
        make_tiny("llama", folder, hidden_size=64, intermediate_size=128)
        quantise_checkpoint(folder, "fp8-block")
        return None
    prefix, extra = {**DENSE, **EARLIER, **EXPERTS, **LATENTS}.get(case, (case, {}))
    return make_tiny(prefix, folder, **extra)


def decided(folder: Path, flags: list[str]) -> Decided:
    return decide(parse([str(folder), *SETTINGS, *flags], environ={}).loaded.config, detect("cpu"))


def share(found: Decided, rank: int) -> dict[str, Any]:
    """What says which share of a model a rank has."""
    layout, parallel = Layout.of(found.resolved.config.parallel), found.resolved.config.parallel
    mesh: Mesh = make_mesh(layout, rank, lambda axis, ranks, place: ALONE)
    spread = TokenSpread(mesh) if mesh.tokens.size > 1 else None
    return {"mesh": mesh, "experts_plan": plan_experts(parallel, found.facts), "spread": spread}


def cut(folder: Path, out: Path, flags: list[str]) -> None:
    assert main(["shard", str(folder), str(out), *SETTINGS, *flags]) == 0


@pytest.mark.parametrize("case", SPREADS)
def test_a_rank_finds_its_share_in_its_file(case: str, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    make(case, source)
    cut(source, out, SPREADS[case])
    before, after = decided(source, SPREADS[case]), decided(out, SPREADS[case])
    checkpoint = unpack_checkpoint(pack_checkpoint(after.checkpoint))  # as other processes get it
    assert checkpoint.tensors == before.checkpoint.tensors
    settings = {"dtype": torch.float32, "device": torch.device("cpu"), "context_length": 64}
    for rank in range(Layout.of(before.resolved.config.parallel).size):
        whole = build_model(before.checkpoint, **settings, **share(before, rank))
        shard = build_model(checkpoint, **settings, **share(before, rank))
        expected, found = whole.state_dict(), shard.state_dict()  # type: ignore[attr-defined]
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("case", [case for case in SPREADS if case != "fp8"])
def test_a_rank_reads_no_more_than_it_holds(case: str, tmp_path: Path) -> None:
    """By what it asks of the files, and by the size of the file that is cut for it."""
    source, out = tmp_path / "source", tmp_path / "out"
    make(case, source)
    cut(source, out, SPREADS[case])
    found = decided(source, SPREADS[case])
    layout = Layout.of(found.resolved.config.parallel)
    whole = sum(each.nbytes for each in found.checkpoint.tensors.values())
    with open_tensors(found.checkpoint) as tensors:
        for rank in range(layout.size):
            read = reads_of(found.checkpoint, tensors, dtype=torch.float32, **share(found, rank)).num_bytes(tensors)
            held = 4 * rank_parameters(found.facts, layout, rank)
            assert 0.9 * held <= read <= 1.05 * held + 4096, "norms and biases are not counted by all facts"
            assert read < 0.8 * whole
            file = out / f"rank-{rank:05}-of-{layout.size:05}.safetensors"
            assert read <= file.stat().st_size <= read + 40_000, "a header, and what was read"


def test_parts_are_joined_and_kept_once() -> None:
    reads = TracedReads()
    for box in (
        ((0, 2), (0, 4)),
        ((2, 5), (0, 4)),
        ((1, 3), (1, 2)),
        ((7, 8), (0, 3)),
        ((7, 8), (1, 4)),
        ((0, 2), (0, 4)),
    ):
        reads.note("x", box)
    reads.note("scalar", ())
    assert reads.pieces() == {"scalar": [()], "x": [((0, 5), (0, 4)), ((7, 8), (0, 4))]}


def test_what_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    make_tiny("llama", source)
    assert main(["shard", str(source), str(out)]) == 2
    assert "one rank reads all of it" in capsys.readouterr().err
    cut(source, out, ["--tp-size", "2"])
    assert main(["shard", str(source), str(out), "--tp-size", "2"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["shard", str(out), str(tmp_path / "again"), "--tp-size", "2"]) == 2
    assert "has been cut already" in capsys.readouterr().err
    with pytest.raises(ConfigError) as caught:
        decided(out, ["--tp-size", "2", "--pp-size", "2"])
    assert "--pp-size was 1, now it is 2" in caught.value.why
    assert "--tp-size 2" in caught.value.fix
    staged = tmp_path / "staged"
    cut(source, staged, ["--pp-size", "2", "--pp-layer-partition", "1,3"])
    with pytest.raises(ConfigError, match="was cut for other stages"):
        decided(staged, ["--pp-size", "2"])
    capsys.readouterr()
    assert main(["doctor", str(out), *SETTINGS, "--tp-size", "4", "--json"]) == 2
    told = [each["what"] for each in json.loads(capsys.readouterr().out) if each["verdict"] == "FAIL"]
    assert any("was cut for other ranks" in each for each in told)
    with pytest.raises(WeightsError, match="does not hold"):
        build_model(open_checkpoint(str(out)), dtype=torch.float32, device=torch.device("cpu"), mesh=SINGLE)
    (out / "rank-00001-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="lacks rank-00001-of-00002"):
        decided(out, ["--tp-size", "2"])
    (out / "bough_shards.json").write_text("{}")
    with pytest.raises(ConfigError, match="can't be read"):
        open_checkpoint(str(out))


def test_an_engine_serves_shards(tmp_path: Path) -> None:
    """Of a mixture, over four ranks in two stages; the checkpoint that was cut is gone."""
    source, out = tmp_path / "source", tmp_path / "out"
    reference = make_tiny("qwen3_moe", source)
    cut(source, out, ["--tp-size", "2", "--pp-size", "2", "--ep-size", "2"])
    shutil.rmtree(source)
    with ThreadEngine(out, tp_size=2, pp_size=2, ep_size=2) as engine:
        assert engine.ask(PROMPTS, 6) == greedy(reference, PROMPTS, 6)


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(400)
def test_processes_serve_shards(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    reference = make_tiny("llama", source)
    cut(source, out, ["--tp-size", "2"])
    shutil.rmtree(source)
    with Cluster(out, "--tp-size", "2") as served:
        assert served.ask(PROMPTS) == greedy(reference, PROMPTS)
