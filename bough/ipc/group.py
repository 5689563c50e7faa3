"""The machines of one engine, as seen by their launchers: which have joined, which are alive, and why the group ended.

The launcher of machine 0 runs the group's `StoreServer`; the other launchers send a heartbeat twice per second. A
heartbeat does not depend on the engine process, so that a machine in a long computation does not count as dead. Three
seconds without a heartbeat end the group on both sides, and so does a failure that one machine reports.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import threading
import time
from dataclasses import replace
from typing import Any, Protocol

import msgspec
from msgspec import Struct

import bough
from bough.config.concerns import Config, LogConfig, ServerConfig
from bough.config.hf import Checkpoint
from bough.core.errors import BoughError, ConfigError, Unavailable
from bough.ipc.link import NotTrusted
from bough.ipc.store import LocalStore, Store, StoreServer

_log = logging.getLogger(__name__)

BEAT_S = 0.5
LOST_S = 3.0
"""Seconds without a heartbeat, or without an answer, after which a machine counts as dead."""
_TELL_EVERY_S = 10.0
_FAREWELL_S = 1.5
"""Seconds that machine 0 waits at its end until the others have noticed it."""


class GroupEnded(Unavailable):
    """Machine 0 was stopped, and so this machine must stop."""


class MachineLost(BoughError):
    """A machine of the group has died, hangs, or can't be reached."""

    code = "machine_lost"


class JoinFacts(Struct, frozen=True, kw_only=True):
    """Facts that must be equal on all machines, and a name that distinguishes two processes with the same number."""

    version: str
    settings: str
    """Digest of the settings that determine the computation."""
    weights: str
    """Digest of the checkpoint's config and of the names, types and shapes of its tensors."""
    name: str

    @classmethod
    def of(cls, config: Config, checkpoint: Checkpoint) -> JoinFacts:
        alike = replace(
            config,
            model=replace(config.model, model="", tokenizer="", served_model_name=""),
            parallel=replace(config.parallel, node_rank=0, dist_init_addr="", dist_secret=""),
            server=ServerConfig(),
            log=LogConfig(),
        )
        return cls(
            version=bough.__version__,
            settings=_digest(alike),
            weights=_digest([checkpoint.config, checkpoint.tensors]),
            name=secrets.token_hex(8),
        )


class _Cause(Struct):
    what: str
    why: str = ""
    fix: str = ""


class Group(Protocol):
    """One launcher's membership in the group of machines."""

    generation: int

    def look(self) -> BoughError | None:
        """Why the group cannot continue, or None. Returns immediately; called a few times per second."""
        ...

    def fail(self, error: BoughError) -> None:
        """Reports to the others that this machine has failed."""
        ...

    def close(self) -> None:
        """Leaves the group, because this machine was stopped."""
        ...


class Leader:
    """The group as machine 0 sees it."""

    def __init__(self, server: StoreServer, facts: JoinFacts, num_nodes: int, timeout_s: float) -> None:
        """`timeout_s`: how long the others may take to join."""
        self.generation = server.generation
        self._store: LocalStore = server.local()
        self._facts = facts
        self._absent = set(range(1, num_nodes))
        self._beats: dict[int, tuple[int, float]] = {}
        self._began_s = self._told_s = time.monotonic()
        self._timeout_s = timeout_s

    def look(self) -> BoughError | None:
        reported = self._reported()
        if reported is not None:
            return reported
        for node in sorted(self._absent):
            if self._store.check([_node(node)]):
                self._absent.discard(node)
                self._beats[node] = (0, time.monotonic())
                problem = self._differs(node)
                if problem is not None:
                    return problem
                _log.info("machine %d has joined", node)
        return self._overdue() or self._silent()

    def opened(self, facts: dict[str, Any]) -> None:
        """Reports that the engine accepts requests, so that the other machines are ready, too."""
        self._store.set("ready", msgspec.json.encode(facts))

    def fail(self, error: BoughError) -> None:
        self._store.set("failed", _cause(error))

    def close(self) -> None:
        if not self._store.check(["failed"]):
            self._store.set("ended", b"1")
        give_up_s = time.monotonic() + _FAREWELL_S
        while self._beats and time.monotonic() < give_up_s:
            if all(self._store.check([f"left/{node}"]) for node in self._beats):
                return
            time.sleep(0.02)

    def _reported(self) -> BoughError | None:
        for node in self._beats:
            if self._store.check([f"failed/{node}"]):
                cause = msgspec.json.decode(self._store.get(f"failed/{node}"), type=_Cause)
                return BoughError(what=f"machine {node}: {cause.what}", why=cause.why, fix=cause.fix)
        return None

    def _differs(self, node: int) -> BoughError | None:
        theirs = msgspec.json.decode(self._store.get(_node(node)), type=JoinFacts)
        for what, mine, other in (
            ("version of bough", self._facts.version, theirs.version),
            ("settings", self._facts.settings, theirs.settings),
            ("checkpoint", self._facts.weights, theirs.weights),
        ):
            if mine != other:
                return ConfigError(
                    what=f"machine {node} has another {what} than machine 0"
                    if what != "settings"
                    else f"machine {node} has other settings than machine 0",
                    why=f"{other} there, {mine} here",
                    fix="start every machine with the same version, flags and model; only --node-rank differs",
                )
        return None

    def _overdue(self) -> BoughError | None:
        if not self._absent:
            return None
        now = time.monotonic()
        names = ", ".join(f"machine {node}" for node in sorted(self._absent))
        if now - self._began_s > self._timeout_s:
            return MachineLost(
                what=f"{names} did not join within {self._timeout_s:g} s (--dist-timeout-s)",
                why="it was not started, or can't reach --dist-init-addr",
                fix="see the log there",
            )
        if now - self._told_s > _TELL_EVERY_S:
            self._told_s = now
            _log.info("waiting for %s", names)
        return None

    def _silent(self) -> BoughError | None:
        now = time.monotonic()
        for node, (count, seen_s) in list(self._beats.items()):
            beats = self._store.add(f"beat/{node}", 0)
            if beats != count:
                self._beats[node] = (beats, now)
            elif now - seen_s > LOST_S:
                return MachineLost(
                    what=f"machine {node} was not heard of for {LOST_S:g} s",
                    why="it has died, was stopped, or can't be reached",
                    fix="see the log there; --supervise starts the group again",
                )
        return None


