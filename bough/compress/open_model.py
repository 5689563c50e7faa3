"""A model in plain weights whose tensors can be replaced, one by one, after it has been loaded."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from bough.compress.record import Recording
from bough.config.hf import Checkpoint
from bough.core.errors import ConfigError, WeightsError
from bough.layers.build import Build
from bough.layers.decoder import Decoder
from bough.layers.place import place_weights
from bough.models.registry import facts_of, find_architecture
from bough.weights.mapping import Mapping
from bough.weights.slots import Slot, owners_of
from bough.weights.stored import Stored, read_all


class Replaceable:
    """A stored tensor that can be replaced by one in memory."""

    def __init__(self, name: str, base: Stored) -> None:
        self.name = name
        self._base = base
        self.value: Tensor | None = None
        """In place of what is stored."""

    @property
    def kind(self) -> str:
        return self._base.kind

    @property
    def shape(self) -> tuple[int, ...]:
        return self._base.shape

    def read(self, start: int, stop: int) -> Tensor:
        if self.value is None:
            return self._base.read(start, stop)
        return self.value[start:stop] if self.value.dim() else self.value

    def blocks(self, start: int, stop: int) -> Tensor:
        raise ValueError(f"{self.name} is read as floats here")


class OpenModel:
    """A decoder on a device, beside the tensors of its checkpoint."""

    def __init__(self, checkpoint: Checkpoint, tensors: dict[str, Stored], device: torch.device) -> None:
        facts = facts_of(checkpoint.config, "auto")
        if facts.through_transformers:
            raise _cannot(checkpoint, "it runs through transformers' own modules")
        architecture = find_architecture(facts.architecture)
        self.checkpoint = checkpoint
        self.names: Mapping = architecture.weights
        self.tensors = {name: Replaceable(name, stored) for name, stored in tensors.items()}
        self.scheme = Recording()
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        build = Build(scheme=self.scheme, dtype=dtype, device=device, context_length=min(facts.max_context, 8192))
        made = architecture.make(facts, build)
        if not isinstance(made, Decoder) or type(made).forward is not Decoder.forward:
            raise _cannot(checkpoint, f"{facts.architecture} is more than a stack of blocks")
        self.model = made
        place_weights(made)
        self.device = device
        self._fill()
        made.eval()

    def _fill(self) -> None:
        slots = {name: slot for owner in owners_of(self.model) for name, slot in owner.slots.items()}
        fit = self.names.fit(dict(self.tensors), slots)
        if fit.problems:
            listed = "; ".join(f"{what}: {', '.join(names[:5])}" for what, names in fit.problems.items())
            raise WeightsError(what=f"the weights of {self.checkpoint.name} don't fit its config", why=listed)
        by_slot = {id(slot): name for name, slot in slots.items()}
        self._pairs: dict[str, list[tuple[Slot, Stored]]] = defaultdict(list)
        self.source_of: dict[str, tuple[str, Stored]] = {}
        """Slot -> the name of its tensor, and the view of it that fills the slot."""
        with torch.no_grad():
            for slot, view in fit.pairs:
                name = view.name.partition("[")[0]  # of a stack of experts, a view says which
                self._pairs[name].append((slot, view))
                self.source_of[by_slot[id(slot)]] = (name, view)
                slot.put(view)

    def weight(self, name: str) -> Tensor:
        """float32, as it is now: a tensor of the checkpoint, on the model's device."""
        return read_all(self.tensors[name]).to(device=self.device, dtype=torch.float32)

    @torch.no_grad()
    def replace(self, name: str, value: Tensor) -> None:
        """The checkpoint's tensor becomes `value`, in the model too."""
        self.tensors[name].value = value.cpu()
        for slot, view in self._pairs[name]:
            slot.put(view)

    def rows_of(self, slot: str) -> tuple[str, Tensor]:
        """The tensor that a slot is filled from, and its rows there, in the slot's order."""
        name, view = self.source_of[slot]
        tensor = self.tensors[name]
        kept, count = tensor.value, tensor.shape[0]
        rows = torch.arange(count)
        tensor.value = rows[:, None].expand(tensor.shape) if len(tensor.shape) > 1 else rows
        try:
            found = read_all(view)
            return name, (found[:, 0] if found.dim() > 1 else found).clone()
        finally:
            tensor.value = kept


def _cannot(checkpoint: Checkpoint, why: str) -> ConfigError:
    return ConfigError(
        what=f"{checkpoint.name} can't be calibrated",
        why=why,
        fix="use --to fp8, int8 or int4, which need no calibration",
        param="to",
    )
