"""Every message that crosses a process border, as closed unions of tagged structs.

    API process --ToEngine--> engine --ToDetokenizer--> detokenizer --ToApi--> API process
                                 ^----- StopAt ------------'

Where there is no tokenizer there is no detokenizer either: the engine's tokens go straight home.

Messages are encoded as msgpack by `bough.ipc`; token ids travel as little-endian int32 bytes (`pack_ids`, `unpack_ids`).
A request's id is an int made by the API process that took it: `(worker << WORKER_SHIFT) | (replica << REPLICA_SHIFT) |
counter`, so that answers find their way home, and what follows finds its engine, without a table. `rid` is the name the
client knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from bough.core.bounds import MOST_REPLICAS
from bough.core.errors import no_such_token
from bough.core.media import MediaItem
from bough.core.sampling import SamplingParams

RequestId = int
CallId = int
"""Ids of control calls are made like request ids."""
Ids = npt.NDArray[np.int32]
_PACKED_ID = np.dtype("<i4")

REPLICA_SHIFT = 32
WORKER_SHIFT = REPLICA_SHIFT + (MOST_REPLICAS - 1).bit_length()


def joined_namespace(namespace: str, session: str) -> str:
    """Where the joined context of a session is found, for requests of a namespace."""
    return f"{namespace}\0{session}"


def media_namespace(namespace: str, content: bytes) -> str:
    """Where prefixes are shared whose tokens all depend on the same media."""
    return f"{namespace}\1{content.hex()}"


def adapter_namespace(namespace: str, adapter: int) -> str:
    """Where prefixes are shared that were computed with the same adapter."""
    return f"\2{adapter}\2{namespace}" if adapter else namespace


def plain_namespace(namespace: str) -> str:
    """The namespace without the session that a join added."""
    return namespace.partition("\0")[0]


def owned_name(tenant: str, name: str) -> str:
    """A name that a client chose, distinct from the same name of other tenants. Tenants' names have no line breaks."""
    return f"{tenant}\n{name}" if tenant else name


def home_worker(request_id: int) -> int:
    """The API worker that made this id."""
    return request_id >> WORKER_SHIFT


def home_replica(request_id: int) -> int:
    """The engine that computes this request, where there are several."""
    return (request_id >> REPLICA_SHIFT) % MOST_REPLICAS


def pack_ids(ids: Sequence[int] | Ids) -> bytes:
    return np.asarray(ids, _PACKED_ID).tobytes()


def unpack_ids(packed: bytes) -> Ids:
    """A read-only view of the packed ids."""
    return np.frombuffer(packed, _PACKED_ID)


# -- into the engine ------------------------------------------------------------------------------


class LogprobSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which log-probabilities a request wants. Output tokens' are always among them."""

    start: int = -1
    """First prompt position whose token is scored; -1: outputs only."""
    top: int = 0
    token_ids: tuple[int, ...] = ()
    """Report these tokens' log-probabilities at every scored position."""
    processed: bool = False
    """After temperature, penalties and masks, instead of the raw distribution."""

    def check(self, vocab_size: int) -> None:
        """Raises `InvalidRequest` for tokens that the model does not have."""
        bad = [i for i in self.token_ids if not 0 <= i < vocab_size]
        if bad:
            raise no_such_token(f"token_ids_logprob has token id {bad[0]}", vocab_size, param="token_ids_logprob")


class TextSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the detokenizer does with a request's tokens."""

    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logprob_text: bool = False
    """Decode the tokens of log-probabilities one by one."""
    reasoning_parser: str | None = None
    reasoning_forced: bool = False
    """The answer begins inside a reasoning section."""
    stream_reasoning: bool = True
    tool_parser: str | None = None
    tools: str = ""
    """JSON list of the tools, for parsers that type arguments by schema; empty: no tools."""
    calls_only: bool = False
    """The answer is held to calls: if it ends within one that was not sent yet, that is not content either."""
    drop_unknown_tools: bool = False
    """Calls of tools that are not among `tools` are left out."""
    every: int = 1
    """Send a delta every this many tokens (and at the end)."""
    prompt_tail: bytes = b""
    """Last few prompt ids (packed): context for decoding the first output tokens without losing a leading space."""


