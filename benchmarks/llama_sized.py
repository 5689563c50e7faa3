"""Makes a model directory of Llama 3.1 8B's size for measurements with random weights, out of nothing but the default model.

    python benchmarks/llama_sized.py build/llama-sized
    bough bench grammar build/llama-sized --load-format dummy --batch-size 64 --output-len 192

Its tokenizer is the default model's, filled up to 128,256 tokens with made-up words, so that masks have as many tokens to
judge as with the real one. `--tiny` shrinks everything but the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tokenizers import AddedToken

from bough.config.default_model import default_model_path
from bough.config.gguf_header import read_gguf_header
from bough.tokenizer.gguf import tokenizer_from_gguf

VOCAB_SIZE = 128_256
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "torch_dtype": "float32"}  # fmt: skip


def made_up_words(count: int, known: set[str]) -> list[str]:
    """Words of syllables, with a space before most, as vocabularies have them; none that is known."""
    dice = random.Random(0)
    syllables = [a + b + c for a in "bcdfghjklmnpqrstvwxz" for b in "aeiouy" for c in ("", "n", "r", "st", "q")]
    words: dict[str, None] = {}
    while len(words) < count:
        word = "".join(dice.choices(syllables, k=dice.choice((3, 3, 4, 5))))
        word = dice.choice(("", " ", " ")) + dice.choice((word, word.capitalize()))
        if word not in known:
            words[word] = None
    return list(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_from_gguf(read_gguf_header(Path(default_model_path())).metadata)
    missing = VOCAB_SIZE - tokenizer.get_vocab_size(with_added_tokens=True)
    words = made_up_words(missing, {tokenizer.id_to_token(i) for i in range(VOCAB_SIZE - missing)})
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in words])
    assert tokenizer.get_vocab_size(with_added_tokens=True) == VOCAB_SIZE
    tokenizer.save(str(options.folder / "tokenizer.json"))
    config = CONFIG | TINY if options.tiny else CONFIG
    (options.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.id_to_token(2)}
    (options.folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
