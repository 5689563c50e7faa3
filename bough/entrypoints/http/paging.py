"""Lists in parts, as OpenAI's clients page through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from bough.core.errors import InvalidRequest

Json = dict[str, Any]
T = TypeVar("T")


def page(
    request: Request, latest_first: Sequence[T], name: Callable[[T], str], shown: Callable[[T], Json], *, most: int
) -> Json:
    """The part that the query's `limit` (at most `most`), `after` and `order` ask for. Raises `InvalidRequest`."""
    query = request.query_params
    limit = _limit(query.get("limit", "20"), most)
    order = query.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise InvalidRequest(
            what=f"order is {order[:20]!r}", why="it must be asc or desc", fix="send a valid order", param="order"
        )
    rows = list(latest_first)
    if order == "asc":
        rows.reverse()
    if query.get("after"):
        places = [at for at, each in enumerate(rows) if name(each) == query["after"]]
        rows = rows[places[0] + 1 :] if places else []
    part = rows[:limit]
    return {
        "object": "list",
        "data": [shown(each) for each in part],
        "first_id": name(part[0]) if part else None,
        "last_id": name(part[-1]) if part else None,
        "has_more": len(rows) > len(part),
    }


def _limit(given: str, most: int) -> int:
    limit = int(given) if given.isdecimal() and len(given) < 20 else 0
    if not 1 <= limit <= most:
        raise InvalidRequest(
            what=f"limit is {given[:20]!r}", why=f"it must be 1 to {most}", fix="send a valid limit", param="limit"
        )
    return limit
