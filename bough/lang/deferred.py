"""API speculation with chat models: one call generates a whole assistant message with fixed texts and blanks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bough.lang import ir
from bough.lang.backends.base import Backend
from bough.lang.errors import LangError
from bough.lang.memory import Memory
from bough.lang.sampling import SamplingParams
from bough.lang.speculation import Blank, match_format
from bough.lang.typed_output import parse_into

_ATTEMPTS = 3


@dataclass(slots=True)
class DeferredMessage:
    """Collects the message's parts; the model is expected to write the fixed texts itself."""

    num_spec_tokens: int
    items: list[ir.Gen | ir.Text] = field(default_factory=list)

    @property
    def gens(self) -> list[ir.Gen]:
        return [item for item in self.items if isinstance(item, ir.Gen)]

    async def run(self, memory: Memory, backend: Backend, params: Sequence[SamplingParams]) -> list[ir.Gen]:
        """Ask for the message, take it apart and set the variables; `params` belong to the gens, in order."""
        if not self.gens:
            for item in self.items:
                if isinstance(item, ir.Text):
                    memory.transcript.append(item.value)
            return []
        pattern = self._pattern(backend, params)
        num_tokens = max(sum(p.max_new_tokens for p in params), self.num_spec_tokens)
        call = replace(params[0], max_new_tokens=num_tokens, stop=())
        text = ""
        for _ in range(_ATTEMPTS):
            generation = await backend.async_generate(memory.transcript.snapshot(), call)
            text = str(generation.text)
            values = match_format(pattern, text)
            if values is not None:
                filled = iter(values)
                memory.transcript.append("".join(p if isinstance(p, str) else next(filled) for p in pattern))
                for gen, value in zip(self.gens, values, strict=True):
                    parsed = parse_into(gen.schema, value) if gen.schema is not None else value
                    memory.set_variable(gen.name, parsed, generation.meta_info)
                return self.gens
        raise LangError(
            what=f"the reply does not follow the message's format: {text!r}",
            why=f"with num_api_spec_tokens the API writes the whole message; none of {_ATTEMPTS} attempts matched",
            fix="show the format in the prompt, or write several assistant(...) messages",
        )

    def _pattern(self, backend: Backend, params: Sequence[SamplingParams]) -> list[str | Blank]:
        pattern: list[str | Blank] = []
        own_params = iter(params)
        for item in self.items:
            if isinstance(item, ir.Text):
                before = pattern.pop() if pattern and isinstance(pattern[-1], str) else ""
                pattern.append(f"{before}{item.value}")
                continue
            own = next(own_params)
            if own.constraint() is not None or own.n > 1:
                raise backend.unsupported(
                    f"{item.describe()} with {own.constraint() or 'n'} under num_api_spec_tokens",
                    "the whole message is one call to the API",
                )
            pattern.append(Blank(own.stop))
        return pattern
