"""Whether a checkpoint's weights can be read at all: told by its config, before anything is loaded. Needs no torch."""

from __future__ import annotations

from typing import Final, get_args

from bough.config.concerns import Quantization
from bough.config.hf import Checkpoint
from bough.core.errors import UnsupportedModel

KNOWN: Final[tuple[str, ...]] = get_args(Quantization)
"""What `--quantization` may say."""


def refuse_unreadable(checkpoint: Checkpoint) -> None:
    """Raises `UnsupportedModel` if the weights are in a quantised form that no scheme reads."""
    method = (checkpoint.config.get("quantization_config") or {}).get("quant_method")
    if method and checkpoint.kind != "config-only":
        raise UnsupportedModel(
            what=f"the weights of {checkpoint.name} are quantised with {method!r}, which can't be read",
            why=f"known: {', '.join(KNOWN[1:])}",
            fix="use the model's unquantised or GGUF checkpoint",
        )
