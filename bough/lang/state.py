"""`s`: the state that a program writes and reads, and the group of states that a fork creates."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from bough.lang import ir
from bough.lang.errors import LangError, Origin
from bough.lang.memory import StateView

JOIN_MODES = ("gather_variable", "concate_and_append")


class StateEngine(Protocol):
    """The implementation of a state: an executor in a run, a recorder in a trace."""

    number: int

    def submit(self, expr: ir.Expr, origin: Origin) -> None: ...
    def fork(self, size: int, origin: Origin) -> Sequence[StateEngine]: ...
    def get(self, name: str) -> Any: ...
    async def async_get(self, name: str) -> Any: ...
    def set(self, name: str, value: Any) -> None: ...
    def has(self, name: str) -> bool: ...
    def get_meta_info(self, name: str) -> Any: ...
    def error(self) -> BaseException | None: ...
    def text(self) -> str: ...
    def messages(self) -> list[dict[str, Any]]: ...
    def wait_settled(self) -> None: ...
    async def async_wait_settled(self) -> None: ...
    def wait_longer(self, name: str | None, sent: int) -> StateView: ...
    async def async_wait_longer(self, name: str | None, sent: int) -> StateView: ...
    def raise_if_failed(self) -> None: ...
    def raise_if_unknown(self, name: str) -> None: ...


class ProgramState:
    """The state of one program, or of one branch of it.

    `s += expr` appends and returns immediately; reading a variable waits for its value. In `async def` programs, and in
    other code on an event loop, use `await s.aget(name)` and `await s` to wait.
    """

    def __init__(self, engine: StateEngine) -> None:
        self._engine = engine
        self.ret_value: Any = None
        """What the program's function returned."""

    def __iadd__(self, other: object) -> ProgramState:
        if other is None:
            raise LangError(
                what="can't append None", why="the expression on the right returned nothing", fix="append text or gen"
            )
        self._engine.submit(ir.as_expr(other), _caller())
        return self

    # -- variables

    def __getitem__(self, name: str) -> Any:
        return self._engine.get(name)

    def get_var(self, name: str) -> Any:
        """The value of a variable; waits for it."""
        return self._engine.get(name)

    async def aget(self, name: str) -> Any:
        """The value of a variable, awaited."""
        return await self._engine.async_get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._engine.set(name, value)

    def set_var(self, name: str, value: Any) -> None:
        self._engine.set(name, value)

    def __contains__(self, name: str) -> bool:
        return self._engine.has(name)

    def get_meta_info(self, name: str) -> Any:
        """The backend's meta information about a variable; `"join"`: how the last join was done."""
        return self._engine.get_meta_info(name)

    # -- the whole state

    def text(self) -> str:
        """All the text so far."""
        return self._engine.text()

    def messages(self) -> list[dict[str, Any]]:
        """The finished messages of the conversation."""
        return self._engine.messages()

    def sync(self) -> None:
        """Wait until everything appended has been executed."""
        self._engine.wait_settled()

    def __await__(self) -> Generator[Any, None, ProgramState]:
        yield from self._engine.async_wait_settled().__await__()
        self._engine.raise_if_failed()
        return self

    def error(self) -> BaseException | None:
        """The error of this state, or None."""
        return self._engine.error()

    # -- streaming

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Pieces of the text, or of one variable, as they are generated (in a run with stream=True)."""
        sent = 0
        while True:
            text, complete, _ = self._engine.wait_longer(var_name, sent)
            if len(text) > sent:
                yield text[sent:]
                sent = len(text)
            if complete:
                self._check_complete(var_name)
                return

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """The same, awaited; with `return_meta_data` pairs of (piece, meta information so far) of a variable."""
        if return_meta_data and var_name is None:
            raise LangError(
                what="return_meta_data without a variable", why="meta information is a variable's", fix="pass var_name="
            )
        sent = 0
        while True:
            text, complete, meta = await self._engine.async_wait_longer(var_name, sent)
            if len(text) > sent:
                piece = text[sent:]
                sent = len(text)
                yield (piece, meta) if return_meta_data else piece
            if complete:
                self._check_complete(var_name)
                return

    def _check_complete(self, var_name: str | None) -> None:
        self._engine.raise_if_failed()
        if var_name is not None:
            self._engine.raise_if_unknown(var_name)

    # -- roles and scopes

    def system(self, expr: object = None) -> Any:
        """`s.system("...")`, or `with s.system(): ...`."""
        return self._role("system", expr)

    def user(self, expr: object = None) -> Any:
        return self._role("user", expr)

    def assistant(self, expr: object = None) -> Any:
        return self._role("assistant", expr)

    def _role(self, role: str, expr: object) -> Any:
        if expr is None:
            return self._between(ir.RoleBegin(role), ir.RoleEnd(role))
        whole = ir.Sequential((ir.RoleBegin(role), ir.as_expr(expr), ir.RoleEnd(role)))
        self._engine.submit(whole, _caller())
        return whole

    def var_scope(self, name: str) -> Any:
        """`with s.var_scope("x"): ...` sets x to the text appended inside."""
        return self._between(ir.ScopeBegin(name), ir.ScopeEnd(name))

    @contextmanager
    def _between(self, begin: ir.Expr, end: ir.Expr) -> Iterator[None]:
        self._engine.submit(begin, _caller())
        yield
        self._engine.submit(end, _caller())

    # -- branching

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> ProgramStateGroup:
        """`size` branches that begin here, share the prefix in the server's cache, and run at the same time."""
        if size < 1:
            raise LangError(what=f"fork({size})", why="a fork makes at least one branch", fix="pass size=1 or more")
        if position_ids_offset is not None and len(position_ids_offset) != size:
            raise LangError(
                what=f"{len(position_ids_offset)} position_ids_offset for {size} branches",
                why="each branch has its own",
                fix=f"pass {size} numbers, or none",
            )
        branches = [ProgramState(engine) for engine in self._engine.fork(int(size), _caller())]
        return ProgramStateGroup(
            branches, self, tuple(position_ids_offset) if position_ids_offset is not None else None
        )

    @contextmanager
    def copy(self, position_ids_offset: Sequence[int] | None = None) -> Iterator[ProgramState]:
        """`with s.copy() as c: ...`: a branch of its own, whose variables come back as lists of one at the end."""
        group = self.fork(1, position_ids_offset)
        yield group[0]
        group.join()


