"""Tokenizers that come without a tokenizer.json, against the libraries that their files were made for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import AutoTokenizer

from bough.core.errors import ConfigError
from bough.parsers.detect import detect_reasoning_parser, detect_tool_parser
from bough.tokenizer import load_tokenizer
from bough.tokenizer.chat_template import ChatTemplate
from bough.tokenizer.mistral_templates import MISTRAL_TEMPLATES, mistral_template

GOLDEN = Path(__file__).parents[2] / "golden"
RANKS: dict[str, Any] = json.loads((GOLDEN / "ranks.json").read_text())
CHATS: dict[str, Any] = json.loads((GOLDEN / "mistral_chats.json").read_text())
TEXTS: list[str] = RANKS["texts"]


def write_ranks(folder: Path, name: str, **settings: Any) -> None:
    lines = [f"{token} {rank}\n" for rank, token in enumerate(RANKS["ranks"])]
    (folder / name).write_text("".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_tekken(folder: Path, **config: Any) -> None:
    vocab = [{"rank": rank, "token_bytes": token} for rank, token in enumerate(RANKS["ranks"])]
    sizes = {"default_vocab_size": 1650, "default_num_special_tokens": 1000, "pattern": RANKS["tekken_pattern"]}
    (folder / "tekken.json").write_text(json.dumps({"config": {**sizes, **config}, "vocab": vocab}))


def test_kimi_reads_tiktokens_file_without_its_code(tmp_path: Path) -> None:
    write_ranks(
        tmp_path,
        "tiktoken.model",
        tokenizer_class="TikTokenTokenizer",
        auto_map={"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        bos_token="[BOS]",
        eos_token="[EOS]",
        added_tokens_decoder={
            "700": {"content": "[BOS]"},
            "701": {"content": "[EOS]"},
            "702": {"content": "<|im_end|>"},
        },
        chat_template="{{ messages[0].content }}<|im_end|>",
    )
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.encode(text) for text in TEXTS] == RANKS["kimi"]
    assert [tokenizer.decode(ids) for ids in RANKS["kimi"]] == TEXTS
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (700, 701, 956)
    assert tokenizer.encode("a<|im_end|>")[-1] == 702
    assert tokenizer.token_of(955) == "<|reserved_token_955|>"


def test_hunyuan_reads_its_own_file(tmp_path: Path) -> None:
    write_ranks(tmp_path, "hy.tiktoken", tokenizer_class="HYTokenizer", eos_token="<|eos|>")
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.encode(text) for text in TEXTS] == RANKS["hunyuan"]
    assert (tokenizer.id_of("<|endoftext|>"), tokenizer.eos_id, tokenizer.id_of("<|extra_204|>")) == (700, 703, 909)


def test_tekken_gives_ids_ends_and_the_chat_format_of_its_version(tmp_path: Path) -> None:
    write_tekken(tmp_path, version="v7")
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS] == RANKS["tekken"]
    assert [tokenizer.decode(ids) for ids in RANKS["tekken"]] == TEXTS
    assert tokenizer.encode("x")[0] == tokenizer.bos_id == 1
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.id_of("[INST]"), tokenizer.eos_ids) == (2, 11, 3, (2,))
    assert tokenizer.vocab_size == 1650, "no more than the file says"
    assert tokenizer.chat_template is not None
    chat = CHATS["conversations"]["called"]
    assert tokenizer.chat_template.render(chat["messages"], tools=chat["tools"]) == CHATS["texts"]["v7"]["called"]


@pytest.mark.parametrize("version", CHATS["texts"])
def test_chats_are_written_as_mistrals_library_writes_them(version: str) -> None:
    template = ChatTemplate({"default": mistral_template(version)}, {"bos_token": "<s>", "eos_token": "</s>"})
    for name, expected in CHATS["texts"][version].items():
        chat = CHATS["conversations"][name]
        assert template.render(chat["messages"], tools=chat.get("tools")) == expected, name


def test_chat_formats_lead_to_their_parsers() -> None:
    tools = {name: detect_tool_parser(text) for name, text in MISTRAL_TEMPLATES.items()}
    compact = "mistral-compact"
    assert tools == {
        "mistral-v3": "mistral", "mistral-v7": "mistral", "mistral-v11": compact, "mistral-v13": compact,
    }  # fmt: skip
    assert detect_reasoning_parser(MISTRAL_TEMPLATES["mistral-v13"]) == "mistral"
    assert mistral_template("v2") == mistral_template("v3") == mistral_template("strange")
    assert mistral_template("v7m1") == MISTRAL_TEMPLATES["mistral-v7"]
    assert mistral_template("v15") == MISTRAL_TEMPLATES["mistral-v13"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bpe.model as Llama's, plain.model as Gemma's, and unigram.model as T5's."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "corpus.txt").write_text("\n".join([*TEXTS[:10], *TEXTS[13:17]] * 3 + [__doc__ or ""] * 20))
    common: dict[str, Any] = {"input": str(folder / "corpus.txt"), "minloglevel": 2, "hard_vocab_limit": False}
    byte_pairs = {
        "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "vocab_size": 500, "user_defined_symbols": ["<tool>"],
    }  # fmt: skip
    train = sentencepiece.SentencePieceTrainer.train
    train(**common, **byte_pairs, model_prefix=str(folder / "bpe"))
    train(**common, **byte_pairs, add_dummy_prefix=False, model_prefix=str(folder / "plain"))
    train(**common, model_type="unigram", vocab_size=300, model_prefix=str(folder / "unigram"))
    return folder


@pytest.mark.parametrize(("kind", "settings"), [("bpe", {}), ("bpe", {"legacy": True}), ("plain", {}), ("unigram", {})])
def test_sentencepiece_models_alone(kind: str, settings: dict[str, Any], models: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((models / f"{kind}.model").read_bytes())
    if settings:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    library = sentencepiece.SentencePieceProcessor(str(models / f"{kind}.model"))
    tokenizer = load_tokenizer(tmp_path)
    # The library drops NUL and turns some spaces of unigram models into one. Transformers, which reads models that are
    # not "legacy" so, puts no space before a text that has one.
    texts = [text for text in TEXTS if "\x00" not in text and (kind != "unigram" or text == " ".join(text.split()))]
    texts = [text for text in texts if settings or text.strip(" ") == text]
    for text in texts:
        ids = library.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert library.unk_id() in ids or tokenizer.decode(ids) == library.decode(ids)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == (1, 2, 0)
    assert tokenizer.encode("x")[0] == (1 if kind != "unigram" else tokenizer.encode("x", add_special_tokens=False)[0])


def test_sentencepiece_models_of_classes_that_transformers_lacks(models: Path, tmp_path: Path) -> None:
    """InternLM 2's: added tokens stand where the model has pieces that nothing uses, or behind them."""
    (tmp_path / "tokenizer.model").write_bytes((models / "bpe.model").read_bytes())
    count = sentencepiece.SentencePieceProcessor(str(models / "bpe.model")).get_piece_size()
    added = {
        "499": {"content": "<|im_start|>", "special": True},
        str(count + 1): {"content": "<|late|>", "special": True},
    }
    settings = {
        "tokenizer_class": "InternLM2Tokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
        "added_tokens_decoder": added,
        "add_bos_token": False,
        "eos_token": "<|late|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("<|im_start|>user\nHi<tool><|late|>")
    assert (ids[0], ids[-2], ids[-1]) == (499, tokenizer.id_of("<tool>"), count + 1)
    assert tokenizer.eos_id == count + 1


def test_sentencepiece_models_of_llama_are_as_transformers_reads_them(models: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((models / "bpe.model").read_bytes())
    settings = {
        "tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True, "bos_token": "<s>",
        "eos_token": "</s>", "unk_token": "<unk>",
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    library = AutoTokenizer.from_pretrained(str(tmp_path))
    tokenizer = load_tokenizer(tmp_path)
    for text in (*TEXTS[:10], "a</s>b", "a </s> b", "</s>", "<tool> x <tool>"):
        assert tokenizer.encode(text) == library.encode(text), text


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="no tokenizer in"):
        load_tokenizer(tmp_path)
    write_ranks(tmp_path, "tiktoken.model", tokenizer_class="TikTokenTokenizer")
    (tmp_path / "tiktoken.model").write_text("not base64 at all! 0\n")
    with pytest.raises(ConfigError, match=r"tiktoken\.model can't be read"):
        load_tokenizer(tmp_path)
    (tmp_path / "tekken.json").write_text('{"config": {}}')
    with pytest.raises(ConfigError, match=r"tekken\.json can't be read; KeyError"):
        load_tokenizer(tmp_path)
