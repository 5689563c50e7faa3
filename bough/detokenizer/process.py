"""The detokenizer process: all answers in progress, and the loop that reads the engine's messages and sends deltas to
the API workers."""

from __future__ import annotations

import gc
import logging
import signal

from bough.core.errors import BoughError, RequestFailed
from bough.core.messages import (
    Began,
    Delta,
    Deltas,
    Reply,
    RowOutput,
    StopAt,
    ToDetokenizer,
    Tokens,
    home_replica,
    home_worker,
    unpack_ids,
)
from bough.detokenizer.answer import PlainAnswer, TextAnswer
from bough.detokenizer.decode import DecoderFactory
from bough.ipc import Inbox, Launch, Outbox, read_checkpoint
from bough.observability.health import Heartbeat, State
from bough.tokenizer import Tokenizer, tokenizer_of

_log = logging.getLogger(__name__)

_IDLE_S = 1.0
_LAST_WORDS_S = 0.2
"""Seconds that the last messages get to leave at the end. A reader that does not read is not waited for."""


class Answers:
    """The answers in progress. `handle` processes messages in order; `take` returns what must be sent."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._factory = DecoderFactory(tokenizer) if tokenizer is not None else None
        self._live: dict[int, PlainAnswer | TextAnswer] = {}
        self._home: dict[int, list[Deltas | Reply]] = {}
        self._stops: list[StopAt] = []
        self._turn = 0
        """Number of calls of `take` (iterations). The work per iteration is bounded, so that no answer delays others
        for longer."""

    def __len__(self) -> int:
        return len(self._live)

    def handle(self, message: ToDetokenizer) -> None:
        match message:
            case Tokens():
                self._tokens(message)
            case Began():
                self._began(message)
            case Reply():
                self._home.setdefault(home_worker(message.call), []).append(message)

    def take(self) -> tuple[dict[int, list[Deltas | Reply]], list[StopAt]]:
        """Messages by API worker, and stops for the engine."""
        self._turn += 1
        home, stops = self._home, self._stops
        self._home, self._stops = {}, []
        return home, stops

    def _began(self, began: Began) -> None:
        if began.text is None or self._factory is None:
            self._live[began.id] = PlainAnswer(began.id)
            return
        try:
            self._live[began.id] = TextAnswer(began, began.text, self._factory)
        except BoughError as error:
            plain = TextAnswer(began, type(began.text)(every=began.text.every), self._factory)
            self._live[began.id] = plain
            self._fail(plain, error)

    def _tokens(self, message: Tokens) -> None:
        ids = unpack_ids(message.tokens).tolist()
        packed, rows = message.tokens, message.rows
        begin = 0
        live = self._live
        by_worker: dict[int, list[Delta]] = {}
        for place, (request_id, count) in enumerate(zip(message.ids, message.counts, strict=True)):
            end = begin + count
            answer = live.get(request_id)
            if answer is not None:
                row = rows.get(place)
                delta = self._advance(answer, ids[begin:end], packed[4 * begin : 4 * end], row)
                if delta is not None:
                    by_worker.setdefault(home_worker(request_id), []).append(delta)
            begin = end
        for worker, deltas in by_worker.items():
            waiting = self._home.setdefault(worker, [])
            if waiting and isinstance(waiting[-1], Deltas):
                waiting[-1].deltas.extend(deltas)
            else:
                waiting.append(Deltas(deltas))

    def _advance(
        self, answer: PlainAnswer | TextAnswer, ids: list[int], packed: bytes, row: RowOutput | None
    ) -> Delta | None:
        if isinstance(answer, PlainAnswer):
            delta = answer.advance(ids, packed, row)
        else:
            delta = self._advance_text(answer, ids, packed, row)
        if row is not None and row.end is not None:
            del self._live[answer.id]
        return delta

    def _advance_text(self, answer: TextAnswer, ids: list[int], packed: bytes, row: RowOutput | None) -> Delta | None:
        """Advances one answer. If it fails, only this answer ends."""
        undecided = answer.verdict is None
        answer.begin_turn(self._turn)
        try:
            delta = answer.advance(ids, packed, row)
        except BoughError as error:
            return self._failed(answer, error, row)
        except Exception:
            _log.exception("an answer could not be decoded", extra={"request": answer.id})
            return self._failed(answer, RequestFailed(what="the answer could not be decoded"), row)
        if undecided and answer.verdict is not None and (row is None or row.end is None):
            self._stops.append(StopAt(answer.id, answer.verdict.num_tokens))
        return delta

    def _failed(self, answer: TextAnswer, error: BoughError, row: RowOutput | None) -> Delta | None:
        if row is None or row.end is None:
            self._fail(answer, error)
            return None
        answer.fail(error)
        return answer.advance([], b"", RowOutput(end=row.end))

    def _fail(self, answer: TextAnswer, error: BoughError) -> None:
        answer.fail(error)
        assert answer.verdict is not None
        self._stops.append(StopAt(answer.id, answer.verdict.num_tokens))


def run(launch: Launch) -> None:
    """Processes messages until SIGTERM, and then those that have arrived by that time."""
    heart = Heartbeat(launch.endpoints.beat("detokenizer"))
    inbox: Inbox[ToDetokenizer] = Inbox(launch.endpoints.detokenizer, ToDetokenizer)
    signal.signal(signal.SIGTERM, lambda *_: inbox.close())
    answers = Answers(tokenizer_of(launch.config.model, read_checkpoint(launch.endpoints)))
    engines = [Outbox(each.engine) for each in launch.endpoints.replicas(launch.config.parallel.num_schedulers)]
    workers: dict[int, Outbox] = {}
    # Tables with hundreds of thousands of strings would make every full garbage collection slow.
    gc.collect()
    gc.freeze()
    turns = 0
    while True:
        turns += 1
        heart.beat(turns, State.READY, num_running=len(answers))
        messages = inbox.drain(block_s=_IDLE_S)
        for message in messages:
            answers.handle(message)
        home, stops = answers.take()
        for number, engine in enumerate(engines):
            engine.send_all(stops if len(engines) == 1 else [stop for stop in stops if home_replica(stop.id) == number])
        for worker, news in home.items():
            if worker not in workers:
                workers[worker] = Outbox(launch.endpoints.api(worker))
            workers[worker].send_all(news)
        if inbox.closed and not messages:
            break
    for outbox in (*engines, *workers.values()):
        outbox.close(wait_s=_LAST_WORDS_S)
