"""The text of one program state so far: as one string, and as messages of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bough.lang.chat_template import ChatTemplate
from bough.lang.errors import LangError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlacedMedia:
    """An image or video in the text: `token` is at `position`."""

    kind: str
    url: str
    position: int
    token: str
    num_frames: int | None = None

    def content_part(self) -> dict[str, Any]:
        return {"type": f"{self.kind}_url", f"{self.kind}_url": {"url": self.url}}


@dataclass(frozen=True, slots=True)
class JoinedContext:
    """KV that the server joined: the text before `position` is in `session_id`/`rid`, and is not sent again."""

    session_id: str
    rid: str
    position: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """A snapshot that a backend generates from."""

    text: str
    messages: tuple[Message, ...]
    role: str | None
    """The role being written; None outside every role."""
    partial: str
    """The content so far of the role being written."""
    loose_text: bool
    """Some text is outside of all roles."""
    media: tuple[PlacedMedia, ...]
    context: JoinedContext | None


def text_prompt(text: str) -> Prompt:
    """A prompt that is nothing but text, outside every role."""
    return Prompt(text, (), None, "", bool(text), (), None)


def content_of(text: str, media: Sequence[PlacedMedia], start: int = 0) -> str | list[dict[str, Any]]:
    """`text[start:]` as a message's content: plain, or parts in order if it has images or videos."""
    inside = [item for item in media if item.position >= start]
    if not inside:
        return text[start:]
    content: list[dict[str, Any]] = []
    at = start
    for item in inside:
        if text[at : item.position]:
            content.append({"type": "text", "text": text[at : item.position]})
        content.append(item.content_part())
        at = item.position + len(item.token)
    if text[at:]:
        content.append({"type": "text", "text": text[at:]})
    return content


@dataclass(slots=True)
class Transcript:
    text: str = ""
    messages: list[Message] = field(default_factory=list)
    role: str | None = None
    role_start: int = 0
    loose_text: bool = False
    media: list[PlacedMedia] = field(default_factory=list)
    context: JoinedContext | None = None

    def copy(self) -> Transcript:
        return Transcript(
            self.text, list(self.messages), self.role, self.role_start, self.loose_text, list(self.media), self.context
        )

    def append(self, text: str) -> None:
        self.text += text
        if self.role is None and text.strip():
            self.loose_text = True

    def append_media(self, kind: str, url: str, token: str, num_frames: int | None = None) -> None:
        self.media.append(PlacedMedia(kind, url, len(self.text), token, num_frames))
        self.append(token)

    def begin_role(self, role: str, template: ChatTemplate) -> None:
        if self.role is not None:
            raise LangError(
                what=f"{role} begins inside {self.role}",
                why="messages of a conversation don't nest",
                fix=f"end the {self.role} message first ({self.role}_end())",
            )
        if not self.messages and role != "system" and template.default_system_prompt is not None:
            self.begin_role("system", template)
            self.append(template.default_system_prompt)
            self.end_role("system", template)
        self.text += template.get_prefix_and_suffix(role, self.messages)[0]
        self.role = role
        self.role_start = len(self.text)

    def end_role(self, role: str, template: ChatTemplate) -> None:
        if self.role != role:
            raise LangError(
                what=f"{role} ends but {self.role or 'no role'} is being written",
                why="every *_end() closes the *_begin() of the same role",
                fix=f"write {role}_begin() before it, or use {role}(...)",
            )
        self.messages.append({"role": role, "content": self.role_content()})
        self.text += template.get_prefix_and_suffix(role, self.messages[:-1])[1]
        self.role = None

    def role_content(self) -> str | list[dict[str, Any]]:
        """The content of the message being written."""
        content = content_of(self.text, self.media, self.role_start)
        return content.lstrip() if isinstance(content, str) and self.role == "assistant" else content

    def replace_tail(self, start: int, text: str) -> None:
        """Write `text` in place of everything from `start` on."""
        self.text = self.text[:start]
        self.append(text)

    def append_branch(self, branch: Transcript, fork_position: int, fork_messages: int) -> None:
        """Appends the text of a branch after the fork; the branch must have closed the roles that it opened."""
        if branch.role != self.role:
            raise LangError(
                what=f"a branch ends inside {branch.role or 'no role'}, its parent inside {self.role or 'no role'}",
                why="the texts of branches are put after one another",
                fix="close in each branch the roles it opens, before join('concate_and_append')",
            )
        shift = len(self.text) - fork_position
        for item in branch.media:
            if item.position >= fork_position:
                self.media.append(PlacedMedia(item.kind, item.url, item.position + shift, item.token, item.num_frames))
        self.messages.extend(branch.messages[fork_messages:])
        self.text += branch.text[fork_position:]
        self.loose_text = self.loose_text or branch.loose_text
        if branch.role is not None and branch.role_start >= fork_position:
            self.role_start = branch.role_start + shift

    def snapshot(self) -> Prompt:
        partial = self.text[self.role_start :] if self.role is not None else ""
        return Prompt(
            self.text, tuple(self.messages), self.role, partial, self.loose_text, tuple(self.media), self.context
        )
