"""The intermediate representation: what a program appends to its state, as plain immutable values.

A program is a sequence of these expressions in the order Python ran its `+=`. The interpreter executes them against
a backend, the tracer records them; neither is known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from bough.lang.errors import LangError

if TYPE_CHECKING:
    from bough.lang.choices import ChoicesSamplingMethod


class Expr:
    """Anything a program can append to its state; `+` puts expressions and strings in a row."""

    __slots__ = ()

    def __add__(self, other: object) -> Sequential:
        return Sequential(parts(self) + parts(as_expr(other)))

    def __radd__(self, other: object) -> Sequential:
        return Sequential(parts(as_expr(other)) + parts(self))

    def describe(self) -> str:
        """A short name for traces and errors."""
        return type(self).__name__.lower()

    @property
    def defines(self) -> tuple[str, ...]:
        """The variables this expression sets."""
        return ()


@dataclass(frozen=True, slots=True)
class Text(Expr):
    value: str

    def describe(self) -> str:
        shown = self.value.replace(MARK_OPEN, "<").replace(MARK_CLOSE, ">")
        return f"text {shown!r}" if len(shown) <= 40 else f"text {shown[:37]!r}..."


@dataclass(frozen=True, slots=True)
class Sequential(Expr):
    """Several expressions in a row."""

    items: tuple[Expr, ...]

    @property
    def defines(self) -> tuple[str, ...]:
        return tuple(name for item in self.items for name in item.defines)


def _refuse_value(expr: Expr) -> NoReturn:
    """Raises if a program uses an expression as a condition: its value does not exist yet, and the branch taken would
    be wrong."""
    raise LangError(
        what=f"{expr.describe()} has no value to compare yet",
        why="it is what the model will be asked for; its value exists once it was appended to the state",
        fix=f"write `s += ...` first and read `s[{expr.defines[0] if expr.defines else 'name'!r}]`, which waits for it",
    )


@dataclass(frozen=True, slots=True)
class Gen(Expr):
    """Ask the model for text; `overrides` are the sampling parameters it names, `schema` the type to parse it into."""

    name: str | None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    schema: Any = None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str | int | float):
            _refuse_value(self)
        if not isinstance(other, Gen):
            return False
        return (self.name, self.overrides, self.schema) == (other.name, other.overrides, other.schema)

    def __bool__(self) -> bool:
        _refuse_value(self)

    def describe(self) -> str:
        return f"gen({self.name!r})" if self.name is not None else "gen()"

    @property
    def defines(self) -> tuple[str, ...]:
        return (self.name,) if self.name is not None else ()


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """Let the model choose one of `choices` by its own likelihoods."""

    name: str | None
    choices: tuple[str, ...]
    temperature: float
    method: ChoicesSamplingMethod

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str | int | float):
            _refuse_value(self)
        if not isinstance(other, Select):
            return False
        return (self.name, self.choices, self.temperature, self.method) == (
            other.name,
            other.choices,
            other.temperature,
            other.method,
        )

    def __bool__(self) -> bool:
        _refuse_value(self)

    def describe(self) -> str:
        return f"select({self.name!r})"

    @property
    def defines(self) -> tuple[str, ...]:
        return (self.name,) if self.name is not None else ()


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    role: str

    def describe(self) -> str:
        return f"{self.role}_begin()"


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    role: str

    def describe(self) -> str:
        return f"{self.role}_end()"


@dataclass(frozen=True, slots=True)
class Image(Expr):
    """An image: a path, a URL, a data URL, or the file's bytes."""

    source: str | bytes

    def describe(self) -> str:
        return f"image({self.source!r})" if isinstance(self.source, str) else f"image({len(self.source)} bytes)"


@dataclass(frozen=True, slots=True)
class Video(Expr):
    """A video, of which the server uses `num_frames` frames."""

    source: str | bytes
    num_frames: int

    def describe(self) -> str:
        return f"video({self.source!r})" if isinstance(self.source, str) else f"video({len(self.source)} bytes)"


@dataclass(frozen=True, slots=True)
class SeparateReasoning(Expr):
    """Run `inner`; of every text it generates, move the reasoning into `<name>_reasoning_content`."""

    inner: Expr
    model_type: str

    def describe(self) -> str:
        return f"separate_reasoning({self.model_type!r})"

    @property
    def defines(self) -> tuple[str, ...]:
        own = self.inner.defines
        return own + tuple(f"{name}_reasoning_content" for name in own)


@dataclass(frozen=True, slots=True)
class ScopeBegin(Expr):
    name: str

    def describe(self) -> str:
        return f"var_scope({self.name!r})"


@dataclass(frozen=True, slots=True)
class ScopeEnd(Expr):
    name: str

    def describe(self) -> str:
        return f"end of var_scope({self.name!r})"

    @property
    def defines(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True, slots=True)
class Fork(Expr):
    """Split the state into branches, named by number; the interpreter knows the branches themselves."""

    branches: tuple[int, ...]

    def describe(self) -> str:
        return f"fork({len(self.branches)})"


@dataclass(frozen=True, slots=True)
class Join(Expr):
    """Bring branches back: their new variables (`gather_variable`) or their text (`concate_and_append`)."""

    branches: tuple[int, ...]
    mode: str
    position_ids_offset: tuple[int, ...] | None = None
    """Position offset of each branch relative to the fork, for joins of the server's KV."""

    def describe(self) -> str:
        return f"join({self.mode!r})"


class StopTracing(BaseException):
    """A traced program needs a value that only a real run has. Not an Exception: programs must not swallow it."""


MARK_OPEN, MARK_CLOSE = "\ue0f0", "\ue0f1"


class Placeholder(Expr):
    """Stands in a trace for a value that is not known yet: an argument, or the result of a `gen`.

    It may be appended, added to strings, indexed and put into an f-string (where it leaves a mark that the tracer
    recognises); any other use ends the trace there.
    """

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("label",)

    def __init__(self, label: str) -> None:
        self.label = label

    def describe(self) -> str:
        return f"value of {self.label}"

    def __repr__(self) -> str:
        return f"<{self.label}>"

    def __str__(self) -> str:
        return f"{MARK_OPEN}{self.label}{MARK_CLOSE}"

    def __format__(self, spec: str) -> str:
        return str(self)

    def __getitem__(self, key: object) -> Placeholder:
        return Placeholder(f"{self.label}[{key!r}]")

    def _unknown(self, *_: object) -> NoReturn:
        raise StopTracing(self.label)

    def __getattr__(self, name: str) -> NoReturn:
        raise StopTracing(f"{self.label}.{name}")

    __bool__ = __len__ = __iter__ = __int__ = __float__ = __index__ = __contains__ = _unknown
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _unknown
    __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __truediv__ = __floordiv__ = __call__ = _unknown


def as_expr(value: object) -> Expr:
    """A string or an expression as an expression; anything else is refused with a hint."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, str):
        return Text(value)
    raise LangError(
        what=f"can't append a value of type {type(value).__name__}",
        why="a program's state holds text, generations, roles and media",
        fix="append str(value), or one of the functions gen, select, user, image, ...",
    )


def parts(expr: Expr) -> tuple[Expr, ...]:
    return expr.items if isinstance(expr, Sequential) else (expr,)


def flatten(exprs: Sequence[Expr]) -> Iterator[Expr]:
    """The expressions in order, with rows taken apart."""
    for expr in exprs:
        if isinstance(expr, Sequential):
            yield from flatten(expr.items)
        else:
            yield expr
