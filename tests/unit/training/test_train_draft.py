"""`bough train-draft`: the command from prompts to a head that is served, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny import make_tiny
from whole_engine import save_tokenizer

from bough.cli.main import USAGE_ERROR, main
from bough.config.draft_facts import read_draft
from bough.config.hf import open_checkpoint
from bough.core.errors import ConfigError
from bough.engine.draft import mapped
from bough.models.registry import facts_of
from bough.tokenizer import load_tokenizer
from bough.training.samples import Prompts, Sample, load_samples, save_samples

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{{ 'bot:' if add_generation_prompt }}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny("llama", folder, vocab_size=320)
    save_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return folder


@pytest.mark.timeout(300)
def test_from_prompts_to_a_head(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One engine answers prompts of all kinds; the second head learns from the same answers."""
    (tmp_path / "asked.jsonl").write_text(
        '{"prompt": "one two"}\n"three"\n{"messages": [{"role": "user", "content": "x"}]}\n'
    )
    (tmp_path / "text.md").write_text("\n\n".join(f"Paragraph {n} has some words in it. " * 5 for n in range(4)))
    kept, eagle, medusa = tmp_path / "kept.jsonl", tmp_path / "eagle", tmp_path / "medusa"
    common = ["--device", "cpu", "--epochs", "1", "--num-drafts", "2", "--held-back", "2", "--max-length", "250"]
    asked = ["--prompts", str(tmp_path / "asked.jsonl"), "--texts", str(tmp_path), "--sampled-prompts", "3"]
    asked += ["--answer-tokens", "8", "--text-prompts", "3", "--max-total-tokens", "2048", "--save-answers", str(kept)]
    assert main(["train-draft", str(model), str(eagle), *common, *asked]) == 0
    out = capsys.readouterr().out
    assert "tokens per step on 2 prompts that were held back" in out
    assert f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {eagle}" in out
    more = ["--method", "medusa", "--answers", str(kept), "--token-map", "40"]
    assert main(["train-draft", str(model), str(medusa), *common, *more]) == 0
    facts = facts_of(open_checkpoint(str(model)).config)
    assert read_draft("EAGLE3", open_checkpoint(str(eagle)), facts, None).taps == (2, 2, 1)
    heads = open_checkpoint(str(medusa))
    read = mapped(heads, read_draft("MEDUSA", heads, facts, None), "", facts.vocab)
    assert read.most_steps == 2
    assert len(read.tokens) == 40  # found beside it
    (medusa / "config.json").write_text(json.dumps({**heads.config, "token_map": "../elsewhere.json"}))
    with pytest.raises(ConfigError, match="name of a file beside its config"):
        mapped(open_checkpoint(str(medusa)), read, "", facts.vocab)
    report = json.loads((medusa / "training.json").read_text())
    assert report["method"] == "MEDUSA"
    assert report["held_back"]["prompts"] == 2
    assert report["held_back"]["accept_length"] >= 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--max-minutes", "0"], "--max-minutes must be above 0"),
        (["--temperature", "0", "3"], "between 0 and 2"),
        (["--max-answer-minutes", "0"], "--max-answer-minutes must be above 0"),
        (["--max-total-tokens", "-1"], "--max-total-tokens must not be below 0"),
        (["--draft-vocab", "9", "--token-map", "9"], "can't be had together"),
        (
            ["--answers", "{answers}", "--held-back", "1", "--token-map", "999"],
            "--token-map 999 is not between 0 and 320",
        ),
        (["--num-drafts", "17"], "at most 16"),
        (["--answer-tokens", "1024"], "leave no room for a prompt"),
        (["--answers", "a", "--prompts", "b"], "can't be had with --prompts"),
        (["--answers", "/no/such/file"], "can't be read"),
        (["--answers", "{answers}"], "of which 64 would be held back"),
        (["--answers", "{answers}", "--held-back", "1", "--draft-vocab", "999"], "not between 0 and 320"),
        (["--answers", "{foreign}"], "tokens that the model lacks"),
        (["--answers", "{broken}"], "is not a prompt with its answer"),
    ],
)
def test_what_can_not_be_done_is_said(
    flags: list[str], says: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / name for name in ("answers", "foreign", "broken")}
    save_samples([Sample([3, 4], [5, 6, 7])] * 2, files["answers"])
    save_samples([Sample([3, 4], [5, 999])], files["foreign"])
    files["broken"].write_text('{"prompt_ids": [1]}\n')
    given = [flag.format(**files) for flag in flags]
    assert main(["train-draft", str(model), str(tmp_path / "out"), "--device", "cpu", *given]) == USAGE_ERROR
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train-draft", str(model), str(tmp_path)]) == USAGE_ERROR
    assert "is there already" in capsys.readouterr().err


def test_prompts_are_as_the_chat_template_has_them(model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(open_checkpoint(str(model)))
    prompts = Prompts(tokenizer, 0)
    encode, decode = tokenizer.encode, tokenizer.decode

    def ask(begins: Sequence[list[int]], temperatures: Sequence[float], most: int) -> list[list[int]]:
        """A user turn that ends by itself, one that is cut, and an empty one."""
        assert {decode(begin, skip_special_tokens=False) for begin in begins} == {"<s>user: "}
        assert temperatures == [1.0]
        end = [tokenizer.eos_id or 0]
        return [encode("why?", add_special_tokens=False) + end + [5, 5], encode("long"), end]

    found = prompts.of_model(3, ask)
    assert [decode(each, skip_special_tokens=False) for each in found] == [
        "<s>user: why?</s>bot:",
        "<s>user: long</s>bot:",
    ]
    file = tmp_path / "lines"
    file.write_text('plain text\n\n{"text": "named"}\n')
    assert [decode(each, skip_special_tokens=False) for each in prompts.of_file(file)] == [
        "<s>user: plain text</s>bot:", "<s>user: named</s>bot:",
    ]  # fmt: skip
    for bad in ("{not json", '{"other": 1}', '{"messages": []}'):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="line 1 is not a prompt"):
            prompts.of_file(file)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no text to ask about"):
        prompts.of_texts([tmp_path / "empty"], 3)


def test_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    samples = [Sample([1, 2], [3, 4]), Sample([5], [6, 7, 8])]
    save_samples([*samples, Sample([9], [9])], tmp_path / "kept")
    assert load_samples(tmp_path / "kept", 10) == samples  # of one token, nothing is to be learned
