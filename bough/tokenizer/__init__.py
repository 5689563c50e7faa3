"""Text to token ids and back, the vocabulary as bytes, and the model's chat template.

in: tokenizer.json, a GGUF file's metadata, or what transformers can read. out: `Tokenizer`, `ChatTemplate`,
`TokenizerPool`. never: torch, requests, or transformers if a tokenizer.json or GGUF metadata is enough.
"""

from bough.tokenizer.chat_template import ChatTemplate
from bough.tokenizer.load import load_tokenizer, tokenizer_of
from bough.tokenizer.pool import TokenizerPool
from bough.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Tokenizer", "TokenizerPool", "load_tokenizer", "tokenizer_of"]
