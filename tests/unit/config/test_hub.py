"""Models of the hub: names, which of a repository's files are theirs, downloads that go on, damage that is found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save

from bough.cli.main import main
from bough.config import download
from bough.config.default_model import default_model_path
from bough.config.hub_files import wanted_files
from bough.config.hub_name import HubName, parse_hub_name
from bough.core.errors import ConfigError
from tests.unit.config.fake_hub import FakeHub
from tests.unit.config.test_download import CONFIG

WEIGHTS = save({"x": np.arange(500_000, dtype=np.float32)})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/repo", HubName("org/repo")),
        ("gpt2", HubName("gpt2")),
        ("org/repo:Q4_K_M", HubName("org/repo", "Q4_K_M")),
        ("hf.co/org/repo:Q4_K_M", HubName("org/repo", "Q4_K_M")),
        ("https://huggingface.co/org/repo", HubName("org/repo")),
        ("https://huggingface.co/org/repo/", HubName("org/repo")),
        ("hf://org/repo-1.5_x", HubName("org/repo-1.5_x")),
        ("a/b/c", None),
        ("", None),
        ("..", None),
        ("../x/y", None),
        ("org/repo:", None),
        ("org/repo:a/b", None),
        ("https://example.com/org/repo", None),
    ],
)
def test_names(text: str, name: HubName | None) -> None:
    assert parse_hub_name(text) == name


SAFETENSORS = ["config.json", "model-1.safetensors", "model-2.safetensors", "original/model.safetensors", "tokenizer.json",
               "x.png", "consolidated.safetensors", "README.md"]  # fmt: skip
WANTED = ["config.json", "model-1.safetensors", "model-2.safetensors", "tokenizer.json"]
GGUFS = ["m-Q4_0.gguf", "m-Q4_0_4_4.gguf", "m-Q4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf",
         "mmproj-m-f16.gguf", "README.md"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "files", "wanted"),
    [
        ("r", SAFETENSORS, WANTED),
        ("r", [*SAFETENSORS, "m-Q4_K_M.gguf"], WANTED),
        ("r:q4_k_m", [*SAFETENSORS, "m-Q4_K_M.gguf"], ["m-Q4_K_M.gguf"]),
        ("r", GGUFS, ["m-Q4_K_M.gguf"]),
        ("r:Q4_0", GGUFS, ["m-Q4_0.gguf"]),
        ("r:Q8_0", GGUFS, ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]),
        ("r", ["only.gguf", "config.json"], ["only.gguf"]),
        ("r", ["a-IQ2_XS.gguf", "b/m-Q8_0.gguf"], ["b/m-Q8_0.gguf"]),
        ("r", ["params.json", "consolidated.safetensors", "tekken.json"],
         ["params.json", "tekken.json", "consolidated.safetensors"]),
    ],
)  # fmt: skip
def test_which_files_a_model_is(name: str, files: list[str], wanted: list[str]) -> None:
    parsed = parse_hub_name(name)
    assert parsed is not None
    assert wanted_files(parsed, files) == wanted


@pytest.mark.parametrize(
    ("name", "files", "what", "why"),
    [
        ("r:Q5_K_M", GGUFS, "no GGUF file Q5_K_M", "m-Q4_K_M.gguf"),
        ("r:Q4_K_M", SAFETENSORS, "no GGUF file Q4_K_M", "none"),
        ("r", ["a.gguf", "b.gguf"], "several models", "a.gguf, b.gguf"),
        ("r:Q8_0", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "several files", "a-Q8_0.gguf, b-Q8_0.gguf"),
    ],
)
def test_which_files_can_not_be_said(name: str, files: list[str], what: str, why: str) -> None:
    parsed = parse_hub_name(name)
    assert parsed is not None
    with pytest.raises(ConfigError) as caught:
        wanted_files(parsed, files)
    assert what in caught.value.what
    assert why in caught.value.why
    assert caught.value.fix


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    made = FakeHub(
        {"config.json": b'{"model_type": "llama"}', "model.safetensors": WEIGHTS, "a-Q4_0.gguf": b"GGUF" * 999}
    )
    use(made, tmp_path, monkeypatch)
    yield made
    made.close()


def use(hub: FakeHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process asks `hub` and keeps models in `cache`."""
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in (
        ("ENDPOINT", hub.url),
        ("HUGGINGFACE_CO_URL_TEMPLATE", template),
        ("HF_HUB_CACHE", str(cache)),
        ("HF_HUB_OFFLINE", False),
    ):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(download, "_WAIT_S", 0.0)


