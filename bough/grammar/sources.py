"""Sources of every kind but tags as grammar trees, ready for any notation."""

from __future__ import annotations

import json

from bough.core.sampling import GrammarKind
from bough.grammar.errors import BadGrammar
from bough.grammar.keywords import MAX_BYTES, JsonSchema, load
from bough.grammar.lark import read_grammar
from bough.grammar.regex import parse_regex
from bough.grammar.rules import Chars, Grammar, LiteralText, alt, num_states, prune, text, walk
from bough.grammar.schema import any_object, schema_grammar

MAX_STATES = 200_000


def grammar_of(kind: GrammarKind, source: str, max_whitespace: int) -> Grammar:
    """The grammar of a schema, a pattern, a choice, EBNF or Lark. Raises `BadGrammar`."""
    grammar = _grammar(kind, source, max_whitespace)
    if not any(isinstance(node, LiteralText | Chars) for rule in grammar.rules.values() for node in walk(rule)):
        raise BadGrammar("only the empty text fits it, and an answer has at least one token")
    return grammar


def _grammar(kind: GrammarKind, source: str, max_whitespace: int) -> Grammar:
    match kind:
        case "json_schema":
            return of_schema(load(source), max_whitespace)
        case "json":
            return finished(any_object(max_whitespace=max_whitespace))
        case "regex":
            return of_pattern(source)
        case "choice":
            return finished(Grammar({"root": alt(*(text(each) for each in json.loads(source)))}))
        case "ebnf":
            return of_ebnf(source)
        case _:
            raise AssertionError(f"{kind} has a notation of its own")


def of_schema(schema: JsonSchema, max_whitespace: int) -> Grammar:
    return finished(schema_grammar(schema, max_whitespace=max_whitespace))


def of_pattern(pattern: str) -> Grammar:
    if len(pattern.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise BadGrammar(f"the pattern is larger than {MAX_BYTES} bytes")
    return finished(Grammar({"root": parse_regex(pattern)}))


def of_ebnf(source: str) -> Grammar:
    """A grammar in EBNF or in Lark's notation."""
    if len(source.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise BadGrammar(f"the grammar is larger than {MAX_BYTES} bytes")
    return finished(read_grammar(source))


def finished(grammar: Grammar) -> Grammar:
    """Removes branches that can't end, and raises `BadGrammar` for grammars that are too large."""
    pruned = prune(grammar)
    if pruned is None:
        raise BadGrammar("no finite answer fits it")
    states = num_states(pruned)
    if states > MAX_STATES:
        raise BadGrammar(
            f"the grammar has {states} states with its repetitions written out, at most {MAX_STATES} are taken"
        )
    return pruned
