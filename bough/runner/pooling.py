"""Runs steps of a pooling model: the hidden states of texts become one result each on the device; nothing is sampled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bough.config.pooling_facts import PoolingFacts
from bough.core.step import I64, Launched, Mask, Outcome, RunnerLimits, Step, StepMedia
from bough.kernels.attention.inputs import HostLengths
from bough.kernels.step_start import SlotState
from bough.layers.pooling import Spans
from bough.memory.mha import KVPool
from bough.memory.transfer import download, upload
from bough.models.pooled import PooledModel
from bough.platform.device import Device
from bough.runner.context import AttentionFactory
from bough.runner.encoder import MediaTensors, TowerRunner, media_tensors, turn_slots
from bough.runner.forward import Extent, Forward
from bough.runner.inference import without_gradients
from bough.runner.inputs import Packer, StepTensors, stage_bytes
from bough.runner.staging import Stage, Stages
from bough.sampler.state import SlotParams


class PoolingRunner:
    """A `core.step.Runner`. Texts that must be whole (`PoolingFacts.whole`) come in one chunk and leave no KV behind."""

    graphs = None

    def __init__(
        self,
        model: PooledModel,
        pooling: PoolingFacts,
        pool: KVPool,
        limits: RunnerLimits,
        attention: AttentionFactory,
        device: Device,
        encoder: TowerRunner | None = None,
    ) -> None:
        """`encoder`: computes media; None: the model takes text only."""
        self.limits = limits
        self.encoder = encoder
        self.machine = device
        self.pooling = pooling
        self.pool = pool
        self._device = device.torch_device
        self._model = model
        turns = limits.media is not None and limits.media.axes > 0
        state = SlotState.make(limits.num_slots, limits.pages_per_slot, self._device, turns=turns)
        self._forward = Forward(model, pool, state, attention)  # type: ignore[arg-type]
        self._packer = Packer(limits.num_slots, limits.pages_per_slot, limits.layout)
        self._params = SlotParams(limits.num_slots, limits.vocab_size)
        self._stages = Stages(device, stage_bytes(limits))
        self._second_at = np.zeros(limits.num_slots + 1, np.int32)

    @without_gradients
    def launch(self, step: Step) -> Launched:
        for setup in step.setups:
            self._second_at[setup.slot] = setup.second_at
        samples = self._params.gather(step)
        stage = self._stages.take()
        tensors = self._packer.upload(step, samples, stage)
        extent = Extent(
            max_query=int(step.num_query.max()),
            max_kv=int((step.context + step.num_query).max()),
            host=HostLengths(num_query_R=step.num_query, context_R=step.context),
        )
        media = self._media(step.media) if step.media is not None else None
        if self.pooling.whole:
            broken = np.flatnonzero((step.context != 0) | ~step.samples)
            if len(broken):
                raise ValueError("a text of a model that must see it whole came in pieces")
            results = self._whole(step, tensors, extent, media)
        else:
            hidden = self._forward.hidden(tensors, extent, tensors.sample_at_L, media=media)
            results = self._model.results(hidden, None)
        return LaunchedPool(self, step, samples.rows, results, stage)

    def idle(self) -> None:
        """There is nothing to prepare in quiet moments."""

    def clear(self) -> None:
        self.machine.synchronize()

    def _whole(self, step: Step, tensors: StepTensors, extent: Extent, media: MediaTensors | None) -> Tensor:
        segments = self._segments(step)
        hidden = self._forward.hidden(tensors, extent, None, segments=segments, media=media)
        return self._model.results(hidden, Spans.of(tensors.query_start_R1, step.num_tokens))

    def _media(self, media: StepMedia) -> MediaTensors | None:
        turn_slots(self._forward.state, media, self._device)
        if self.encoder is not None and media.encode:
            self.encoder.encode(media.encode)
        return media_tensors(media, self.encoder, self._device) if len(media.at) or len(media.axes_at) else None

    def _segments(self, step: Step) -> Tensor | None:
        """The segment of each token; None: there are no pairs in the step."""
        second = self._second_at[step.slots]
        if not second.any():
            return None
        length = step.num_query
        place = np.arange(step.num_tokens) - np.repeat(np.cumsum(length) - length, length)
        border = np.repeat(np.where(second > 0, second, length), length)
        return upload((place >= border).astype(np.int64), self._device)


class LaunchedPool:
    """A step in flight."""

    needs_masks = False

    def __init__(self, runner: PoolingRunner, step: Step, rows: I64, results: Tensor, stage: Stage) -> None:
        self._step = step
        self._rows = rows
        self._sparse = runner.pooling.task == "sparse"
        self._results = download(results)
        self._stage = stage
        stage.seal()

    @property
    def step(self) -> Step:
        return self._step

    def sample(self, masks: Mask) -> None:
        raise ValueError("a pooling model samples nothing")

    def wait(self) -> Outcome:
        self._stage.wait()
        values = self._results.numpy()
        finite = np.isfinite(values).all(axis=1)
        embeddings, failed = {}, {}
        for at, row in enumerate(self._rows.tolist()):
            if not finite[at]:
                failed[row] = "the model's result is not finite"
            else:
                embeddings[row] = as_pairs(values[at]) if self._sparse else values[at]
        return Outcome(
            tokens=np.full((self._step.num_rows, 1), -1, np.int32),
            counts=np.zeros(self._step.num_rows, np.int32),
            embeddings=embeddings,
            failed=failed,
        )


def as_pairs(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Sparse weights as the ids of those that are not 0, then their values (ids are exact in float32)."""
    ids = np.flatnonzero(weights)
    return np.concatenate([ids.astype(np.float32), weights[ids]])
