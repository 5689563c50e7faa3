"""Jinja for chat templates: sandboxed, with the functions that published templates expect, bounded in time and size."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bough.core.errors import InvalidRequest

RENDER_TIME_S: Final = 1.0
"""Seconds of the thread's CPU time, not of wall time: a busy machine must not make templates fail."""
_FREE_CHARS: Final = 1024 * 1024
_GROWTH: Final = 4
"""A prompt has at most this many times the characters that went in, plus the free ones."""
_OPERATIONS_BETWEEN_CHECKS: Final = 64


class TemplateRefused(Exception):
    """The template called `raise_exception`: it can't render these messages."""


class RenderBudget(threading.local):
    """Time and size left for the rendering that runs in this thread."""

    deadline_s: float = float("inf")
    max_chars: int = 0
    operations: int = 0

    def start(self, input_chars: int) -> None:
        self.max_chars = _FREE_CHARS + _GROWTH * input_chars
        self.operations = 0

    def spend(self) -> None:
        self.operations += 1
        if self.operations % _OPERATIONS_BETWEEN_CHECKS == 0:
            self.check_time()

    def check_time(self) -> None:
        """Time counts from the first check on: most templates are done before."""
        now_s = time.thread_time()
        if self.operations == _OPERATIONS_BETWEEN_CHECKS:
            self.deadline_s = now_s + RENDER_TIME_S
        elif now_s > self.deadline_s:
            raise InvalidRequest(
                what="the chat template takes too long on these messages",
                why=f"rendering was stopped after {RENDER_TIME_S:g} s",
                fix="send fewer or shorter messages",
                param="messages",
            )

    def check_size(self, num_chars: int) -> None:
        if num_chars > self.max_chars:
            raise InvalidRequest(
                what="the chat template makes too long a prompt of these messages",
                why=f"it has more than {self.max_chars} characters",
                fix="send fewer or shorter messages",
                param="messages",
            )


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Every attribute, item and call passes here, so that a loop that prints nothing is stopped, too."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock])
        self.budget = RenderBudget()
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["range"] = self._range

    def _range(self, *bounds: int) -> range:
        wanted = range(*bounds)
        if len(wanted) > 100_000:
            raise TemplateRefused("a range of more than 100000 numbers")
        return wanted

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.budget.spend()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.budget.spend()
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.budget.spend()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.spend()
        if operator == "*":
            sized, times = (left, right) if hasattr(left, "__len__") else (right, left)
            if hasattr(sized, "__len__") and isinstance(times, int):
                self.budget.check_size(len(sized) * times)
        elif abs(left) > 1_000_000 or abs(right) > 64:
            raise TemplateRefused("a power of large numbers")
        return super().call_binop(context, operator, left, right)


class GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the model wrote; for a prompt it is just its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(environment: TemplateEnvironment, source: str) -> jinja2.Template:
    """Compiles a template; raises `jinja2.TemplateError` if it is invalid."""
    template = environment.from_string(source)
    template.globals = dict(template.globals)  # no chain of mappings, which every rendering would walk along
    return template


def render_bounded(environment: TemplateEnvironment, template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Renders within the budget. Raises `InvalidRequest` beyond it, `TemplateRefused` and `jinja2.TemplateError`."""
    budget = environment.budget
    budget.start(count_chars(variables))
    pieces: list[str] = []
    num_chars = 0
    for piece in template.generate(variables):
        pieces.append(piece)
        num_chars += len(piece)
        budget.spend()
        budget.check_size(num_chars)
    return "".join(pieces)


def count_chars(value: Any) -> int:
    """Characters of text in nested lists and dicts."""
    total, open_values = 0, [value]
    while open_values:
        current = open_values.pop()
        if isinstance(current, str):
            total += len(current)
        elif isinstance(current, dict):
            open_values.extend(current)
            open_values.extend(current.values())
        elif isinstance(current, list | tuple):
            open_values.extend(current)
    return total


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates were trained with: plain characters, no HTML escapes, keys in their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefused(message)


_strftime_now: Callable[[str], str] = lambda form: datetime.now().strftime(form)
