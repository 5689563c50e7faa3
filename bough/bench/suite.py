"""bough as an engine of an offline benchmark suite: token ids in, lengths out.

    python gpu_suite.py bough.bench.suite:engine MODEL_DIR

`engine` is started with the arguments its peers get: dummy weights (drawn as theirs are), no tokenizer, bf16, context 16384,
memory 0.85, 512 running requests.
"""

from __future__ import annotations

from typing import Any

from bough.engine_api import Engine


class SuiteEngine:
    def __init__(self, model: str, **overrides: Any) -> None:
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
        self._engine = Engine(**(arguments | overrides))

    def generate(self, ids: list[list[int]], new: int) -> list[int]:
        """Generates `new` tokens greedily for each prompt; returns how many each got."""
        sampling = {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True}
        answers = self._engine.generate(input_ids=ids, sampling_params=sampling)
        assert isinstance(answers, list), "a batch gives a list"
        return [len(answer["output_ids"]) for answer in answers]

    def flush(self) -> None:
        self._engine.flush_cache()


def engine(model: str, **overrides: Any) -> SuiteEngine:
    return SuiteEngine(model, **overrides)