class Generate(Struct, kw_only=True, omit_defaults=True, tag="generate"):
    """A tokenised request. Sampling `n` is expanded by the engine client: each copy is its own Generate."""

    id: RequestId
    rid: str
    prompt: bytes
    sampling: SamplingParams
    text: TextSpec | None = None
    """None: the client wants token ids only."""
    stream: bool = True
    """False: the engine may hold tokens back until the end."""
    logprobs: LogprobSpec | None = None
    hidden_states: Literal["", "last", "all"] = ""
    tenant: str = ""
    """The tenant that `rid` belongs to: the name of the client's key; empty where there are no keys."""
    namespace: str = ""
    """Cache namespace: adapter and tenant salt. Prefixes are shared within one only."""
    adapter: int = 0
    """The adapter that its tokens are computed with, counted from 1; 0: none. Requests with different ones share no KV."""
    priority: int = 0
    """Larger is more urgent."""
    deadline_s: float = 0.0
    """Time (time.monotonic(), which the processes of a machine share) after which the request is dropped; 0: none."""
    eos_ids: tuple[int, ...] = ()
    """Ids that end this request besides `sampling.stop_token_ids`; empty under ignore_eos."""
    pool: str = ""
    """Pooling models: what to return ("embed", "classify", "rerank", ...); empty: generate."""
    second_at: int = 0
    """Pooling models: where a pair's second text begins; 0: there is one text."""
    items: tuple[int, ...] = ()
    """Lengths of the items that the prompt ends in: each sees what comes before all of them, and itself. There is no output;
    `logprobs.token_ids` are scored at the end of each item, and come as scores of the prompt."""
    reasoning_end: tuple[int, ...] = ()
    """Token ids that end the reasoning section (for grammars after reasoning, budgets and usage); empty: none."""
    reasoning_open: bool = False
    """The prompt ends inside a reasoning section."""
    thinking_budget: int = -1
    """Reasoning tokens after which the end marker is forced; -1: no limit."""
    speculate: bool = True
    """Drafts may be verified for it, where the server makes any."""
    trace: bool = False
    """Send the request's timeline with its end."""
    keep: bool = False
    """Keep its KV under its name after its end, as long as memory allows, so that a `JoinBranches` can use it."""
    media: tuple[MediaItem, ...] = ()
    """What stands in the prompt beside text, in order; items do not overlap."""
    positions: bytes = b""
    """For models whose positions have several axes, if there is media: int32 [axes, prompt tokens]."""
    follows: str = ""
    """The name (`owned_name`) of a kept request whose prompt this one begins with: found to its last token, not to its last
    page."""


class Abort(Struct, frozen=True, tag="abort"):
    id: RequestId
    reason: str = "client disconnected"


class AbortByName(Struct, frozen=True, tag="abort_by_name"):
    """Ends the requests of a name (all, if it is empty), whichever API worker sent them. The reply says how many."""

    call: CallId
    rid: str
    reason: str = "aborted by request"
    tenant: str | None = None
    """Only this tenant's; None: those of all tenants."""
    worker: int | None = None
    """Only those that came through this API worker; None: through any."""


class StopAt(Struct, frozen=True, tag="stop_at"):
    """The detokenizer found the request's end in its text: keep the first `num_tokens` output tokens."""

    id: RequestId
    num_tokens: int


class FlushCache(Struct, frozen=True, tag="flush"):
    call: CallId


class GetInfo(Struct, frozen=True, tag="info"):
    call: CallId


class Look(Struct, frozen=True, tag="look"):
    """Asks for a picture of the tree and the requests in it, at most so large."""

    call: CallId
    max_spans: int = 96
    max_rows: int = 64
    span_tokens: int = 0
    """Of each span, the ids of this many first tokens are in the picture."""


