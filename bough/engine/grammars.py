"""The engine's queue of grammars, made from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.config.concerns import Config
from bough.config.hf import Checkpoint

if TYPE_CHECKING:
    from bough.grammar import Grammars, Vocabulary


def grammars_of(config: Config, checkpoint: Checkpoint, vocab_size: int) -> Grammars | None:
    """None: constrained output is switched off. The tokenizer is loaded when the first grammar is asked for."""
    if config.server.grammar_backend == "none" or config.model.skip_tokenizer_init:
        return None
    from bough.grammar import Grammars, Settings, Vocabulary
    from bough.tokenizer import tokenizer_of

    def load() -> Vocabulary:
        tokenizer = tokenizer_of(config.model, checkpoint)
        assert tokenizer is not None, "asked for above"
        return Vocabulary(tokenizer, vocab_size, checkpoint.eos_ids)

    server = config.server
    return Grammars(Settings(backend=server.grammar_backend, max_whitespace=server.json_max_whitespace), load)
