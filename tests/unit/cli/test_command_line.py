"""The command line: what it understands, what it explains, and how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from bough.cli import bench, doctor, main
from bough.cli.config_flags import help_text, markdown, parse, spellings, wants_help
from bough.config.flags import ALIASES, settings
from bough.config.memory_plan import show_bytes
from bough.core.errors import ConfigError
from bough.engine.decide import decide
from bough.observability.crash import make_directory
from bough.platform.facts import detect

ROOT = Path(__file__).parents[3]


def bough(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bough", *arguments], capture_output=True, text=True, timeout=150, cwd=ROOT, check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), **environ},
    )  # fmt: skip


def test_flags_reach_the_configuration() -> None:
    parsed = parse(
        ["some/model", "--tp", "2", "--no-radix-cache", "--context-length=32K", "--chunked-prefill-size", "-1",
         "--disable-cuda-graph", "--cors-origins", "http://a,http://b", "--metrics"],
        environ={},
    )  # fmt: skip
    config = parsed.loaded.config
    assert config.model.model == "some/model"
    assert config.parallel.tp_size == 2
    assert config.cache.radix_cache is False
    assert config.model.context_length == 32_768
    assert config.scheduler.chunked_prefill_size == -1
    assert config.device.cuda_graph is False
    assert config.server.cors_origins == ("http://a", "http://b")
    assert parsed.loaded.origins["tp_size"] == "--tp"
    assert not parsed.dump_config


_FITTING = {
    "pp_async_batch_depth": "0", "pp_max_micro_batch_size": "0", "pp_layer_partition": "",
    "ep_num_redundant_experts": "0", "attn_dp_size": "1", "attn_cp_size": "1", "init_expert_location": "trivial",
    "node_rank": "0", "api_workers": "1", "nnodes": "1", "log_requests_level": "1", "ep_size": "1", "dp_size": "1",
    "speculative_config": '{"method": "ngram"}', "dist_timeout_s": "60",    "dist_init_addr": "", "root_path": "/llm",
}  # fmt: skip
"""Values of settings that don't take the common ones."""


_TOGETHER = {
    "speculative_draft_model_path": ["--speculative-algorithm", "EAGLE3"],
    "speculative_token_map": ["--speculative-algorithm", "NEXTN"],
    "speculative_draft_window_size": ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "HEAD"],
    "speculative_num_steps": ["--speculative-algorithm", "NEXTN"],
    "speculative_accept_threshold_single": ["--speculative-algorithm", "NGRAM"],
    "speculative_accept_threshold_acc": ["--speculative-algorithm", "NGRAM"],
    "speculative_use_rejection_sampling": ["--speculative-algorithm", "NEXTN"],
    "speculative_use_block_verification": ["--speculative-algorithm", "NEXTN"],
    "eplb": ["--tp-size", "2", "--ep-size", "2"],
    "use_ray": ["--tp-size", "2", "--nnodes", "2"],
    "enable_dp_attention": ["--tp-size", "2", "--dp-size", "2"],
    "speculative_eagle_topk": ["--speculative-algorithm", "NEXTN"],
}
"""Settings that mean nothing without another."""


@pytest.mark.parametrize("name", [*settings(), *ALIASES])
def test_every_spelling_is_a_flag(name: str) -> None:
    alias = ALIASES.get(name)
    setting = settings()[alias.target if alias else name]
    samples = {"int": "1024", "float": "0.5", "text": "{}", "list": "x", "choice": (setting.choices or ("",))[0]}
    value = [] if setting.kind == "bool" else [samples[setting.kind]]
    if setting.name in _FITTING:
        value = [_FITTING[setting.name]]
    elif setting.name.startswith("speculative_") and setting.kind == "int":
        value = ["4"]
    flag = "--" + name.replace("_", "-")
    more = _TOGETHER.get(setting.name, [])
    assert setting.name in parse([flag, *value, *more], environ={}).loaded.origins


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (["--prot", "1"], "unknown option --prot", "--port"),
        (["--no-radix-cash"], "unknown option --no-radix-cash", "--radix-cache"),
        (["m", "n"], "unexpected argument 'n'", ""),
        (["--port"], "expected one argument", ""),
        (["--port", "x"], "--port is 'x'", ""),
        (["m", "--model-path", "n"], "both say", ""),
        (["--tp", "1", "--tp-size", "1"], "both say", "--tp-size"),
        (["--profile", "fast"], "unknown profile", ""),
        (["--config", "/no/such.yaml"], "can't read", ""),
        (["--dtype", "bfloat61"], "--dtype is 'bfloat61'", "bfloat16"),
        (["--quantization", "zip"], "--quantization is 'zip'", "auto"),
    ],
)
def test_refusals_name_the_remedy(arguments: list[str], what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(arguments, environ={})
    assert what in caught.value.what
    assert caught.value.fix
    assert fix in caught.value.fix


def test_help_has_every_flag_and_its_default() -> None:
    text = help_text("serve", "About.", "")
    for setting in settings().values():
        assert all(flag in text for flag in spellings(setting))


def test_help_by_group_and_word() -> None:
    cache = help_text("serve", "About.", "cache")
    assert "--page-size" in cache
    assert "--port" not in cache
    found = help_text("serve", "About.", "retraction")
    assert "--schedule-conservativeness" in found
    assert "--port" not in found
    assert "--tp-size" in help_text("serve", "About.", "tensor-parallel")
    assert "the groups are" in help_text("serve", "About.", "zzz")


@pytest.mark.parametrize(
    ("argv", "topic"), [([], None), (["-h"], ""), (["m", "--help"], ""), (["--help=cache"], "cache")]
)
def test_what_help_is_wanted(argv: list[str], topic: str | None) -> None:
    assert wants_help(argv) == topic


def test_the_flag_reference_is_current() -> None:
    assert (ROOT / "docs" / "flags.md").read_text() == markdown(), "run: bough serve --help=markdown > docs/flags.md"


def test_help_imports_no_torch_and_is_quick() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); from bough.cli.main import main;"
        "main(['--help']); main(['serve', '--help']); main(['version']);"
        "heavy = [m for m in ('torch', 'transformers', 'starlette', 'numpy') if m in sys.modules];"
        "print('HEAVY', heavy)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=150, check=True
    )
    assert done.stdout.rstrip().endswith("HEAVY []")


