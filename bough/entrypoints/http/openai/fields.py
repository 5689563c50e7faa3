"""Fields shared by chats, plain completions and the APIs of other vendors: names, sizes, unsupported features, and
errors."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

from bough.core import bounds
from bough.core.errors import InvalidRequest, ModelNotFound
from bough.engine_client.native import namespace_of as salted
from bough.entrypoints.http.openai.schema import ChatRequest, Common
from bough.entrypoints.served_model import ServedModel


def bad_field(what: str, why: str, param: str) -> InvalidRequest:
    """The error for an invalid field."""
    return InvalidRequest(what=what, why=why, fix=f"send a valid {param}", param=param)


def bad_role(where: str, role: object, why: str) -> InvalidRequest:
    """The error for the message at `where`, whose role is unknown or missing."""
    given = "missing" if role is None else repr(str(role)[:50])
    return bad_field(f"{where}.role is {given}", why, f"{where}.role")


def served_name(served: ServedModel, model: str | None) -> str:
    """The model name for the answer: the client's, if it is one of the served names. Raises `ModelNotFound`."""
    if model is None or model == "" or model == served.name:
        return served.name
    if (
        model in served.names
        or model in served.aliases
        or _named_adapter(served, model)
        or any(fnmatchcase(model, pattern) for pattern in served.patterns)
    ):
        return model
    raise ModelNotFound(
        what=f"there is no model {model[:200]!r}",
        why=f"this server serves {served.name!r}",
        fix=f'send "model": "{served.name}", or start the server with --served-model-name',
        param="model",
    )


def adapter_of(served: ServedModel, asked: Common) -> str:
    """The adapter that a body names: as its model (`adapter`, `base:adapter`), or as `lora_path`."""
    return _named_adapter(served, asked.model or "") or asked.lora_path or ""


def _named_adapter(served: ServedModel, model: str) -> str:
    """The adapter that a model's name stands for; empty: none. Names of the model itself come first."""
    own = {served.name, *served.names, *served.aliases}
    if not served.adapters or model in own:
        return ""
    base, colon, adapter = model.rpartition(":")
    name = adapter if colon and base in own else model
    return name if name in served.adapters else ""


def check_sizes(asked: Common) -> None:
    """Checks every client-controlled size of a body against the table of bounds."""
    if asked.n is not None and asked.n < 1:
        raise InvalidRequest(what=f"n is {asked.n}", why="it counts completions", fix="send at least 1", param="n")
    if asked.rid is not None:
        bounds.at_most("rid_chars", len(asked.rid), "rid")
    for name in ("cache_salt", "extra_key", "lora_path"):
        bounds.count("salt_chars", getattr(asked, name), name)


def refuse_unserved_chat(asked: ChatRequest) -> None:
    """Raises `InvalidRequest` for unsupported chat features, instead of ignoring them."""
    _refuse(asked.audio, "audio", "the served model gives text only", "leave it out")
    _refuse(asked.web_search_options, "web_search_options", "this server does not search", "leave it out")
    _refuse(asked.chat_template, "chat_template", "templates from requests are not run", "start with --chat-template")
    if asked.modalities is not None and asked.modalities != ["text"]:
        _refuse(asked.modalities, "modalities", "the served model gives text only", 'send ["text"]')


def namespace_of(asked: Common) -> str:
    """Cache namespace: prefixes are shared only between requests with the same salt and key."""
    return salted(asked.cache_salt or "", asked.extra_key or "")


def hidden_states_of(asked: Common) -> Literal["", "last", "all"]:
    """Which hidden states are wanted; `true` means all."""
    wanted = asked.return_hidden_states
    if wanted is None or wanted is False:
        return ""
    return "all" if wanted is True else wanted


def _refuse(value: object, name: str, why: str, fix: str) -> None:
    if value is not None:
        raise InvalidRequest(what=f"{name} is not supported", why=why, fix=fix, param=name)
