"""Tool formats whose calls are JSON objects between markers."""

from __future__ import annotations

from typing import ClassVar

from bough.parsers.header_calls import MISTRAL_HEADER, Headed, HeaderCalls
from bough.parsers.json_calls import CallKeys, JsonCalls
from bough.parsers.machine import Body, Status, ToolParser, new_short_id
from bough.parsers.scan import Cursor, IdFactory, Markers, markers_of

_LITTER = ("}", "]")  # one bracket too many behind the call is a common slip


class JsonToolParser(ToolParser):
    """`<opening marker> {...} or [{...}, ...] <closing marker>`."""

    keys: ClassVar[CallKeys] = CallKeys()
    opens_with: ClassVar[str] = "{["
    weak_closers: ClassVar[tuple[str, ...]] = _LITTER

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        if cursor.text[cursor.pos] in self.opens_with:
            return JsonCalls(self.calls, keys=self.keys)
        return None

    def open_bare(self, cursor: Cursor) -> Body | None:
        """Several objects may share one pair of markers."""
        return self.open_body("", cursor) if self._expected and cursor.text[cursor.pos] == "{" else None


class HermesParser(JsonToolParser):
    """Hermes, Qwen 2.5 and 3, and many others: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    starts = ("<tool_call>",)
    closers = ("</tool_call>",)


class Llama3Parser(JsonToolParser):
    """Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}` as the whole answer, calls separated by semicolons, optionally
    behind `<|python_tag|>`. Without the tag an object counts as a call only if it names an offered tool."""

    needs_special_tokens = True
    starts = ("<|python_tag|>",)
    separators = ";"
    weak_closers = ()
    keys = CallKeys(arguments=("parameters", "arguments"))
    bare_keys: ClassVar[CallKeys] = CallKeys(arguments=("parameters", "arguments"), arguments_required=True)

    def open_bare(self, cursor: Cursor) -> Body | None:
        if cursor.text[cursor.pos] != "{":
            return None
        return JsonCalls(
            self.calls, keys=self.bare_keys, accept=lambda name: not self.names or name.strip() in self.names
        )


class GraniteParser(JsonToolParser):
    """Granite: `<|tool_call|>[{...}, ...]` (3.x), `<tool_call>{...}</tool_call>` (4), `<function_call> {...}` (20b)."""

    needs_special_tokens = True
    starts = ("<|tool_call|>", "<tool_call>", "<function_call>")
    closers = ("</tool_call>",)


class CommandRParser(JsonToolParser):
    """Command R7B and A: `<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>`; Command R: the same list
    behind `Action:` in a fenced block."""

    needs_special_tokens = True
    starts = ("<|START_ACTION|>", "Action:")
    leads = ("```json",)
    closers = ("<|END_ACTION|>",)
    weak_closers = (*_LITTER, "```")
    keys = CallKeys(name=("tool_name", "name"), arguments=("parameters", "arguments"))


class Phi4Parser(JsonToolParser):
    """Phi-4-mini: `functools[{"name": ..., "arguments": {...}}]` or the same list in `<|tool_call|>...<|/tool_call|>`."""

    needs_special_tokens = True
    starts = ("functools", "<|tool_call|>")
    closers = ("<|/tool_call|>",)

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        opens_with = "[" if marker == "functools" else "[{"
        return JsonCalls(self.calls) if cursor.text[cursor.pos] in opens_with else None


class InternlmParser(JsonToolParser):
    """InternLM 2.5, 3 and Intern-S1: `<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>`."""

    needs_special_tokens = True
    starts = ("<|action_start|>",)
    leads = ("<|plugin|>",)
    closers = ("<|action_end|>",)
    keys = CallKeys(arguments=("parameters", "arguments"))

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        return super().open_body(marker, cursor) if marker != "<|action_start|>" else None


class ErnieParser(HermesParser):
    """ERNIE 4.5 thinking models: Hermes' objects, one per `<tool_call>`."""


class TrinityParser(HermesParser):
    """Trinity: Hermes' objects, which may stand inside a reasoning section; the section's marks are no content."""

    never_content = ("<think>", "</think>")


class GigaChat3Parser(JsonToolParser):
    """GigaChat 3: a message of the role `function call`, or `<|function_call|>`, and `{"name": ..., "arguments": {...}}`."""

    needs_special_tokens = True
    starts = ("<|function_call|>", "function call<|role_sep|>")
    never_content = ("<|message_sep|>",)


class ApertusParser(JsonToolParser):
    """Apertus: `<|tools_prefix|>[{"<tool's name>": {...}}, ...]<|tools_suffix|>`."""

    needs_special_tokens = True
    starts = ("<|tools_prefix|>",)
    closers = ("<|tools_suffix|>",)
    keys = CallKeys(is_name_the_key=True)
    opens_with = "["


class InklingParser(JsonToolParser):
    """Inkling: typed messages of special tokens. A call is
    `<|message_model|>name<|content_invoke_tool_json|>{"name": ..., "args": {...}}<|end_message|>`."""

    needs_special_tokens = True
    starts = ("<|message_model|>", "<|content_invoke_tool_json|>")
    closers = ("<|end_message|>",)
    never_content = (
        "<|message_model|>",
        "<|content_invoke_tool_json|>",
        "<|content_text|>",
        "<|end_message|>",
        "<|content_model_end_sampling|>",
    )
    keys = CallKeys(arguments=("args", "arguments"))

    def extra_markers(self) -> tuple[str, ...]:
        return self.never_content

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        if marker == "<|message_model|>":
            return Headed(self._ends_of_headers, self._open_message)
        return super().open_body(marker, cursor)

    _ends_of_headers: ClassVar[Markers] = markers_of(
        "<|content_invoke_tool_json|>", "<|content_text|>", "<|content_thinking|>", "<|end_message|>"
    )

    def _open_message(self, header: str, end: str) -> Body | Status:
        """Of other messages, thoughts are left as they came, for a reasoning parser; the rest lose their headers."""
        if end == "<|content_invoke_tool_json|>":
            return JsonCalls(self.calls, keys=self.keys)
        return Status.BROKEN if end == "<|content_thinking|>" else Status.DONE


class MistralParser(JsonToolParser):
    """Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]` up to tokenizer 7, `[TOOL_CALLS]name[ARGS]{...}` (with
    `[CALL_ID]id` between, in 11) since. Ids are nine alphanumeric characters, as its templates demand."""

    needs_special_tokens = True
    starts = ("[TOOL_CALLS]",)
    keys = CallKeys(id=("id",))
    weak_closers = ()
    new_id_default: ClassVar[IdFactory] = staticmethod(new_short_id)

    def extra_markers(self) -> tuple[str, ...]:
        return ("[CALL_ID]", "[ARGS]")

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        if cursor.text[cursor.pos] in "[{":
            return JsonCalls(self.calls, keys=self.keys)
        return HeaderCalls(self.calls, MISTRAL_HEADER)

    def open_bare(self, cursor: Cursor) -> Body | None:
        return None
