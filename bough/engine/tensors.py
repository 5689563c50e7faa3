"""`--tensor-dump-dir`: what each layer made of one request's tokens, in a file that `bough debug compare` reads.

A request whose id begins with `dump-` is recorded. Its steps run without captured graphs and block by block, so that every
layer is seen; other requests' steps are as always. The file holds numbers only: token ids, positions, and float32 tensors
whose first dimension is the tokens, in the order of their positions.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save
from torch import Tensor, nn

from bough.core.errors import ConfigError
from bough.core.step import Launched, Runner, Step
from bough.layers.batch import Batch
from bough.layers.decoder import Decoder, one_by_one
from bough.layers.norm import LayerNorm, RMSNorm
from bough.layers.stream import Product, Stream, value_of
from bough.platform.whole_file import write_whole
from bough.quantization.scheme import ExpertWeights, Matrix
from bough.runner.model_runner import ModelRunner
from bough.scheduler.queues import Queues

PREFIX = "dump-"
MOST_TOKENS = 256
"""Tokens of a request that are recorded; a layer's output is wide."""
MOST_FILES = 64
"""Files that one process writes."""

_log = logging.getLogger(__name__)
_Array = npt.NDArray[Any]


class _Recording:
    """One request's tensors, gathered step by step."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.num_tokens = 0
        self.rows: dict[str, list[_Array]] = {}
        self.positions: list[_Array] = []
        self.logits_at: list[_Array] = []

    def add(self, name: str, rows: _Array) -> None:
        self.rows.setdefault(name, []).append(rows)

    def tensors(self) -> dict[str, _Array]:
        """By name; of a position that was computed twice (after a retraction), the later one."""
        found: dict[str, _Array] = {}
        for name, parts in self.rows.items():
            at = np.concatenate(self.logits_at if name == "logits" else self.positions)
            _, last = np.unique(at[::-1], return_index=True)
            found[name] = np.ascontiguousarray(np.concatenate(parts)[len(at) - 1 - last])
        found["positions"] = np.unique(np.concatenate(self.positions))
        if self.logits_at:
            found["logits_at"] = np.unique(np.concatenate(self.logits_at))
        return found


class DumpingRunner:
    """A `Runner` that watches the model while it computes the rows of chosen requests."""

    def __init__(
        self, inner: Runner, local: ModelRunner, queues: Queues, directory: Path, *, several_ranks: bool
    ) -> None:
        """Raises `ConfigError` where the model can't be watched or nothing can be written."""
        model = local.forward.model
        if not isinstance(model, Decoder):
            raise _refusal(f"{type(model).__name__} has no layers to watch", "leave out --tensor-dump-dir")
        if several_ranks and local.graphs is not None:
            raise _refusal("ranks must all run graphs or none", "add --disable-cuda-graph")
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _refusal(error.strerror or "it can't be written", "name a directory that can be written") from error
        self._inner = inner
        self._local = local
        self._model = model
        self._queues = queues
        self._directory = directory
        self._recordings: dict[int, _Recording] = {}
        self._files = 0

    def launch(self, step: Step) -> Launched:
        self._write_ended()
        chosen = self._chosen(step)
        if not chosen:
            return self._inner.launch(step)
        with self._watching(step, chosen):
            return self._inner.launch(step)

    def clear(self) -> None:
        self._inner.clear()
        self._write_ended()

    def _chosen(self, step: Step) -> dict[int, _Recording]:
        """Rows of the step that are recorded."""
        queues, chosen = self._queues, {}
        for row, slot in enumerate(step.slots.tolist()):
            job = queues.prefilling.get(slot) or queues.running.get(slot)
            if job is None or not job.job.ask.rid.startswith(PREFIX):
                continue
            number = job.job.id
            if number not in self._recordings and self._files + len(self._recordings) >= MOST_FILES:
                continue
            recording = self._recordings.setdefault(number, _Recording(job.job.ask.rid))
            if recording.num_tokens + int(step.num_query[row]) <= MOST_TOKENS:
                recording.num_tokens += int(step.num_query[row])
                chosen[row] = recording
        return chosen

    @contextmanager
    def _watching(self, step: Step, chosen: dict[int, _Recording]) -> Iterator[None]:
        watcher = _Watcher(step, chosen)
        graphs, self._local.graphs = self._local.graphs, None
        narrows, self._local.forward.narrows = self._local.forward.narrows, False
        self._local.forward.model = _Apart(self._model)
        handles = [module.register_forward_hook(watcher.hook(name)) for name, module in _watched(self._model)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._local.forward.model = self._model
            self._local.graphs, self._local.forward.narrows = graphs, narrows

    def _write_ended(self) -> None:
        for number in [each for each in self._recordings if each not in self._queues.where]:
            recording = self._recordings.pop(number)
            name = re.sub(r"[^A-Za-z0-9._-]", "_", recording.rid)[:100]
            path = self._directory / f"{name}.{os.getpid()}-{self._files:02d}.safetensors"
            self._files += 1
            try:
                write_whole(path, save(recording.tensors()))
            except OSError as error:
                _log.warning("can't write %s: %s", path, error.strerror)
            else:
                _log.info("the tensors of %s are in %s", recording.rid, path)


class _Apart:
    """The model with every norm and every product computed by itself, and block by block, so that each can be seen."""

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def forward(self, batch: Batch) -> Tensor:
        stream = Stream(self._model.embed(batch), batch, fuses=False)
        one_by_one(self._model, stream, batch)
        return self._model.end(stream)

    def logits(self, hidden_LD: Tensor) -> Tensor:
        return self._model.logits(hidden_LD)


class _Watcher:
    """Hooks of one step: each takes the chosen rows out of a module's output."""

    def __init__(self, step: Step, chosen: dict[int, _Recording]) -> None:
        ends = np.cumsum(step.num_query)
        self._num_tokens = step.num_tokens
        self._spans = [
            (recording, int(ends[row] - step.num_query[row]), int(ends[row])) for row, recording in chosen.items()
        ]
        sampled = np.flatnonzero(step.samples)
        self._num_samples = len(sampled)
        self._samples = [
            (recording, int(np.searchsorted(sampled, row))) for row, recording in chosen.items() if step.samples[row]
        ]
        for row, recording in chosen.items():
            first, count = int(step.context[row]), int(step.num_query[row])
            recording.positions.append(np.arange(first, first + count, dtype=np.int64))
            if step.samples[row]:
                recording.logits_at.append(np.array([first + count - 1], np.int64))

    def hook(self, name: str) -> Any:
        """What to call with (module, inputs, output)."""
        if name == "logits":
            return lambda module, inputs, output: self._logits(output)
        if name == "embed":
            return lambda module, inputs, output: self._embedded(inputs[0], output)
        if name.count(".") == 1:
            return lambda module, inputs, output: self._keep(name, inputs[0].tap())
        return lambda module, inputs, output: self._made(name, output)

    def _embedded(self, batch: Batch, output: Tensor) -> None:
        self._keep("ids", batch.ids_T)
        self._keep("embed", output)

    def _made(self, name: str, output: Any) -> None:
        if isinstance(output, Tensor | Product):
            self._keep(name, value_of(output))
        elif isinstance(output, tuple):
            for number, each in enumerate(output):
                if isinstance(each, Tensor):
                    self._keep(f"{name}.{number}", each)

    def _keep(self, name: str, values: Tensor) -> None:
        if len(values) == self._num_tokens:
            for recording, begin, end in self._spans:
                recording.add(name, _host(values[begin:end]))

    def _logits(self, values: Tensor) -> None:
        if len(values) == self._num_samples:
            for recording, at in self._samples:
                recording.add("logits", _host(values[at : at + 1]))


def _watched(model: Decoder) -> Iterator[tuple[str, nn.Module]]:
    yield "embed", model.embed
    for number, block in enumerate(model.layers):
        yield f"layers.{number}", block
        for name, part in block.named_modules():
            if name and not isinstance(part, RMSNorm | LayerNorm | Matrix | ExpertWeights):
                yield f"layers.{number}.{name}", part
    yield "logits", model.head


def _host(values: Tensor) -> _Array:
    """A copy of its own, flat but for the first dimension: float32, or int64 for ids."""
    plain = values.float() if values.is_floating_point() else values
    array = np.array(plain.cpu().numpy())
    return array if array.ndim == 1 else array.reshape(len(array), -1)


def _refusal(why: str, fix: str) -> ConfigError:
    return ConfigError(what="tensors can't be dumped", why=why, fix=fix, param="tensor_dump_dir")