class ProgramStateGroup:
    """The branches of a fork."""

    def __init__(
        self, states: list[ProgramState], src_state: ProgramState, position_ids_offset: tuple[int, ...] | None = None
    ) -> None:
        self.states = states
        self.src_state = src_state
        self._position_ids_offset = position_ids_offset

    def join(self, mode: str = "gather_variable") -> None:
        """Bring the branches back into the state they came from.

        `gather_variable`: each variable that is new in the branches becomes a list there. `concate_and_append`: the
        branches' texts follow one another; a server that can joins their KV without computing it again.
        """
        if mode not in JOIN_MODES:
            raise LangError(
                what=f"join has no mode {mode!r}",
                why="it gathers variables or texts",
                fix=f"use {' or '.join(JOIN_MODES)}",
            )
        numbers = tuple(state._engine.number for state in self.states)
        self.src_state._engine.submit(ir.Join(numbers, mode, self._position_ids_offset), _caller())

    def __iadd__(self, other: object) -> ProgramStateGroup:
        """Append to every branch: the same expression, one of a list each, or what `other(i)` returns."""
        origin = _caller()
        for state, expr in zip(self.states, self._spread(other), strict=True):
            state._engine.submit(ir.as_expr(expr), origin)
        return self

    def _spread(self, other: object) -> list[object]:
        if isinstance(other, ir.Expr | str):
            return [other] * len(self.states)
        if isinstance(other, list | tuple):
            if len(other) != len(self.states):
                raise LangError(
                    what=f"{len(other)} expressions for {len(self.states)} branches",
                    why="a list gives each branch its own",
                    fix=f"pass {len(self.states)} of them",
                )
            return list(other)
        if isinstance(other, Callable):  # type: ignore[arg-type]
            return [other(i) for i in range(len(self.states))]  # type: ignore[operator]
        return [other] * len(self.states)

    def __getitem__(self, index: int) -> ProgramState:
        return self.states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        """For `forks[i] += expr`; a branch can't be replaced by another state."""
        if self.states[index] is not state:
            raise LangError(what="can't put another state into a fork", why="branches are made by fork", fix="use +=")

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)


def _caller() -> Origin:
    """The nearest line outside the language itself: the program's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != "contextlib" and not module.startswith("bough.lang."):
            return Origin.of(frame)
        frame = frame.f_back
    return Origin.of(sys._getframe(1))
