"""Runs a program without a model to find what it appends: its graph, and its constant prefix."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bough.lang import ir
from bough.lang.chat_template import ChatTemplate, get_chat_template
from bough.lang.errors import Origin
from bough.lang.memory import StateView
from bough.lang.state import ProgramState
from bough.lang.transcript import Transcript


@dataclass(frozen=True, slots=True)
class TraceNode:
    """One expression in its place: which state appended it, after which node."""

    number: int
    state: int
    expr: ir.Expr
    previous: int | None
    origin: Origin

    def __str__(self) -> str:
        after = f" after %{self.previous}" if self.previous is not None else ""
        return f"%{self.number} [state {self.state}] {self.expr.describe()}{after}"


@dataclass(slots=True)
class ProgramTrace:
    """What a traced program appended. `prefix` is the text with which it begins for all arguments."""

    nodes: list[TraceNode] = field(default_factory=list)
    prefix: str = ""
    stopped_at: str | None = None
    """The value that ended the trace before the program did; None for a complete trace."""

    @property
    def last_node(self) -> TraceNode | None:
        return self.nodes[-1] if self.nodes else None

    @property
    def variables(self) -> list[str]:
        """The variables the program sets, in order."""
        return list(dict.fromkeys(name for node in self.nodes for name in node.expr.defines))

    def __str__(self) -> str:
        lines = [str(node) for node in self.nodes]
        if self.stopped_at is not None:
            lines.append(f"... the trace ends where the program needs {self.stopped_at}")
        return "\n".join(lines)

    def print_graph_dfs(self) -> str:
        """The graph as text."""
        return str(self)


class _Recorder:
    """The implementation of a traced state: records what is appended, and returns placeholders for reads."""

    def __init__(self, tracing: _Tracing, number: int, previous: int | None) -> None:
        self.number = number
        self._tracing = tracing
        self._previous = previous
        self._values: dict[str, Any] = {}
        self._transcript = Transcript()
        self._constant = True

    def submit(self, expr: ir.Expr, origin: Origin) -> None:
        for item in ir.flatten((expr,)):
            self._extend_prefix(item)
            self._previous = self._tracing.add(self.number, item, self._previous, origin)
            for name in item.defines:
                self._values[name] = ir.Placeholder(name)

    def _extend_prefix(self, expr: ir.Expr) -> None:
        """Follow the text while it is constant; on the root state it is the program's prefix."""
        if not self._constant:
            return
        match expr:
            case ir.Text(value):
                known, mark, _ = value.partition(ir.MARK_OPEN)
                self._transcript.append(known)
                self._constant = not mark
            case ir.RoleBegin(role):
                self._transcript.begin_role(role, self._tracing.template())
            case ir.RoleEnd(role):
                self._transcript.end_role(role, self._tracing.template())
            case ir.ScopeBegin() | ir.ScopeEnd():
                pass
            case _:
                self._constant = False
        if self.number == 0:
            self._tracing.trace.prefix = self._transcript.text
            if not self._constant and self._tracing.only_prefix:
                raise ir.StopTracing(expr.describe())

    def fork(self, size: int, origin: Origin) -> list[_Recorder]:
        numbers = self._tracing.new_states(size)
        self.submit(ir.Fork(numbers), origin)
        branches = [_Recorder(self._tracing, number, self._previous) for number in numbers]
        for branch in branches:
            branch._values = dict(self._values)
            branch._constant = False
        return branches

    def get(self, name: str) -> Any:
        return self._values[name] if name in self._values else ir.Placeholder(name)

    async def async_get(self, name: str) -> Any:
        return self.get(name)

    def set(self, name: str, value: Any) -> None:
        self._values[name] = value

    def has(self, name: str) -> bool:
        return name in self._values

    def text(self) -> str:
        if not self._constant:
            raise ir.StopTracing("the state's text")
        return self._transcript.text

    def messages(self) -> list[dict[str, Any]]:
        if not self._constant:
            raise ir.StopTracing("the state's messages")
        return list(self._transcript.messages)

    def error(self) -> BaseException | None:
        return None

    def wait_settled(self) -> None:
        return

    async def async_wait_settled(self) -> None:
        return

    def get_meta_info(self, name: str) -> Any:
        return ir.Placeholder(f"meta information of {name}")

    def wait_longer(self, name: str | None, sent: int) -> StateView:
        raise ir.StopTracing("generated text")

    async def async_wait_longer(self, name: str | None, sent: int) -> StateView:
        raise ir.StopTracing("generated text")

    def raise_if_failed(self) -> None:
        return

    def raise_if_unknown(self, name: str) -> None:
        return


class _Tracing:
    def __init__(self, template: Callable[[], ChatTemplate], only_prefix: bool) -> None:
        self.trace = ProgramTrace()
        self.template = template
        self.only_prefix = only_prefix
        self._num_states = 1

    def add(self, state: int, expr: ir.Expr, previous: int | None, origin: Origin) -> int:
        number = len(self.trace.nodes)
        self.trace.nodes.append(TraceNode(number, state, expr, previous, origin))
        return number

    def new_states(self, size: int) -> tuple[int, ...]:
        first = self._num_states
        self._num_states += size
        return tuple(range(first, first + size))


def trace_program(
    func: Callable[..., Any],
    known: Mapping[str, Any],
    template: Callable[[], ChatTemplate] | None = None,
    *,
    only_prefix: bool = False,
) -> ProgramTrace:
    """Trace `func`; arguments that are not `known` (and have no default) are placeholders.

    `only_prefix` ends the trace at the first thing that is not constant text, so that little of the program runs. A
    program that raises ends its trace there: what it did before still holds.
    """
    tracing = _Tracing(template or (lambda: get_chat_template("default")), only_prefix)
    arguments: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(func).parameters.items())[1:]:
        if name in known:
            arguments[name] = known[name]
        elif parameter.default is inspect.Parameter.empty:
            arguments[name] = ir.Placeholder(name)
    state = ProgramState(_Recorder(tracing, 0, None))
    try:
        result = func(state, **arguments)
        if inspect.iscoroutine(result):
            _step_through(result)
    except ir.StopTracing as stop:
        tracing.trace.stopped_at = str(stop)
    except Exception as error:
        tracing.trace.stopped_at = f"a real run: {type(error).__name__}: {error}"
    return tracing.trace


def _step_through(program: Any) -> None:
    """Run an `async def` program as far as it goes without an event loop: reads of a traced state never suspend."""
    try:
        program.send(None)
    except StopIteration:
        return
    finally:
        program.close()
    raise ir.StopTracing("something it awaits")


def common_prefix(
    func: Callable[..., Any], members: Sequence[Mapping[str, Any]], template: Callable[[], ChatTemplate]
) -> str:
    """The text that all members of a batch begin with: constant text, and arguments that are the same for all."""
    first, others = members[0], members[1:]
    shared = {name: value for name, value in first.items() if all(name in o and _same(o[name], value) for o in others)}
    defaults_overridden = {name for member in members for name in member} - set(shared)
    unknown = {name: ir.Placeholder(name) for name in defaults_overridden}
    return trace_program(func, {**shared, **unknown}, template, only_prefix=True).prefix


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:
        return False
