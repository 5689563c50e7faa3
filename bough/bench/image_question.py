"""One question about an image, answered by a server of its own on a CPU: `bough bench images --size small`.

The model has the shapes of SmolVLM-256M-Instruct and dummy weights. A question with a new image of 1,280 x 960 pixels is
sent to /v1/chat/completions and answered with 32 tokens, for several `longest_edge`s: 512 pixels (`detail: low`) make one
tile of that image, 1,024 make 5, and 2,048, the model's own, make 13.
"""

from __future__ import annotations

import base64
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import psutil
import torch

from bough.bench.soak import served
from bough.core.errors import BoughError

GOAL_S: Final = 6.0
"""From the question to the last token of its answer."""
ANSWER: Final = 32
EDGES: Final = (512, 1024, 2048)
SIZE: Final = (1280, 960)
"""Of the image."""
_VOCAB: Final = 49_280
_IMAGE, _FAKE, _GLOBAL, _END = 49_190, 49_189, 49_152, 49_279
SPECIAL: Final = {
    0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>", _GLOBAL: "<global-img>", _FAKE: "<fake_token_around_image>",
    _IMAGE: "<image>", _END: "<end_of_utterance>",
    **{_GLOBAL + 1 + 6 * row + column: f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)},
}  # fmt: skip
TEXT: Final[dict[str, Any]] = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": _VOCAB, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "rope_theta": 100_000.0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
VISION: Final[dict[str, Any]] = {
    "model_type": "idefics3_vision", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "patch_size": 16, "image_size": 512, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "image_token_id": _IMAGE,
    "scale_factor": 4, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "text_config": TEXT,
    "vision_config": VISION, "bos_token_id": 1, "eos_token_id": _END, "pad_token_id": 2,
}  # fmt: skip
PROCESSOR: Final[dict[str, Any]] = {
    "image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": True, "max_image_size": {"longest_edge": 512},
    "size": {"longest_edge": 2048}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 1,
}  # fmt: skip
_TEMPLATE: Final = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}:"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


class TimedAnswer(NamedTuple):
    """An answer."""

    first_s: float
    """To its first token."""
    took_s: float
    """To its last."""
    cpu_s: float
    """Of the processor, in all of the server's processes."""
    usage: dict[str, Any]


def write_checkpoint(folder: Path) -> None:
    """Everything of the checkpoint but its weights. The tokenizer has single bytes and special tokens."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    free = iter(alphabet)
    vocab = {SPECIAL.get(each) or next(free, f"<|unused_{each}|>"): each for each in range(_VOCAB)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL.values()))
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[_END], "pad_token": SPECIAL[2],
        "bos_token": SPECIAL[1], "chat_template": _TEMPLATE,
    }  # fmt: skip
    for name, content in (("config", CONFIG), ("preprocessor_config", PROCESSOR), ("tokenizer_config", settings)):
        (folder / f"{name}.json").write_text(json.dumps(content))


def flops(tiles: int, tokens: int) -> float:
    """Of the tower over `tiles`, the projection, and the prefill of `tokens`."""
    hidden, inner, patches = VISION["hidden_size"], VISION["intermediate_size"], (512 // 16) ** 2
    block = 2 * patches * (4 * hidden**2 + 2 * hidden * inner) + 4 * hidden * patches**2
    width, positions = TEXT["hidden_size"], patches // CONFIG["scale_factor"] ** 2
    tile = VISION["num_hidden_layers"] * block + 2 * positions * 16 * hidden * width
    keys = 2 * TEXT["num_key_value_heads"] * TEXT["head_dim"]
    layer = 2 * width**2 + width * keys + 3 * width * TEXT["intermediate_size"]
    total: float = tiles * tile + TEXT["num_hidden_layers"] * (2 * layer * tokens + 2 * width * tokens**2)
    return total


def picture(rng: np.random.Generator, size: tuple[int, int] = SIZE) -> str:
    """A new JPEG as a data: URL."""
    from PIL import Image

    width, height = size
    file = io.BytesIO()
    smooth = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8))
    smooth.resize((width, height)).save(file, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def products_per_s(threads: int) -> float:
    """FLOPs per second of the tower's largest product on that many threads: the best of some tries."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight = torch.randn(4096, 768), torch.randn(3072, 768)
        took = []
        for _ in range(8):
            begin = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            took.append(time.perf_counter() - begin)
        return 2.0 * x.numel() * len(weight) / min(took)
    finally:
        torch.set_num_threads(before)