def test_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert main.main([]) == 2
    assert main.main(["sevre"]) == 2
    assert "bough serve" in capsys.readouterr().err
    assert main.main(["serve", "--prot", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: unknown option --prot\n  why: ")
    assert "fix: did you mean --port?" in error
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("bough ")


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["models", "familie"], "did you mean families?"),
        (["models", "families", "--markdwn"], "did you mean --markdown?"),
        (["models", "zzz"], "see `bough models --help`"),
    ],
)
def test_misspelt_actions_and_flags_of_a_command(
    arguments: list[str], fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(arguments) == 2
    assert capsys.readouterr().err.endswith(f"fix: {fix}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["version"], []])
def test_a_reader_that_has_seen_enough_is_no_error(arguments: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        command = [sys.executable, "-m", "bough", *arguments]
        done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, timeout=120, check=False)
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")


def test_dump_config_round_trips(tmp_path: Path) -> None:
    first = bough("serve", "m", "--port", "8123", "--profile", "latency", "--dump-config", BOUGH_TP_SIZE="2")
    assert first.returncode == 0, first.stderr
    assert "tp_size: 2  # BOUGH_TP_SIZE" in first.stdout
    file = tmp_path / "c.yaml"
    file.write_text(first.stdout)
    second = bough("serve", "--config", str(file), "--dump-config")
    strip = lambda text: [line.split("  #")[0] for line in text.splitlines()]
    assert strip(second.stdout) == strip(first.stdout)


def test_launch_server_is_serve() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bough.launch_server", "--model-path", "m", "--dump-config"],
        capture_output=True, text=True, timeout=150, cwd=ROOT, check=False,
    )  # fmt: skip
    assert "model: m  # --model-path" in done.stdout


def test_serving_the_network_without_a_key_is_refused() -> None:
    done = bough("serve", "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 2
    assert "without a key" in done.stderr
    assert "--insecure" in done.stderr


def test_a_missing_model_is_refused_quickly() -> None:
    done = bough("serve", "/no/such/model", "--port", "0")
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no model at /no/such/model")


def test_a_taken_port_is_refused_before_anything_starts() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = bough("serve", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "can't listen on" in done.stderr


def test_bench_lists_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run([]) == 0
    assert "host" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no measurement"):
        bench.run(["hots"])


# -- doctor ---------------------------------------------------------------------------------------


def test_doctor_reports_and_exits_by_the_worst(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "machine", lambda config: iter([doctor.Finding("OK", "fine")]))
    monkeypatch.setattr(doctor, "fits", lambda config: iter([doctor.Finding("WARN", "tight", "do this")]))
    assert doctor.run(["m"]) == 1
    assert capsys.readouterr().out == "OK    fine\nWARN  tight\n      fix: do this\n"
    monkeypatch.setattr(doctor, "fits", lambda config: iter([doctor.Finding("FAIL", "no")]))
    assert doctor.run(["m", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)[-1]["verdict"] == "FAIL"


def test_doctor_finds_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    huge = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16_384, "num_hidden_layers": 126,
        "num_attention_heads": 128, "num_key_value_heads": 8, "intermediate_size": 53_248, "vocab_size": 128_256,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(huge))
    assert doctor.run([str(tmp_path), "--load-format", "dummy", "--device", "cpu"]) == 2
    report = capsys.readouterr().out
    assert "does not fit" in report
    assert "GiB" in report
    small = {**huge, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
             "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 2048}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(small))
    assert doctor.run([str(tmp_path), "--load-format", "dummy", "--device", "cpu", "--port", "0"]) in (0, 1)
    assert "fits (LlamaForCausalLM)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "flags", "told"),
    [
        ({"architectures": ["NopeForCausalLM"]}, [], "no implementation of NopeForCausalLM"),
        ({"quantization_config": {"quant_method": "aqlm"}}, [], "quantised with 'aqlm'"),
        ({}, ["--tp-size", "5"], "4 attention heads can't be split over 5 ranks"),
        ({}, ["--load-format", "dummy", "--dummy-routing", "uniform"], "the model has no experts"),
        ({}, [], ""),
    ],
)
def test_doctor_refuses_what_a_server_would(
    changed: dict[str, object], flags: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 1000,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "torch_dtype": "float16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    save_file({"model.embed_tokens.weight": np.zeros((1000, 64), np.float16)}, tmp_path / "model.safetensors")
    status = doctor.run([str(tmp_path), "--device", "cpu", "--port", "0", *flags])
    report = capsys.readouterr().out
    assert (status == 2) == bool(told), report
    assert (told or "fits (LlamaForCausalLM)") in report


def test_doctor_plans_what_the_engine_will() -> None:
    """The same memory for the same settings; only what others leave free changes from moment to moment."""
    config = parse(["--device", "cpu", "--max-total-tokens", "4096"], {}).loaded.config
    told = [each.what for each in doctor.fits(config)]
    for what, size, _ in decide(config, detect("cpu")).resolved.plan.rows():
        if what in ("weights", "KV cache", "activations"):
            row = f"  {what:<12} {show_bytes(size):>10}"
            assert any(line.startswith(row) for line in told), (row, told)


def test_doctor_sees_a_taken_port(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert doctor._port("127.0.0.1", port).verdict == "WARN"
    assert doctor._port("127.0.0.1", port).verdict == "OK"


def test_doctor_tries_the_door_for_media(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixel = (
        "data:image/png;base64,"
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    )
    assert doctor.run(["--port", "0", "--media", pixel]) in (0, 1)
    assert "PNG, 1 x 1 pixels" in capsys.readouterr().out
    assert doctor.run(["--port", "0", "--media", "http://example.com/cat.png"]) == 2
    assert "--allowed-media-domains" in capsys.readouterr().out
    listed = ["--allowed-media-domains", "*", "--media", "http://127.0.0.1/cat.png"]
    assert doctor.run(["--port", "0", *listed]) == 2
    assert "no public address" in capsys.readouterr().out
    below = ["--allowed-local-media-path", str(tmp_path), "--media", f"file://{tmp_path}/../x.png"]
    assert doctor.run(["--port", "0", *below]) == 2


@pytest.mark.parametrize(
    "flags", [["--allowed-media-domains", "http://x"], ["--allowed-local-media-path", "/nowhere/at/all"]]
)
def test_media_flags_that_can_not_be_meant_stop_a_server(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["serve", "--port", "0", *flags]) == 2
    assert "media" in capsys.readouterr().err


def test_a_taken_port_names_its_own_flag(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main.main(["serve", "--port", "0", "--grpc-port", str(port)]) == 2
    assert "example --grpc-port" in capsys.readouterr().err


def test_a_place_for_crash_bundles_is_tried_before_a_crash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main.main(["serve", "--port", "0", "--crash-dir", str(tmp_path / "file")]) == 2
    assert "--crash-dir" in capsys.readouterr().err
    make_directory(tmp_path / "crashes")
    assert (tmp_path / "crashes").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("known", [True, False])
def test_doctor_is_quick_and_needs_no_torch(known: bool, tmp_path: Path) -> None:
    """Even where the CPU's fastest type has to be measured: another process does that."""
    environ = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
    if not known:
        environ["XDG_CACHE_HOME"] = str(tmp_path)
    code = (
        "import sys, time; from bough.cli.main import main; main(['doctor', '--json']);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules;"
        "assert time.process_time() < 2, 'on a machine that does nothing else it is done within two seconds'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=150, check=True, capture_output=True, env=environ)
    assert known or (tmp_path / "bough" / "cpu_dtype.json").exists()


def test_v_is_the_debug_level() -> None:
    assert parse(["-v"], {}).loaded.config.log.log_level == "debug"
    assert parse(["m", "--verbose"], {}).loaded.config.log.log_level == "debug"
    assert parse([], {}).loaded.config.log.log_level == "info"
    with pytest.raises(ConfigError, match="-v and --log-level both"):
        parse(["-v", "--log-level", "error"], {})
