"""Corpora for n-gram drafts: texts that answers are likely to repeat, added while the server runs. Admin routes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from bough.core.errors import Conflict, InvalidRequest
from bough.core.messages import Corpus, Ids, pack_ids
from bough.entrypoints.http.body import read_json
from bough.entrypoints.http.openai.chat import Handler
from bough.entrypoints.http.replies import json_reply
from bough.entrypoints.service import Service

_PART_TOKENS = 65536
"""Tokens that go to the engine at once: it indexes them between two steps, in some 6 ms."""
_TEXTS_AT_ONCE = 64


class AddCorpusRequest(msgspec.Struct, kw_only=True):
    """POST /add_external_corpus: one of the three sources."""

    corpus_id: str
    file_path: str | None = None
    """A file on the server with one JSON string per line."""
    documents: list[str] | None = None
    token_chunks: list[list[int]] | None = None


class RemoveCorpusRequest(msgspec.Struct, kw_only=True):
    """POST /remove_external_corpus."""

    corpus_id: str


def add_corpus(service: Service) -> Handler:
    server = service.config.server

    async def handle(request: Request) -> Response:
        body = await read_json(request, AddCorpusRequest, most=server.max_body_bytes, strict=server.strict_api)
        asked = body.value
        _check_drafting(service)
        chunks = await _token_chunks(asked, service)
        reply: dict[str, int] = {}
        parts = list(_parts(chunks))
        for number, part in enumerate(parts, 1):
            is_first, goes_on = number == 1, number < len(parts)
            reply = await _call(
                service, "add", asked.corpus_id, tokens=pack_ids(part), is_first=is_first, goes_on=goes_on
            )
        answer = {"success": True, "corpus_id": asked.corpus_id, "message": ""}
        return json_reply({**answer, "loaded_token_count": reply[asked.corpus_id]}, headers=body.headers())

    return handle


def remove_corpus(service: Service) -> Handler:
    server = service.config.server

    async def handle(request: Request) -> Response:
        body = await read_json(request, RemoveCorpusRequest, most=server.max_body_bytes, strict=server.strict_api)
        _check_drafting(service)
        await _call(service, "remove", body.value.corpus_id)
        return json_reply({"success": True, "message": ""}, headers=body.headers())

    return handle


def list_corpora(service: Service) -> Handler:
    async def handle(request: Request) -> Response:
        _check_drafting(service)
        return json_reply({"success": True, "message": "", "corpus_token_counts": await _call(service, "list")})

    return handle


def _check_drafting(service: Service) -> None:
    if service.config.speculative.speculative_algorithm != "NGRAM":
        raise Conflict(
            what="this server has no use for corpora",
            why="only n-gram drafts are looked up in them",
            fix="start it with --speculative-algorithm NGRAM",
        )


async def _call(
    service: Service,
    action: Literal["add", "remove", "list"],
    name: str = "",
    *,
    tokens: bytes = b"",
    is_first: bool = True,
    goes_on: bool = False,
) -> dict[str, int]:
    """Returns tokens by corpus; all replicas have the same."""
    reply = await service.engine_client.call(
        lambda call: Corpus(call=call, action=action, corpus_id=name, tokens=tokens, is_first=is_first, goes_on=goes_on)
    )
    return dict(reply.get("corpora", []))


async def _token_chunks(asked: AddCorpusRequest, service: Service) -> list[Ids]:
    """The texts of a corpus as token ids. Raises `InvalidRequest`."""
    given = [name for name in ("file_path", "documents", "token_chunks") if getattr(asked, name) is not None]
    if len(given) != 1 or not asked.corpus_id:
        raise InvalidRequest(
            what="a corpus needs a corpus_id and one source",
            why=f"there are {len(given)} sources" if asked.corpus_id else "corpus_id is empty",
            fix="send corpus_id and one of file_path, documents and token_chunks",
            param=given[1] if len(given) > 1 else "corpus_id",
        )
    if asked.token_chunks is not None:
        size = service.served.facts["vocab_size"]
        for chunk in asked.token_chunks:
            wrong = next((token for token in chunk if not 0 <= token < size), None)
            if wrong is not None:
                raise InvalidRequest(
                    what=f"token_chunks has {wrong}",
                    why=f"ids are 0 to {size - 1:,}",
                    fix="use the tokenizer of the served model",
                    param="token_chunks",
                )
        return _not_empty([np.array(chunk, np.int32) for chunk in asked.token_chunks if chunk], given[0])
    texts = asked.documents
    if texts is None:
        texts = await asyncio.to_thread(_read_texts, asked.file_path or "")
    chunks: list[Ids] = []
    for at in range(0, len(texts), _TEXTS_AT_ONCE):
        chunks += [
            np.array(ids, np.int32) for ids in await service.encode(texts[at : at + _TEXTS_AT_ONCE], False) if ids
        ]
    return _not_empty(chunks, given[0])


def _not_empty(chunks: list[Ids], param: str) -> list[Ids]:
    if not chunks:
        raise InvalidRequest(
            what="the corpus is empty", why="no text of it has a token", fix="send some text", param=param
        )
    return chunks


def _read_texts(path: str) -> list[str]:
    try:
        lines = Path(path).read_text().splitlines()
        return [msgspec.json.decode(line, type=str) for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise InvalidRequest(
            what=f"{path[:200]} can't be read",
            why=str(error)[:200],
            fix="name a file on the server with one JSON string per line",
            param="file_path",
        ) from error


def _parts(chunks: list[Ids]) -> Iterator[Ids]:
    """All texts, one after the other with a border between two, in pieces of at most `_PART_TOKENS`."""
    border = np.array([-1], np.int32)
    joined = np.concatenate([part for chunk in chunks for part in (chunk, border)][:-1])
    for begin in range(0, len(joined), _PART_TOKENS):
        yield joined[begin : begin + _PART_TOKENS]