def measure(
    repeats: int, seed: int, tell: Callable[[dict[str, Any]], None], threads: int = 2, edges: Sequence[int] = EDGES
) -> None:
    """Calls `tell` with a row for each of `edges`: seconds to the answer's first and last token, the processor's seconds
    meanwhile (of all of the server's processes), and the time of the FLOPs at the rate of large products."""
    import httpx

    rng = np.random.default_rng(seed)
    rate = products_per_s(threads)
    with tempfile.TemporaryDirectory() as name:
        write_checkpoint(Path(name))
        flags = ["--load-format", "dummy", "--device", "cpu", "--cpu-threads", str(threads)]
        with served(name, flags) as (url, process), httpx.Client(base_url=url, timeout=600) as client:
            images = [picture(rng) for _ in range(repeats)]
            _ask(client, picture(rng), edges[0])
            for edge in edges:
                tell(_row([_timed(client, process, each, edge) for each in images], edge, rate))
            again = [_timed(client, process, images[-1], edges[-1]) for _ in range(repeats)]
            tell(_row(again, edges[-1], rate, again=True))


def _row(asked: Sequence[TimedAnswer], edge: int, rate: float, *, again: bool = False) -> dict[str, Any]:
    took, usage = statistics.median(each.took_s for each in asked), asked[-1].usage
    seen, tokens = usage["prompt_tokens_details"]["image_tokens"], usage["prompt_tokens"]
    tiles = seen // 64
    floor = flops(0, tokens - usage["prompt_tokens_details"]["cached_tokens"]) if again else flops(tiles, tokens)
    return {
        "workload": f"{'the same' if again else 'a new'} image in {tiles} tile{'s' * (tiles > 1)}", "s": round(took, 2),
        "best_s": round(min(each.took_s for each in asked), 2),
        "first_token_s": round(statistics.median(each.first_s for each in asked), 2),
        "cpu_s": round(statistics.median(each.cpu_s for each in asked), 2),
        "floor_s": round(floor / rate, 2), "longest_edge": edge, "tokens": tokens, "image_tokens": seen,
        "goal_s": GOAL_S, "reached": took <= GOAL_S,
    }  # fmt: skip


def _timed(client: Any, process: psutil.Process, url: str, edge: int) -> TimedAnswer:
    before, begin = _cpu_s(process), time.perf_counter()
    first, usage = _ask(client, url, edge)
    took = time.perf_counter() - begin
    return TimedAnswer(first - begin, took, _cpu_s(process) - before, usage)


def _ask(client: Any, url: str, edge: int) -> tuple[float, dict[str, Any]]:
    """When the first token came, and the answer's usage."""
    body = {
        "model": "default", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": ANSWER,
        "temperature": 0, "ignore_eos": True, "mm_processor_kwargs": {"longest_edge": edge},
        "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is in this picture?"},
        ]}],
    }  # fmt: skip
    first = 0.0
    usage: dict[str, Any] = {}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            answer.read()
            raise BoughError(what=f"the server answers {answer.status_code}", why=answer.text[:300])
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            spoken = any(choice["delta"].get("content") for choice in event["choices"])
            first = first or (time.perf_counter() if spoken else 0.0)
    if usage.get("completion_tokens") != ANSWER:
        raise BoughError(what=f"the answer has {usage.get('completion_tokens')} tokens instead of {ANSWER}")
    return first, usage


def _cpu_s(process: psutil.Process) -> float:
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))
