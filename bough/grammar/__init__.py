"""Constrained output: JSON schemas, regular expressions, grammars and structural tags become matchers that determine
the allowed next tokens.

in: a `GrammarSpec` and the tokenizer's table of bytes. out: `core.grammar.Matcher`s: masks, and tokens certain to come.
never: logits, the scheduler's state, or a source compiled in this process before a worker has tried it.
"""

from bough.grammar.backend import Settings
from bough.grammar.queue import Grammars
from bough.grammar.vocabulary import Vocabulary

__all__ = ["Grammars", "Settings", "Vocabulary"]