class JoinBranches(Struct, frozen=True, kw_only=True, tag="join"):
    """Lines up the KV of kept requests: all of the first branch, then what each other has beyond their common parent.

    The branches did not see each other, so the result is found in a namespace of its own only. The reply's body has its
    `ids` (packed) and says how many tokens were computed: none.
    """

    call: CallId
    namespace: str
    """Where the requests' names were given: theirs, without the part that a join added."""
    branches: tuple[str, ...]
    """Names as `owned_name` makes them."""
    starts: tuple[int, ...]
    """How many of each branch's tokens are the parent's."""
    shifts: tuple[int, ...] = ()
    """Positions that each branch stands further than where the one before it ends; empty: none."""
    joined: str
    """The namespace of the result."""


class Recall(Struct, frozen=True, tag="recall"):
    """Asks for the `ids` (packed, a list) of kept requests by their names (`owned_name`); "" names what was joined in the
    namespace."""

    call: CallId
    namespace: str
    names: tuple[str, ...] = ("",)


class Pause(Struct, frozen=True, tag="pause"):
    """`abort` ends all requests, `retract` frees their memory, `in_place` freezes them where they are."""

    call: CallId
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Resume(Struct, frozen=True, tag="resume"):
    call: CallId


class Profile(Struct, frozen=True, kw_only=True, tag="profile"):
    call: CallId
    start: bool
    output_dir: str = ""
    num_steps: int = 0
    """Stop by itself after this many steps; 0: on request."""


class Corpus(Struct, frozen=True, kw_only=True, tag="corpus"):
    """Texts to draft from, for all requests: adds one, removes one, or counts the tokens of all."""

    call: CallId
    action: Literal["add", "remove", "list"]
    corpus_id: str = ""
    tokens: bytes = b""
    """Packed ids; -1 stands between two texts."""
    is_first: bool = True
    goes_on: bool = False
    """More of it follows, in another message."""


class ExpertRecord(Struct, frozen=True, tag="expert_record"):
    """Tokens by expert, counted from `start` to `stop` (or to now); the reply to `dump` has them."""

    call: CallId
    action: Literal["start", "stop", "dump"]


class Wake(Struct, frozen=True, tag="wake"):
    """From one scheduler to another, where replicas of attention run in lockstep: it has work."""

    sleep: int
    """Number of the sleep that ends."""


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """Finish what is running within `drain_s`, then end."""

    drain_s: float = 0.0


ToEngine = (
    Generate
    | Abort
    | AbortByName
    | StopAt
    | FlushCache
    | GetInfo
    | Look
    | JoinBranches
    | Recall
    | Pause
    | Resume
    | Profile
    | Corpus
    | ExpertRecord
    | Wake
    | Shutdown
)


# -- out of the engine ----------------------------------------------------------------------------

EndReason = Literal["stop", "length", "abort", "error"]


class TraceSpan(Struct, array_like=True):
    """A stretch of a request's life. Times are time.monotonic(), which all processes of a machine share."""

    name: str
    start_s: float
    seconds: float
    detail: dict[str, int | float | str] = {}


class End(Struct, kw_only=True, omit_defaults=True):
    """How a request ended, and what it cost. Sent exactly once per request."""

    reason: EndReason
    matched: int | str | None = None
    """The stop token id, or the stop string or pattern, that ended it."""
    message: str = ""
    """For `abort` and `error`: a sentence for the client. For `length`: what was cut, if a grammar was."""
    status: int = 0
    """For `abort` and `error`: HTTP status."""
    code: str = ""
    param: str = ""
    """For `error`: the client's field that is to blame, if one is."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    media_tokens: dict[str, int] = {}
    """Of the prompt: positions of media, by kind ("image", "video", "audio")."""
    reasoning_tokens: int = 0
    """Output tokens before the mark that ends the reasoning; all of them, if the answer ended before it was whole."""
    reasoning_mark: int = 0
    """Tokens of that mark; 0: it is not there."""
    retractions: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    grammar_s: float = 0.0
    """Of the time in the queue, what its grammar took to be compiled."""
    decode_steps: int = 0
    """With speculative decoding: steps that verified or drew its tokens, after the first."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Drafts that were right."""
    right_drafts: list[int] = []
    """Of the decode steps: how many had as many right drafts as the index says. Empty where `decode_steps` is 0."""
    spans: list[TraceSpan] = []
    """If the request is traced: the engine's part of its timeline, in order."""


