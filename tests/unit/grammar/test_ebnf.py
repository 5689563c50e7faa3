"""EBNF as clients write it, followed by both backends."""

from __future__ import annotations

from typing import Any

import pytest

from bough.grammar.ebnf import parse_ebnf
from bough.grammar.errors import BadGrammar
from bough.grammar.sources import grammar_of

ARITHMETIC = """
# sums of products
root   ::= term (" + " term)*   # comments may stand anywhere
term   ::= factor ("*" factor)*
factor ::= [0-9]{1,3} | "(" root ")" | 'x' | "\\u00e9\\n"
"""
LIST = """root ::= item+
item ::= "- " [^\\r\\n]+ "\\n"
"""


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        (ARITHMETIC, ["1", "1 + 2*x", "(1 + (22))*333", "é\n"], ["1+2", "1234", "(1", ""]),
        (LIST, ["- a\n", "- a b\n- ü\n"], ["- \n", "a\n"]),
        ('root ::= "a" | b\nb ::= "b"?', ["a", "b", ""], ["ab"]),
        ('root ::= ("ab"){2} "c"{0,2} .', ["ababx", "ababcc!"], ["abx", "ababccc!"]),
        ('root ::= [a-c\\]\\-]+ ', ["a]-"], ["d"]),
        ('my-rule ::= "x"\nroot ::= my-rule', ["x"], ["y"]),
    ],
)  # fmt: skip
def test_texts_in_and_out(source: str, good: list[str], bad: list[str], fits: Any) -> None:
    for text in good:
        assert fits("ebnf", source, text), text
    for text in bad:
        assert not fits("ebnf", source, text), text


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("", "no rule called root"),
        ('a ::= "x"', "no rule called root"),
        ("root ::= missing", "'missing' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "defined twice (line 2)" ),
        ('root ::= "a', "not closed"),
        ("root ::= [a", "not closed"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a"{5,2}', "upper bound"),
        ('root ::= "a"{x}', "{m,n}"),
        ('root = "a"', "begins with"),
        ('root ::= "a" %', "not expected"),
        ('root ::= (="a")', "look-ahead"),
        ('root ::= "\\q"', "escape"),
        ("root ::= " + "(" * 80 + '"a"' + ")" * 80, "nested"),
    ],
)  # fmt: skip
def test_mistakes_are_named(source: str, what: str) -> None:
    with pytest.raises(BadGrammar) as error:
        parse_ebnf(source)
    assert what in str(error.value)


@pytest.mark.parametrize(
    ("kind", "source"),
    [("ebnf", "root ::= "), ("ebnf", 'root ::= ""'), ("ebnf", 'root ::= a*\na ::= ""\nb ::= "x"'),
     ("regex", "()"), ("regex", "^$"), ("regex", "(|)*"), ("regex", "a{0}")],
)  # fmt: skip
def test_grammars_of_nothing_but_the_empty_text(kind: Any, source: str) -> None:
    with pytest.raises(BadGrammar, match="only the empty text"):
        grammar_of(kind, source, 8)
    assert grammar_of("regex", "a?", 8).rules


@pytest.mark.parametrize("source", ['root ::= a\na ::= "x" a', "root ::= root", 'root ::= a b\na ::= "x"\nb ::= "y" b'])
def test_grammars_without_an_end(source: str) -> None:
    with pytest.raises(BadGrammar, match="no finite answer"):
        grammar_of("ebnf", source, 8)
