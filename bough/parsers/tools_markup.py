"""Tool formats whose calls are markup around each argument."""

from __future__ import annotations

import msgspec

from bough.parsers.header_calls import Headed
from bough.parsers.json_calls import JsonCalls
from bough.parsers.machine import Body, Status
from bough.parsers.scan import Cursor, markers_of
from bough.parsers.xml_calls import Markup, MarkupCalls, MarkupToolParser, may_be


class Qwen3CoderParser(MarkupToolParser):
    """Qwen3-Coder, Qwen 3.5, Nemotron 3: `<function=name><parameter=key>value</parameter></function>` in `<tool_call>` tags.
    These may be missing; Hermes' JSON between them is understood too."""

    starts = ("<tool_call>", "<function=")
    closers = ("</tool_call>",)
    markup = Markup(
        call_open="<function=",
        name_ends=(">",),
        param_open="<parameter=",
        key_end=">",
        value_ends=("\n</parameter>", "</parameter>"),
        value_ends_before=("\n<parameter=", "\n</function>"),
        call_close="</function>",
        call_closes_before=("</tool_call>",),
        trim_line_break=True,
    )

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        if marker == "<function=":
            return MarkupCalls(self.calls, _WITHOUT_OPEN, self.types)
        if cursor.text[cursor.pos] == "{":
            return JsonCalls(self.calls)
        return super().open_body(marker, cursor)

    def open_bare(self, cursor: Cursor) -> Body | None:
        return None


_WITHOUT_OPEN = msgspec.structs.replace(Qwen3CoderParser.markup, call_open="")


class MimoParser(MarkupToolParser):
    """MiMo: Qwen3-Coder's tags, but values stand directly between theirs and are escaped as in XML."""

    starts = ("<tool_call>",)
    closers = ("</tool_call>",)
    markup = Markup(
        call_open="<function=",
        name_ends=(">",),
        param_open="<parameter=",
        key_end=">",
        value_ends=("</parameter>",),
        call_close="</function>",
        call_closes_before=("</tool_call>",),
        escaped_values=True,
    )

    def open_bare(self, cursor: Cursor) -> Body | None:
        return None


class MinimaxM2Parser(MarkupToolParser):
    """MiniMax M2: `<minimax:tool_call><invoke name="..."><parameter name="key">value</parameter></invoke>...`."""

    needs_special_tokens = True
    starts = ("<minimax:tool_call>",)
    closers = ("</minimax:tool_call>",)
    markup = Markup(
        call_open='<invoke name="',
        name_ends=(">",),
        param_open='<parameter name="',
        key_end=">",
        value_ends=("</parameter>",),
        call_close="</invoke>",
        attributes=True,
    )


class DotsParser(MarkupToolParser):
    """dots: `<dots_function_call><invoke name="..."><parameter name="key">value</parameter></invoke>...`; an object with
    `name` and `arguments` between the outer tags is understood too."""

    starts = ("<dots_function_call>",)
    closers = ("</dots_function_call>",)
    markup = msgspec.structs.replace(MinimaxM2Parser.markup, strip_values=True)

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        if cursor.text[cursor.pos] == "{":
            return JsonCalls(self.calls)
        return super().open_body(marker, cursor)


class Minicpm5Parser(MarkupToolParser):
    """MiniCPM 5: `<function name="..."><param name="key">value</param></function>`, in XML's rules: values are escaped or
    stand in CDATA sections."""

    starts = ('<function name="',)
    markup = Markup(
        call_open="",
        name_ends=(">",),
        param_open='<param name="',
        key_end=">",
        value_ends=("</param>",),
        call_close="</function>",
        attributes=True,
        strip_values=True,
        escaped_attributes=True,
        escaped_values=True,
        cdata=True,
    )