class TokenLogprobs(Struct, array_like=True):
    """Log-probabilities of consecutive positions. Row i of the nested lists belongs to token i."""

    token_ids: list[int]
    logprobs: list[float | None]
    """None: the first prompt token, which nothing predicts."""
    top: list[list[tuple[int, float]]] = []
    chosen: list[list[tuple[int, float]]] = []
    """For `LogprobSpec.token_ids`."""
    top_text: list[list[str]] = []
    text: list[str] = []
    """Filled by the detokenizer when asked for."""


class Began(Struct, kw_only=True, omit_defaults=True, tag="began"):
    """A request has entered the engine: sent before any of its tokens."""

    id: RequestId
    rid: str
    text: TextSpec | None = None


class RowOutput(Struct, kw_only=True, omit_defaults=True):
    """What a row of a step has beyond token ids."""

    end: End | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    hidden_states: list[list[float]] | None = None
    embedding: bytes = b""
    """Pooled result as float32 bytes."""


class Tokens(Struct, kw_only=True, tag="tokens"):
    """New tokens of many requests: row i has `counts[i]` of the packed `tokens`, in order."""

    ids: list[RequestId]
    counts: list[int]
    tokens: bytes
    rows: dict[int, RowOutput] = {}
    """Keyed by row, only where there is something to say."""


class Reply(Struct, kw_only=True, omit_defaults=True, tag="reply"):
    """Answer to a control call."""

    call: CallId
    error: str = ""
    body: dict[str, Any] = {}


ToDetokenizer = Began | Tokens | Reply
"""Replies take the same way out, so that they keep their order with tokens."""


# -- to the API process ---------------------------------------------------------------------------


class Content(Struct, tag="content"):
    text: str


class Reasoning(Struct, tag="reasoning"):
    text: str


class ToolCallBegin(Struct, tag="call"):
    index: int
    id: str
    name: str


class ToolCallArguments(Struct, tag="args"):
    index: int
    json_delta: str


class ToolCallEnd(Struct, tag="call_end"):
    index: int


ParsedEvent = Content | Reasoning | ToolCallBegin | ToolCallArguments | ToolCallEnd
"""What reasoning and tool-call parsers make of the text."""


class Delta(Struct, kw_only=True, omit_defaults=True):
    """News of one request. `text` is new text only; with parsers on, `events` say what the text means."""

    id: RequestId
    text: str = ""
    tokens: bytes = b""
    events: list[ParsedEvent] = []
    end: End | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    hidden_states: list[list[float]] | None = None
    embedding: bytes = b""


class Deltas(Struct, tag="deltas"):
    deltas: list[Delta]


def plain_delta(request_id: RequestId, packed: bytes, row: RowOutput | None) -> Delta:
    """A request's news as token ids only."""
    if row is None:
        return Delta(id=request_id, tokens=packed)
    return Delta(
        id=request_id,
        tokens=packed,
        end=row.end,
        logprobs=row.logprobs,
        prompt_logprobs=row.prompt_logprobs,
        hidden_states=row.hidden_states,
        embedding=row.embedding,
    )


def plain_deltas(message: Tokens) -> Iterator[Delta]:
    """The news of every row, in order."""
    packed, rows, begin = message.tokens, message.rows, 0
    for place, (request_id, count) in enumerate(zip(message.ids, message.counts, strict=True)):
        end = begin + 4 * count
        yield plain_delta(request_id, packed[begin:end], rows.get(place))
        begin = end


ToApi = Deltas | Tokens | Reply
"""Deltas come from the detokenizer; tokens from an engine that has none beside it."""