@pytest.fixture
def bough(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command: its status, what it printed, and its errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return status, printed.out, printed.err

    return run


Bough = Callable[..., tuple[int, str, str]]


def test_a_model_is_pulled_listed_and_removed(hub: FakeHub, bough: Bough, monkeypatch: pytest.MonkeyPatch) -> None:
    status, printed, errors = bough("models", "pull", "hf.co/our/model")
    assert status == 0, errors
    assert "our/model is complete" in printed
    assert {name for name, _, _ in hub.sent} == {"config.json", "model.safetensors"}
    assert bough("models", "pull", "our/model:Q4_0")[0] == 0
    listed = bough("models")[1]
    assert any(line.split()[:3] == ["our/model", "1.91", "MiB"] for line in listed.splitlines()), listed
    hub.sent.clear()
    assert bough("models", "pull", "our/model")[0] == 0
    assert not hub.sent, "what is there is not downloaded again"
    with monkeypatch.context() as alone:
        alone.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        assert bough("models", "pull", "our/model")[0] == 0, "what is there needs no hub"
    assert "1.91 MiB freed" in bough("models", "rm", "our/model")[1]
    assert "our/model" not in bough("models", "list", "--names")[1]
    status, _, errors = bough("models", "rm", "our/model")
    assert status == 2
    assert "our/model is not on this machine" in errors


def test_one_gguf_file_of_several_is_removed(hub: FakeHub, bough: Bough) -> None:
    del hub.files["model.safetensors"]
    hub.files["a-Q8_0.gguf"] = b"GGUF" * 500
    for tag in ("Q4_0", "Q8_0"):
        assert bough("models", "pull", f"our/model:{tag}")[0] == 0
    assert {"our/model:a-Q4_0", "our/model:a-Q8_0"} <= set(bough("models", "list", "--names")[1].split())
    assert bough("models", "rm", "our/model:a-Q8_0")[0] == 0
    assert json.loads(bough("models", "list", "--json")[1])[-1]["path"].endswith("a-Q4_0.gguf")


def test_an_interrupted_download_goes_on(hub: FakeHub, bough: Bough) -> None:
    def half_then_nothing(name: str, data: bytes) -> bytes | None:
        if not name.endswith(".safetensors"):
            return data
        return None if len(data) == len(WEIGHTS) else b""

    hub.before_sending = half_then_nothing
    status, _, errors = bough("models", "pull", "our/model")
    assert status == 2
    assert "the hub can't be reached" in errors
    hub.before_sending = None
    hub.sent.clear()
    status, _, errors = bough("models", "pull", "our/model")
    assert status == 0, errors
    (sent,) = [each for each in hub.sent if each[0] == "model.safetensors"]
    assert sent[1] == len(WEIGHTS) // 2, "the first part is not sent again"
    assert sent[1] + sent[2] == len(WEIGHTS)


def test_damage_is_found_and_mended(hub: FakeHub, bough: Bough, tmp_path: Path) -> None:
    hub.before_sending = lambda name, data: data[:-1] + b"!" if name.endswith(".safetensors") else data
    status, _, errors = bough("models", "pull", "our/model")
    assert status == 2
    assert "model.safetensors is damaged" in errors
    hub.before_sending = None
    assert bough("models", "pull", "our/model")[0] == 0
    (blob,) = [path for path in tmp_path.rglob("blobs/*") if path.stat().st_size == len(WEIGHTS)]
    blob.write_bytes(WEIGHTS[:-1] + b"?")
    assert "is damaged" in bough("models", "pull", "our/model")[2], "found later too"
    assert bough("models", "pull", "our/model")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (["pull", "no/such"], "there is no model no/such", "check the name"),
        (["pull", "our/model:Q9"], "our/model has no GGUF file Q9", "our/model:Q4_K_M"),
        (["pull", "a b"], "'a b' is no name of a model", "org/repo"),
        (["pul"], "invalid choice: 'pul'", "did you mean pull?"),
        (["pull", "our/model", "--revison", "x"], "unrecognized arguments: --revison", "--revision"),
    ],
)
def test_refusals(hub: FakeHub, bough: Bough, arguments: list[str], what: str, fix: str) -> None:
    status, _, errors = bough("models", *arguments)
    assert status == 2
    assert what in errors.splitlines()[0]
    assert fix in errors


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A model whose weights are much larger than its header."""
    hidden, ffn, vocab, layers = 64, 128, 20_000, 2
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    shapes |= {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    for at in range(layers):
        layer = f"model.layers.{at}."
        shapes |= {
            layer + "self_attn.q_proj.weight": (64, hidden), layer + "self_attn.k_proj.weight": (32, hidden),
            layer + "self_attn.v_proj.weight": (32, hidden), layer + "self_attn.o_proj.weight": (hidden, 64),
            layer + "mlp.gate_proj.weight": (ffn, hidden), layer + "mlp.up_proj.weight": (ffn, hidden),
            layer + "mlp.down_proj.weight": (hidden, ffn), layer + "input_layernorm.weight": (hidden,),
            layer + "post_attention_layernorm.weight": (hidden,),
        }  # fmt: skip
    config = {**CONFIG, "vocab_size": vocab, "max_position_embeddings": 512, "rms_norm_eps": 1e-5}
    weights = save({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    made = FakeHub({"config.json": json.dumps(config).encode(), "model.safetensors": weights})
    use(made, tmp_path, monkeypatch)
    yield made
    made.close()


def test_doctor_reads_the_headers_of_a_model_and_no_weights(described: FakeHub, bough: Bough, tmp_path: Path) -> None:
    _, printed, _ = bough("doctor", "our/model", "--device", "cpu", "--port", "0")
    assert "our/model fits (LlamaForCausalLM)" in printed, printed
    assert "10.05 MiB in 2 files on the hub" in printed
    sent = sum(sent for name, _, sent in described.sent if name == "model.safetensors")
    assert 0 < sent < 1_000_000, "the header, not the weights"
    assert not list(tmp_path.rglob("*.safetensors")), "nothing is kept"
    status, printed, _ = bough("doctor", "no/such", "--device", "cpu", "--port", "0")
    assert status == 2
    assert "FAIL  no/such: there is no model no/such" in printed


def test_doctor_reads_the_header_of_a_gguf_file(described: FakeHub, bough: Bough) -> None:
    whole = default_model_path().read_bytes()
    described.files = {"m-Q4_1.gguf": whole}
    _, printed, _ = bough("doctor", "our/model", "--device", "cpu", "--port", "0")
    assert "our/model fits (LlamaForCausalLM)" in printed, printed
    assert sum(sent for _, _, sent in described.sent) < len(whole) / 5


def test_doctor_without_a_hub(described: FakeHub, bough: Bough, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    _, printed, _ = bough("doctor", "our/model", "--device", "cpu", "--port", "0")
    assert "WARN  our/model: it is not on this machine, and the hub can't be reached" in printed