class Step3Parser(MarkupToolParser):
    """Step3: `<steptml:invoke name="..."><steptml:parameter name="key">value</steptml:parameter></steptml:invoke>`, each
    call between its own tokens, all of them in a section."""

    needs_special_tokens = True
    starts = ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<steptml:invoke ")
    leads = ("<｜tool_call_begin｜>", "function<｜tool_sep｜>", "<steptml:invoke ")
    closers = ("<｜tool_call_end｜>", "<｜tool_calls_end｜>")
    markup = Markup(
        call_open='name="',
        name_ends=(">",),
        param_open='<steptml:parameter name="',
        key_end=">",
        value_ends=("</steptml:parameter>",),
        call_close="</steptml:invoke>",
        call_closes_before=("<｜tool_call_end｜>",),
        attributes=True,
    )

    def extra_markers(self) -> tuple[str, ...]:
        return (*super().extra_markers(), "<｜tool_sep｜>")

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        return super().open_body(marker, cursor) if marker == "<steptml:invoke " else None

    def open_bare(self, cursor: Cursor) -> Body | None:
        return None


class DeepseekV32Parser(MarkupToolParser):
    """DeepSeek V3.2 (and V4, whose section is called `tool_calls`): DSML, whose parameters say whether they are strings."""

    needs_special_tokens = True
    starts = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    closers = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")
    markup = Markup(
        call_open='<｜DSML｜invoke name="',
        name_ends=(">",),
        param_open='<｜DSML｜parameter name="',
        key_end=">",
        value_ends=("</｜DSML｜parameter>",),
        call_close="</｜DSML｜invoke>",
        attributes=True,
    )

    def extra_markers(self) -> tuple[str, ...]:
        return (*super().extra_markers(), "｜DSML｜")


class GigaChat35Parser(MarkupToolParser):
    """GigaChat 3.5: GCML, DeepSeek's elements under another mark."""

    needs_special_tokens = True
    starts = ("<｜GCML｜tool_calls>",)
    closers = ("</｜GCML｜tool_calls>",)
    never_content = ("<|message_sep|>",)
    markup = Markup(
        call_open='<｜GCML｜invoke name="',
        name_ends=(">",),
        param_open='<｜GCML｜parameter name="',
        key_end=">",
        value_ends=("</｜GCML｜parameter>",),
        call_close="</｜GCML｜invoke>",
        attributes=True,
    )

    def extra_markers(self) -> tuple[str, ...]:
        return (*super().extra_markers(), *self.never_content, "｜GCML｜")


class Glm45Parser(MarkupToolParser):
    """GLM 4.5 to 4.7: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, with or without
    line breaks between, which some write as a backslash and an n."""

    needs_special_tokens = True
    starts = ("<tool_call>",)
    closers = ()
    markup = Markup(
        call_open="",
        name_ends=("\n", "\\n", "<arg_key>", "</tool_call>"),
        param_open="<arg_key>",
        key_end="</arg_key>",
        value_open="<arg_value>",
        value_ends=("</arg_value>",),
        call_close="</tool_call>",
        written_breaks=True,
        quoted_values=True,
    )


class PoolsideV1Parser(MarkupToolParser):
    """Laguna (poolside): GLM's tags, a line break behind each; texts are written as they are."""

    starts = ("<tool_call>",)
    markup = Markup(
        call_open="",
        name_ends=("\n", "<arg_key>", "</tool_call>"),
        param_open="<arg_key>",
        key_end="</arg_key>",
        value_open="<arg_value>",
        value_ends=("\n</arg_value>", "</arg_value>"),
        call_close="</tool_call>",
        trim_line_break=True,
    )


class KimiK3Parser(MarkupToolParser):
    """Kimi K3: channels of special tokens. The tools channel has calls, whose arguments say their types:
    `<|open|>call tool="..." index="1"<|sep|><|open|>argument key="..." type="string"<|sep|>value<|close|>argument<|sep|>`.
    """

    needs_special_tokens = True
    starts = ("<|open|>tools<|sep|>",)
    closers = ("<|close|>tools<|sep|>",)
    never_content = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
    markup = Markup(
        call_open='<|open|>call tool="',
        name_ends=("<|sep|>",),
        param_open='<|open|>argument key="',
        key_end="<|sep|>",
        value_ends=("<|close|>argument<|sep|>",),
        call_close="<|close|>call<|sep|>",
        attributes=True,
        escaped_attributes=True,
    )

    def extra_markers(self) -> tuple[str, ...]:
        return (*super().extra_markers(), *self.never_content, "<|open|>", "<|close|>", "<|sep|>")


