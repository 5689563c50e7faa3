from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer as Library, decoders, models, pre_tokenizers

from bough.config.default_model import default_model_path
from bough.config.hf import open_checkpoint
from bough.core.errors import ConfigError
from bough.tokenizer import Tokenizer, TokenizerPool, load_tokenizer
from bough.tokenizer.builtin_templates import BUILTIN_TEMPLATES
from bough.tokenizer.chat_template import ChatTemplate
from bough.tokenizer.tokenizer import SlowCodebook


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A byte-level tokenizer as a checkpoint has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    library.enable_truncation(5)
    library.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "added_tokens_decoder": {"258": {"content": "<late>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    return tmp_path


def test_a_directory_gives_ids_template_and_ends(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (256, 257, None)
    assert tokenizer.eos_ids == (257, 258)
    assert tokenizer.special_ids == {256, 257, 258}
    assert tokenizer.vocab_size == 259
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render([{"role": "user", "content": "x"}]) == "<s>x"
    text = "far beyond the five tokens that training cut texts to"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.id_of("<late>") == 258
    assert tokenizer.token_of(258) == "<late>"
    assert tokenizer.token_text(257) == "</s>"
    assert tokenizer.token_text(10**6) == ""


def test_slow_is_the_tokenizer_in_python(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    slow = load_tokenizer(tmp_path / "bytes", slow=True)
    assert isinstance(slow.codebook, SlowCodebook)
    assert slow.decode(slow.encode("é!", add_special_tokens=False)) == "é!"
    for none in (directory, default_model_path()):
        with pytest.raises(ConfigError, match="--tokenizer-mode slow"):
            load_tokenizer(none, slow=True)


def test_templates_come_from_the_newest_place(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("new")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    template = load_tokenizer(directory).chat_template
    assert template is not None
    assert template.render([]) == "new"
    assert template.render([], tools=[{}]) == "with tools"


def test_a_list_of_templates_is_taken_by_name(directory: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = load_tokenizer(directory).chat_template
    assert template is not None
    assert (template.render([]), template.render([], tools=[{}])) == ("plain", "tools")


def test_a_template_can_be_replaced_by_file_or_name(directory: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.jinja"
    mine.write_text("my {{ messages[0].content }}")
    by_file = load_tokenizer(directory, chat_template=str(mine)).chat_template
    by_name = load_tokenizer(directory, chat_template="chatml").chat_template
    assert by_file is not None
    assert by_name is not None
    assert by_file.render([{"role": "user", "content": "x"}]) == "my x"
    assert by_name.render([{"role": "user", "content": "x"}]).startswith("<|im_start|>user\nx<|im_end|>")
    with pytest.raises(ConfigError, match="no chat template") as caught:
        load_tokenizer(directory, chat_template="nonsense")
    assert "chatml" in caught.value.fix


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_built_in_templates_render_a_conversation(name: str) -> None:
    template = ChatTemplate(BUILTIN_TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    turns = [
        {"role": "system", "content": "SYS"},
        {"role": "user", "content": "ONE"},
        {"role": "assistant", "content": "TWO"},
        {"role": "user", "content": "THREE"},
    ]
    prompt = template.render(turns)
    words = ("ONE", "TWO", "SYS", "THREE") if name == "mistral-v3" else ("SYS", "ONE", "TWO", "THREE")
    places = [prompt.index(word) for word in words]
    assert places == sorted(places)
    assert prompt.startswith(template.render(turns, add_generation_prompt=False))


def test_a_checkpoint_brings_its_header(directory: Path) -> None:
    checkpoint = open_checkpoint("")
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.chat_template is not None


def test_missing_or_broken_tokenizers_say_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="can't be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_tokenizer(tmp_path)


def test_loading_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, time; from bough.tokenizer import load_tokenizer\n"
        "load_tokenizer(sys.argv[1]).token_bytes()\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(default_model_path())], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


async def test_the_pool_leaves_the_loop_free(smollm: Tokenizer) -> None:
    """While a long text is tokenised in a thread, the loop keeps turning."""
    pool = TokenizerPool(smollm)
    text = "many small words make a long text " * 30_000
    expected = smollm.encode(text)
    task, turns = asyncio.create_task(pool.encode(text)), 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert task.result() == expected
    assert turns >= 20
    assert await pool.encode_batch(["a", text, "b"]) == [smollm.encode("a"), expected, smollm.encode("b")]
    assert await pool.encode("short") == smollm.encode("short")
    pool.close()
