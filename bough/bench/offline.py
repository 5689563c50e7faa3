"""Engines with a common interface for benchmarks: prompts of token ids in, token ids out, random weights of a
configuration.

Each is started with the same arguments: dummy weights, no tokenizer, bf16, context 16,384, 512 running requests. `bough` is
this package; `vllm` and `sglang` must be installed to be compared with; `module:factory` names any other (the factory
gets the model's directory and the settings, and returns an `OfflineEngine`).
"""

from __future__ import annotations

import importlib
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from bough.core.errors import ConfigError
from bough.offline import Engine

Prompts = list[list[int]]

_VOCAB = 32_000
"""Token ids are drawn below this, for every model, so that all get the same prompts."""


class OfflineEngine(Protocol):
    def generate(
        self, prompts: Prompts, new_tokens: Sequence[int], *, temperature: float = 0.0, top_p: float = 1.0
    ) -> Prompts:
        """Generates exactly `new_tokens[i]` tokens for each prompt, beyond any end of text."""
        ...

    def flush(self) -> None:
        """Empties the prefix cache."""
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """An engine that says how many tokens' KV fits."""

    def kv_tokens(self) -> int: ...


class BoughOffline:
    def __init__(self, model: str, **settings: Any) -> None:
        arguments: dict[str, Any] = {
            "model_path": model,
            "load_format": "dummy",
            "dummy_weights": "even",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "context_length": 16384,
            "mem_fraction_static": 0.85,
            "max_running_requests": 512,
            "log_level": "warning",
        }
        self.engine = Engine(**(arguments | settings))

    def generate(
        self, prompts: Prompts, new_tokens: Sequence[int], *, temperature: float = 0.0, top_p: float = 1.0
    ) -> Prompts:
        sampling = [
            {"temperature": temperature, "top_p": top_p, "max_new_tokens": count, "ignore_eos": True}
            for count in new_tokens
        ]
        answers = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        assert isinstance(answers, list), "a batch gives a list"
        return [list(answer["output_ids"]) for answer in answers]

    def flush(self) -> None:
        self.engine.flush_cache()

    def kv_tokens(self) -> int:
        """Tokens whose KV fits."""
        return int(self.engine.get_server_info()["kv_tokens"])


class VllmOffline:
    def __init__(self, model: str, **settings: Any) -> None:
        vllm = importlib.import_module("vllm")
        self._sampling = vllm.SamplingParams
        arguments: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": 16384,
            "gpu_memory_utilization": 0.85,
            "enable_prefix_caching": True,
            "max_num_seqs": 512,
            "disable_log_stats": True,
        }
        self._llm = vllm.LLM(model=model, **(arguments | settings))

    def generate(
        self, prompts: Prompts, new_tokens: Sequence[int], *, temperature: float = 0.0, top_p: float = 1.0
    ) -> Prompts:
        sampling = [
            self._sampling(temperature=temperature, top_p=top_p, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in new_tokens
        ]
        answers = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def flush(self) -> None:
        self._llm.reset_prefix_cache()


class SglangOffline:
    def __init__(self, model: str, **settings: Any) -> None:
        arguments: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "context_length": 16384,
            "mem_fraction_static": 0.85,
            "max_running_requests": 512,
            "log_level": "error",
        }
        self._engine = importlib.import_module("sglang").Engine(model_path=model, **(arguments | settings))

    def generate(
        self, prompts: Prompts, new_tokens: Sequence[int], *, temperature: float = 0.0, top_p: float = 1.0
    ) -> Prompts:
        sampling = [
            {"temperature": temperature, "top_p": top_p, "max_new_tokens": count, "ignore_eos": True}
            for count in new_tokens
        ]
        answers = self._engine.generate(input_ids=prompts, sampling_params=sampling)
        return [list(answer["output_ids"]) for answer in answers]

    def flush(self) -> None:
        self._engine.flush_cache()


ENGINES: dict[str, Callable[..., OfflineEngine]] = {"bough": BoughOffline, "vllm": VllmOffline, "sglang": SglangOffline}


def open_engine(name: str, model: str, settings: dict[str, Any]) -> OfflineEngine:
    """Starts the engine of that name. Raises `ConfigError` if it is unknown or not installed."""
    if ":" not in name and name not in ENGINES:
        raise ConfigError(what=f"there is no engine {name!r}", why=f"there are: {', '.join(ENGINES)}, module:factory")
    try:
        if name in ENGINES:
            return ENGINES[name](model, **settings)
        module, _, factory = name.partition(":")
        made: OfflineEngine = getattr(importlib.import_module(module), factory)(model, **settings)
        return made
    except ImportError as error:
        raise ConfigError(what=f"the engine {name!r} can't be started", why=str(error), fix="install it") from error


def random_prompts(count: int, length: int, seed: int, prefix: Sequence[int] = ()) -> Prompts:
    """Prompts of `length` tokens that begin with `prefix`."""
    rng = random.Random(seed)
    return [[*prefix, *(rng.randrange(1000, _VOCAB) for _ in range(length - len(prefix)))] for _ in range(count)]


_GREEDY: Mapping[str, float] = {}


class Timer:
    """Times an engine's answers. Every answer must have exactly the requested number of tokens."""

    def __init__(self, engine: OfflineEngine, repeats: int) -> None:
        self.engine = engine
        self.repeats = repeats

    def median_s(
        self,
        prompts: Prompts,
        new_tokens: int | Sequence[int],
        *,
        flush: bool = True,
        repeats: int | None = None,
        sampling: Mapping[str, float] = _GREEDY,
    ) -> float:
        """Seconds of a call, the median of the repeats; with `flush` nothing is cached before each."""
        counts = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else list(new_tokens)
        took = []
        for _ in range(repeats or self.repeats):
            if flush:
                self.engine.flush()
            begin = time.perf_counter()
            answers = self.engine.generate(prompts, counts, **sampling)
            took.append(time.perf_counter() - begin)
            assert [len(answer) for answer in answers] == counts, "an answer has another length than was asked for"
        return statistics.median(took)

    def decode_ms(
        self, prompts: Prompts, new_tokens: int, *, flush: bool = False, sampling: Mapping[str, float] = _GREEDY
    ) -> float:
        """Milliseconds of a decode step: what `new_tokens` more take longer than one, divided by their number."""
        one = self.median_s(prompts, 1, flush=flush, sampling=sampling)
        many = self.median_s(prompts, 1 + new_tokens, flush=flush, sampling=sampling)
        return 1e3 * (many - one) / new_tokens