class MuseParser(MarkupToolParser):
    """Muse: messages to a recipient. One to a tool holds calls in ATEM's tags:
    `<|start|>assistant to=get_weather<|message|><atem:function_calls><atem:invoke name="..."><atem:parameter name="...">`.
    The prompt ends before the first recipient. Tags that an answer quotes are not calls.
    """

    needs_special_tokens = True
    starts = ("<|start|>assistant to=",)
    closers = ("</atem:function_calls>", "<|eom|>", "<|eot|>")
    never_content = ("<|eom|>", "<|eot|>")
    markup = Markup(
        call_open='<atem:invoke name="',
        name_ends=(">",),
        param_open='<atem:parameter name="',
        key_end=">",
        value_ends=("</atem:parameter>",),
        call_close="</atem:invoke>",
        call_closes_before=("</atem:function_calls>", "<|eom|>", "<|eot|>"),
        attributes=True,
    )

    def extra_markers(self) -> tuple[str, ...]:
        return (
            *super().extra_markers(),
            *self.never_content,
            "to=",
            "<|message|>",
            "<|start|>",
            "<atem:function_calls>",
        )

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        return self._headed("")

    def open_bare(self, cursor: Cursor) -> Body | None:
        """At the start a recipient may stand without its token; behind a call another may follow."""
        if may_be("to=", cursor):
            return self._headed("to=")
        if self._expected and may_be(self.markup.call_open, cursor):
            return self._calls_body()
        return None

    def _headed(self, lead: str) -> Body:
        return Headed(markers_of("<|message|>"), self._open_message, lead=lead, skipped=("<atem:function_calls>",))

    def _open_message(self, recipient: str, end: str) -> Body | Status:
        if recipient.strip() in ("user", "commentary"):
            return Status.DONE
        return Status.BROKEN if recipient.strip() == "self" else self._calls_body()

    def _calls_body(self) -> Body:
        return MarkupCalls(self.calls, self.markup, self.types, named=self._offered)

    def _offered(self, name: str) -> str:
        """The offered tool that a name with namespaces (`functions.f`, `f.f`) stands for."""
        if name in self.names or "." not in name:
            return name
        leaf = name.rpartition(".")[2]
        same = [each for each in self.names if each.rpartition(".")[2] == leaf]
        return same[0] if len(same) == 1 else name


def _hunyuan_markup(suffix: str) -> Markup:
    return Markup(
        call_open="",
        name_ends=(f"<tool_sep{suffix}>", f"<arg_key{suffix}>", f"</tool_call{suffix}>"),
        param_open=f"<arg_key{suffix}>",
        key_end=f"</arg_key{suffix}>",
        value_open=f"<arg_value{suffix}>",
        value_ends=(f"</arg_value{suffix}>",),
        call_close=f"</tool_call{suffix}>",
    )


class HunyuanParser(MarkupToolParser):
    """Hunyuan A13B: `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`; Hunyuan 3: markup like GLM's, with
    `<tool_sep>` behind the name."""

    starts = ("<tool_calls>", "<tool_call>")
    leads = ("<tool_call>",)
    closers = ("</tool_calls>",)
    markup = _hunyuan_markup("")

    def open_body(self, marker: str, cursor: Cursor) -> Body | None:
        if cursor.text[cursor.pos] in "[{":
            return JsonCalls(self.calls)
        return super().open_body(marker, cursor) if marker == self.leads[0] else None


class HunyuanOpensourceParser(HunyuanParser):
    """Hunyuan 3 as released: every tag carries the suffix `:opensource`."""

    starts = ("<tool_calls:opensource>", "<tool_call:opensource>")
    leads = ("<tool_call:opensource>",)
    closers = ("</tool_calls:opensource>",)
    markup = _hunyuan_markup(":opensource")
