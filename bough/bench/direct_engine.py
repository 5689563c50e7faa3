"""An engine in this process, without servers and messages between processes: a model with dummy weights, the scheduler
and the loop, which the caller runs. Prompts can be put into the prefix cache without computing them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bough.cache.prefix import PrefixCache
from bough.config.server_args import build_config
from bough.config.speculation import drafts_of_step
from bough.core.errors import Aborted
from bough.core.media import MediaItem
from bough.core.messages import Generate, ToDetokenizer, ToEngine, Tokens, pack_ids
from bough.core.sampling import SamplingParams
from bough.core.step import I64
from bough.distributed.mesh import Mesh
from bough.engine.build import load_model, make_runner, open_device, warm_up
from bough.engine.decide import decide
from bough.engine.loop import Loop
from bough.engine.speculation import LoadedDraft, drafter_of, load_draft
from bough.platform.facts import detect
from bough.runner.model_runner import ModelRunner
from bough.runner.proposing import Proposer
from bough.scheduler.accept import abort_all
from bough.scheduler.limits import Limits
from bough.scheduler.media import MediaAccount
from bough.scheduler.queues import Queues


class _Mailbox:
    """A channel that delivers its messages once, and drops answers, or records their times if asked to."""

    closed = False

    def __init__(self) -> None:
        self.messages: list[ToEngine] = []
        self.times: dict[int, list[float]] | None = None

    def drain(self, block_s: float) -> list[ToEngine]:
        messages, self.messages = self.messages, []
        return messages

    def send(self, message: ToDetokenizer) -> None:
        if self.times is not None and isinstance(message, Tokens):
            now = time.perf_counter()
            for request_id, count in zip(message.ids, message.counts, strict=True):
                self.times.setdefault(request_id, []).extend([now] * count)


class DirectEngine:
    """Serves one model with dummy weights, configured like `bough serve` with `settings`."""

    def __init__(
        self, config: dict[str, Any], folder: Path, *, proposer: Proposer | None = None, **settings: Any
    ) -> None:
        """`config`: of the model, written to `folder`. `proposer`: drafts in place of what the settings name."""
        (folder / "config.json").write_text(json.dumps(config))
        wanted = build_config(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, log_level="warning", **settings
        )
        decided = decide(wanted, detect(wanted.device.device))
        checkpoint, facts, _, resolved, draft = decided
        self.config = resolved.config
        device = open_device(self.config, 0)
        mesh = Mesh.tensor(0, 1)
        model = load_model(checkpoint, self.config, resolved.plan, device, mesh)
        drafts: LoadedDraft | None = None
        if draft is not None:
            drafts = load_draft(draft, model, self.config, resolved.plan, device, mesh, facts)
            drafts = drafts if proposer is None else drafts._replace(proposer=proposer)
        runner = make_runner(model, self.config, resolved.plan, device, facts, drafts=drafts)
        assert isinstance(runner, ModelRunner), "it generates"
        self.runner = runner
        self.device = device.torch_device
        self.vocab = facts.vocab
        step_drafts = drafts_of_step(self.config.speculative, device.kind, runner.limits.num_slots)
        limits = Limits.of(runner.limits, self.config.scheduler, max_step_drafts=step_drafts)
        self.limits = limits
        self.cache = PrefixCache(num_pages=limits.num_pages, layout=limits.layout)
        self.queues = Queues(limits)
        self.queues.drafter = drafter_of(self.config, limits, decided)
        self.features: dict[str, npt.NDArray[Any]] = {}
        """Features of media, by the path of their item."""
        if limits.media is not None:
            self.queues.media = MediaAccount(limits.media, lambda given: self.features[given.path])
        self._mailbox = _Mailbox()
        self._next_id = 0
        self._loop = Loop(
            runner=runner,
            queues=self.queues,
            cache=self.cache,
            limits=limits,
            inbox=self._mailbox,
            outbox=self._mailbox,
            depth=1 if self.config.scheduler.overlap_schedule else 0,
        )

    def fill_kv(self) -> None:
        """Fills all pages with random numbers, because attention over zeros takes less power."""
        for cache in self.runner.forward.pool.stores:
            if cache.dtype.itemsize > 1:
                cache.normal_()

    def pretend_cached(self, prompt: I64) -> None:
        """Puts a prompt's full pages into the tree as if they had been computed."""
        key = prompt[: len(prompt) // self.cache.page_size * self.cache.page_size]
        found = self.cache.match_prefix("", key, len(key))
        node, _ = self.cache.lock("", key, found.num_tokens)
        rest = key[found.num_tokens :]
        columns, height = len(rest) // self.cache.page_size, self.limits.layout.column_pages
        own = self.cache.alloc(columns * height).reshape(height, columns)
        gone = self.limits.layout.gone(found.num_tokens)
        node = self.cache.insert(node, rest, own, step=-1, gone=gone).node
        self.cache.release(node, np.empty(0, np.int32), gone)

    def submit(
        self,
        prompts: list[I64],
        sampling: SamplingParams,
        *,
        media: tuple[MediaItem, ...] = (),
        positions: bytes = b"",
        stream: bool = False,
    ) -> list[int]:
        """Queues requests, whose answers are sent whole unless they `stream`, and returns their ids. `media`, `positions`:
        of each."""
        ids_given = []
        for prompt in prompts:
            self._next_id += 1
            ids_given.append(self._next_id)
            ids = pack_ids(prompt.astype(np.int32))
            ask = Generate(
                id=self._next_id, rid=str(self._next_id), prompt=ids, sampling=sampling, stream=stream, media=media,
                positions=positions,
            )  # fmt: skip
            self._mailbox.messages.append(ask)
        return ids_given

    def token_times(self) -> dict[int, list[float]]:
        """From now on, when each token of each request came, by `time.perf_counter`; anew with every call."""
        self._mailbox.times = {}
        return self._mailbox.times

    def turn(self) -> None:
        with torch.inference_mode():
            self._loop.turn()

    def finish(self) -> None:
        """Runs the loop until nothing is left to do."""
        while not self.queues.idle or self._mailbox.messages:
            self.turn()
        self.turn()

    def warm_up(self) -> None:
        """Captures and compiles what a server prepares before its first request."""
        warm_up(self.runner, self.config)

    def settle_down(self) -> None:
        """Captures the graphs that were missed, as a server would in its next idle moment."""
        if self.runner.graphs is not None:
            with torch.inference_mode():
                while self.runner.graphs.capture_one_wanted():
                    pass

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return 0 if self.runner.graphs is None else self.runner.graphs.num_captured

    def timed_turns(self, count: int) -> float:
        """Seconds per iteration. Only device work of these iterations counts, as long as one step is in flight at both
        ends."""
        begin = time.perf_counter()
        for _ in range(count):
            self.turn()
        return (time.perf_counter() - begin) / count

    def flush(self) -> None:
        """Empties the prefix cache."""
        self.cache.flush()

    def drop_all(self) -> None:
        """Ends all requests, and empties the prefix cache."""
        abort_all(self.queues, self.cache, Aborted(what="measured"), now=time.monotonic())
        self.finish()
        self.flush()
