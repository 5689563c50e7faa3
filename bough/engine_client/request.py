"""A checked request, independent of the API it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct

from bough.core.errors import InvalidRequest
from bough.core.messages import Ids, LogprobSpec
from bough.core.sampling import SamplingParams
from bough.engine_client.caller import ANYBODY, Caller
from bough.engine_client.sessions import SessionParams
from bough.multimodal.desk import MediaInput

Room = Literal["exact", "at_most", "fill"]
"""How `max_new_tokens` is fitted to the context: refuse if it does not fit, lower it, or use all that is left."""

PRIORITIES: Final[Mapping[str, int]] = {"high": 10, "medium": 0, "low": -10}
"""Names of priorities. They differ by the default of `--priority-preemption-threshold`."""
PriorityWord = Literal["high", "medium", "low"]

_FURTHEST = 2**31
_PIECE_IDS = 16_384
"""Token ids of a batch that are checked before they are sent: enough for an engine's first step or two."""


class Request(Struct, frozen=True, kw_only=True):
    """A client's request after parsing. `n` of the sampling parameters makes that many streams."""

    prompt: str | Sequence[int] | Ids
    """Text (for chats: already rendered) or token ids."""
    sampling: SamplingParams = SamplingParams()
    room: Room = "exact"
    rid: str = ""
    """The client's name for it; made if empty."""
    stream: bool = False
    """The client wants deltas as they arrive, not only the complete answer."""
    add_special_tokens: bool = True
    """Add the tokenizer's beginning-of-sequence token; False for rendered chats that contain it."""
    want_text: bool = True
    """False: token ids only, nothing is detokenised."""
    bad_words: tuple[str, ...] = ()
    """Texts that must not appear."""
    logprobs: LogprobSpec | None = None
    logprob_text: bool = False
    return_prompt: bool = False
    """The answer's last delta also contains the prompt's token ids."""
    hidden_states: Literal["", "last", "all"] = ""
    caller: Caller = ANYBODY
    """The sender: names (`rid`, sessions, followed requests) belong to the caller's tenant."""
    namespace: str = ""
    """Salt with which the client separates its cached prefixes."""
    adapter: str = ""
    """The name of the adapter that computes it; empty: none, or the one that its media ask for."""
    priority: int = 0
    deadline_s: float = 0.0
    every: int = 1
    """Tokens between two deltas of a streamed request."""
    reasoning_parser: str | None = None
    reasoning_forced: bool = False
    stream_reasoning: bool = True
    tool_parser: str | None = None
    tools: str = ""
    """JSON list of the tools."""
    calls_only: bool = False
    """The grammar constrains the answer to calls of these tools."""
    drop_unknown_tools: bool = False
    """Drop calls of other tools."""
    reasoning_end: tuple[int, ...] = ()
    thinking_budget: int = -1
    speculate: bool = True
    """False: no drafts are made for it, and its text is not used for drafts of others."""
    session: SessionParams | None = None
    """Its place in a session, whose tokens come before its own."""
    follows: str = ""
    """The `rid` of an ended request without output whose prompt this one begins with: nothing of it is computed again."""
    media: tuple[MediaInput, ...] = ()
    """The media of the prompt, in the order of their markers."""
    data_parallel_rank: int | None = None
    """The replica that computes it; None: the server chooses."""
    pool: str = ""
    """Pooling models: "embed", "classify", ...; empty: generate."""
    second_at: int = 0
    """Pooling models: where a pair's second text begins; 0: there is one text."""
    items: tuple[int, ...] = ()
    """Lengths of the items that the prompt ends in, which don't see each other (`Generate.items`)."""

    def __post_init__(self) -> None:
        """Raises `InvalidRequest`."""
        for name, value in (("priority", self.priority), ("thinking_budget", self.thinking_budget)):
            if not -_FURTHEST <= value < _FURTHEST:
                raise InvalidRequest(
                    what=f"{name} is out of range",
                    why=f"it is at least {-_FURTHEST:,} and at most {_FURTHEST - 1:,}",
                    fix="send a number nearer to zero",
                    param=name,
                )


def priority_of(given: int | PriorityWord | None) -> int:
    """A client's priority as a number; 0 if there is none."""
    return PRIORITIES[given] if isinstance(given, str) else given or 0


def pieces(requests: Sequence[Request]) -> Iterator[Sequence[Request]]:
    """The requests in pieces of some thousand token ids; texts all at once, since they are tokenised in parallel."""
    if any(isinstance(request.prompt, str) for request in requests):
        yield requests
        return
    begin = num_ids = 0
    for end, request in enumerate(requests, 1):
        num_ids += len(request.prompt)
        if num_ids >= _PIECE_IDS or end == len(requests):
            yield requests[begin:end]
            begin, num_ids = end, 0
