"""Grammars in Lark's notation: followed by both backends, and compared with llguidance's own reading of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bough.grammar.errors import BadGrammar
from bough.grammar.lark import COMMON, is_lark, parse_lark
from bough.grammar.sources import grammar_of

ARITHMETIC = """
// sums of products
?start: sum
?sum: product | sum "+" product -> add   // an alias
?product: atom
    | product "*" atom
!atom.2: NUMBER | "(" sum ")" | VARIABLE
VARIABLE: "x".."z"
%import common.NUMBER
"""
SPACED = """
start: "let" NAME "=" value ";"
value: NAME | STRING | "[" [value ("," value)*] "]"
NAME: /[a-z_]\\w*/i
STRING: "'" /[^'\\n]*/ "'"
%import common.WS
%import common.SH_COMMENT -> COMMENT
%ignore WS
%ignore COMMENT
"""
PATCH = """
start: "*** Begin" LF hunk+ "*** End" LF?
hunk: "*** Add: " /(.+)/ LF ("+" /(.*)/ LF)+ | "*** Delete: " /(.+)/ LF
%import common (LF, WS)
"""
COUNTS = """
start: "a"~2 "b"~1..3 C{2} D? ["e" | /f{2}/]
C: "c"i
D: "d" | "\\u00e9" | "\\x41"
"""
CASES = [
    (ARITHMETIC, ["1", "1+2*x", "(1+(2.5e3))*y", ".5"], ["1 + 2", "a", "(1", "", "x+"]),
    (
        SPACED,
        ["let x = 1_;".replace("1_", "y"), "let  A_1=['b',c , [ ] ] ;", "let a # note\n = 'x';", "let\ta='';"],
        ["let = x;", "let a = 'x'", "let 1 = 'x';", "let a = [,];"],
    ),
    (
        PATCH,
        ["*** Begin\n*** Delete: a b\n*** End", "*** Begin\n*** Add: x\n+\n+y z\n*** Delete: ü\n*** End\n"],
        ["*** Begin\n*** End", "*** Begin\n*** Add: x\n*** End", "*** Begin *** Delete: a\n*** End"],
    ),
    (COUNTS, ["aabcC", "aabbbccdff", "aabCcAe", "aabccé"], ["abcc", "aabbbbcc", "aabc", "aabccf", "aabccde."]),
    ('start: /a.b/s "x"i', ["a\nbX", "acbx"], ["abx", "a\nby"]),
]


@pytest.mark.parametrize(("source", "good", "bad"), CASES)
def test_texts_in_and_out(source: str, good: list[str], bad: list[str], fits: Any) -> None:
    assert is_lark(source)
    for text in good:
        assert fits("ebnf", source, text), text
    for text in bad:
        assert not fits("ebnf", source, text), text


@pytest.mark.parametrize(("source", "good", "bad"), [CASES[0], CASES[1], CASES[2]])
def test_llguidance_reads_the_same(source: str, good: list[str], bad: list[str], vocabulary: Any) -> None:
    """Its own reader of Lark, whose lexer prefers longer terminals, says the same of these texts."""
    guidance = pytest.importorskip("llguidance")
    from bough.grammar.llguidance_backend import LlguidanceBackend

    tokenizer = LlguidanceBackend(vocabulary.tokens, 8)._make_tokenizer(())
    source = source.replace("atom.2", "atom")  # it knows no priorities of rules
    for text in (*good, *bad):
        native = guidance.LLMatcher(tokenizer, guidance.LLMatcher.grammar_from_lark(source), log_level=0)
        assert not native.is_error(), native.get_error()
        tokens = tokenizer.tokenize_str(text)
        taken = native.try_consume_tokens(tokens) == len(tokens) and native.is_accepting()
        assert taken == (text in good), text


@pytest.mark.parametrize("name", sorted(COMMON))
def test_common_terminals(name: str) -> None:
    assert grammar_of("ebnf", f"start: {name}\n%import common.{name}\n", 8).rules


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ('a: "x"', "no rule called start"),
        ("start: missing", "'missing' is not defined"),
        ('start: "a"\nstart: "b"', "defined twice (line 2)"),
        ('start: "a', "not closed"),
        ("start: /a", "not closed"),
        ('start: ("a"', "not closed"),
        ('start: "a"~5..2', "upper bound"),
        ('start: "a"~99999', "too large"),
        ('start: "a" &', "not expected"),
        ("start: A\nA: A B\nB: /b/", "'A' leads back to itself"),
        ('start: A\nA: b\nb: "x"', "has the rule 'b' in it"),
        ('_sep{x}: x\nstart: "a"', "templates"),
        ('start: _sep{"a", ","}', "templates"),
        ("start: A\n%import python.NAME -> A", "only `common`"),
        ("start: A\n%import common.NOPE -> A", "no terminal 'NOPE'"),
        ("start: A\n%declare A", "%declare is not supported"),
        ('start: /(?=a)b/', "look-ahead"),
        ('start: /a b/x', "flags"),
        ("start: " + "(" * 80 + '"a"' + ")" * 80, "nested"),
        ('start[capture]: "a"', "attributes"),
    ],
)  # fmt: skip
def test_mistakes_are_named(source: str, what: str) -> None:
    with pytest.raises(BadGrammar) as error:
        parse_lark(source)
    assert what in str(error.value)


def test_bombs_are_refused() -> None:
    terminals = "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40))
    with pytest.raises(BadGrammar, match="states"):
        grammar_of("ebnf", 'start: ("a"~60000)~60000', 8)
    assert grammar_of("ebnf", f'start: T0\n{terminals}\nT40: "a"', 8).rules, "references are followed, not written out"


def test_a_text_of_a_schema_in_a_grammar_of_its_own(fits: Any) -> None:
    """As a JSON string writes it: with its quotes and line breaks escaped."""
    language = 'start: line+\nline: WORD ["=" QUOTED] LF\nQUOTED: "\\"" /[a-z]*/ "\\""\n%import common (WORD, LF)'
    schema = {
        "type": "object",
        "properties": {"input": {"type": "string", "x-grammar": language}},
        "required": ["input"],
    }
    source = json.dumps(schema)
    for text in ("ab\n", 'a="x"\nb=""\n'):
        assert fits("json_schema", source, json.dumps({"input": text})), text
    for text in ("ab", "a=x\n", ""):
        assert not fits("json_schema", source, json.dumps({"input": text})), text
    with pytest.raises(BadGrammar, match=r"/properties/input/x-grammar.*not defined"):
        grammar_of("json_schema", source.replace("LF)", "WS)"), 8)
    schema["properties"]["input"]["maxLength"] = 5
    with pytest.raises(BadGrammar, match="beside x-grammar"):
        grammar_of("json_schema", json.dumps(schema), 8)


@pytest.mark.parametrize(
    ("source", "expected"),
    [('root ::= "a"', False), ('# c\nroot ::= "a:"', False), ('start: "a"', True), ('// c\n?start : "::="', True),
     ("%import common.INT\nstart: INT", True), ("", False), ("start.3:", True)],
)  # fmt: skip
def test_which_notation_it_is(source: str, expected: bool) -> None:
    assert is_lark(source) is expected