class Member:
    """The group as another machine sees it. A thread sends heartbeats."""

    def __init__(self, address: str, secret: str, facts: JoinFacts, node: int, timeout_s: float) -> None:
        """Joins. Raises `Unavailable` or `NotTrusted` if machine 0 can't be joined, `ConfigError` if another process has
        this number already."""
        self._store = Store(address, secret=secret, timeout_s=timeout_s, answer_s=LOST_S)
        self.generation = self._store.generation
        self._node = node
        mine = msgspec.json.encode(facts)
        if self._store.compare_set(_node(node), b"", mine) != mine:
            raise ConfigError(
                what=f"machine {node} has joined already",
                why="two servers were started with the same --node-rank",
                fix="give each machine its own number, from 0 on",
                param="node_rank",
            )
        self.ready: dict[str, Any] | None = None
        """Facts of the engine, once it accepts requests."""
        self._problem: BoughError | None = None
        self._told = False
        self._leaving = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="group-beat", daemon=True)
        self._beating.start()

    def look(self) -> BoughError | None:
        return self._problem

    def fail(self, error: BoughError) -> None:
        if self._problem is None and not self._told:
            self._told = True
            with contextlib.suppress(BoughError):
                self._store.set(f"failed/{self._node}", _cause(error))

    def close(self) -> None:
        if self._problem is None:
            self.fail(Unavailable(what="it was stopped"))
        else:
            with contextlib.suppress(BoughError):
                self._store.set(f"left/{self._node}", b"1")
        self._leaving.set()
        self._beating.join(BEAT_S)
        self._store.close()

    def _beat(self) -> None:
        while not self._leaving.is_set():
            try:
                self._store.add(f"beat/{self._node}", 1)
                if self._store.check(["failed"]):
                    cause = msgspec.json.decode(self._store.get("failed"), type=_Cause)
                    self._problem = BoughError(what=f"machine 0: {cause.what}", why=cause.why, fix=cause.fix)
                elif self._store.check(["ended"]):
                    self._problem = GroupEnded(what="machine 0 has ended")
                elif self.ready is None and self._store.check(["ready"]):
                    self.ready = msgspec.json.decode(self._store.get("ready"))
            except (Unavailable, NotTrusted) as error:
                self._problem = MachineLost(
                    what="machine 0 can't be reached any more", why=error.why or error.what, fix="see the log there"
                )
            if self._problem is not None:
                return
            self._leaving.wait(BEAT_S)


def _node(number: int) -> str:
    return f"node/{number}"


def _cause(error: BoughError) -> bytes:
    return msgspec.json.encode(_Cause(error.what, error.why, error.fix))


def _digest(value: Any) -> str:
    encoded = msgspec.json.encode(value, order="deterministic", enc_hook=str)
    return hashlib.sha256(encoded).hexdigest()[:16]
