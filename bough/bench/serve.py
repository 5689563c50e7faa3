"""Load on a running server: requests and tokens per second, latencies, goodput, and whether the client or the server
was the limit.

    bough bench serve --base-url http://127.0.0.1:30000 --num-prompts 200 --request-rate 8

Speaks the native API or OpenAI's, so that any server of either kind can be measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec

from bough.bench.dialects import ALIASES, Dialect, dialect_name
from bough.bench.http_stream import StreamingClient
from bough.bench.load import BenchRequest, ClientShare, RequestResult, ShareResult, arrivals, drive, run_async
from bough.bench.prompts import BenchPrompt, WordList, add_dataset_flags, describe, make_prompts
from bough.bench.report import confidence, goodput_limits, histogram, need_matplotlib, plot, show, summarise
from bough.config.command_line import CommandParser
from bough.core.errors import BoughError, ConfigError
from bough.tokenizer import Tokenizer, load_tokenizer

Json = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="bough bench serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = made.add_argument_group("which server")
    where.add_argument("--base-url", "--url", default="", metavar="URL", help="default: http://HOST:PORT")
    where.add_argument("--host", default="127.0.0.1")
    where.add_argument("--port", type=int, default=30000)
    where.add_argument("--backend", choices=ALIASES, default="native", metavar="NAME",
                       help="native (/generate), openai (/v1/completions) or openai-chat; also sglang, sglang-oai, "
                            "sglang-oai-chat, vllm, vllm-chat (default: native)")  # fmt: skip
    where.add_argument("--model", default="", metavar="NAME", help="model name (default: the server's first)")
    where.add_argument("--api-key", default=os.environ.get("BOUGH_API_KEY", os.environ.get("OPENAI_API_KEY", "")),
                       metavar="KEY", help="default: BOUGH_API_KEY or OPENAI_API_KEY")  # fmt: skip
    where.add_argument("--tokenizer", default="", metavar="PATH",
                       help="for lengths of texts; default: the server's, if it is on this machine")  # fmt: skip
    where.add_argument("--vocab-size", type=int, default=0, metavar="N", help="for random-ids")
    add_dataset_flags(made, default="random", num_prompts=100)
    how = made.add_argument_group("how it is asked")
    how.add_argument("--request-rate", type=_rate, default=math.inf, metavar="X",
                     help="requests per second, or inf: all at once (default)")  # fmt: skip
    how.add_argument("--arrival", choices=("poisson", "fixed"), default="poisson",
                     help="distribution of arrivals at a finite rate (default: poisson)")  # fmt: skip
    how.add_argument(
        "--max-concurrency",
        type=int,
        default=0,
        metavar="N",
        help="maximum number of requests in flight (default: no limit)",
    )
    how.add_argument(
        "--warmup-requests", type=int, default=1, metavar="N", help="requests before the run, not counted (default: 1)"
    )
    how.add_argument("--flush-cache", action="store_true", help="empty the server's prefix cache before each run")
    how.add_argument("--disable-stream", action="store_true", help="whole answers: only E2E can be measured then")
    how.add_argument("--disable-ignore-eos", action="store_true", help="let the model end answers early")
    how.add_argument("--extra-request-body", type=_object, default={}, metavar="JSON",
                     help='more fields for each request, e.g. \'{"sampling_params": {"temperature": 0.7}}\'')  # fmt: skip
    how.add_argument(
        "--client-processes",
        type=int,
        default=1,
        metavar="N",
        help="client processes that send the requests (default: 1)",
    )
    how.add_argument("--repeat", type=int, default=1, metavar="N",
                     help="run N times; report the mean and its 95 %% interval")  # fmt: skip
    results = made.add_argument_group("what is shown")
    results.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS",
                      help="count requests within limits, e.g. ttft:200 tpot:50 e2e:5000")  # fmt: skip
    results.add_argument("--json", nargs="?", const="-", default="", metavar="FILE",
                      help="write the numbers as JSON, to standard output or appended to a file as one line")  # fmt: skip
    results.add_argument("--output-details", action="store_true", help="with --json: every request's times too")
    results.add_argument("--plot", default="", metavar="PNG", help="draw latencies and the course of the run")
    return made


def main() -> None:
    options = parser().parse_args()
    limits = _checked(options)
    base_url = (options.base_url or f"http://{options.host}:{options.port}").removesuffix("/v1").removesuffix("/")
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    known = run_async(ask_server(base_url, headers, options))
    vocabulary = _vocabulary(options, known)
    prompts = make_prompts(options, vocabulary)
    dialect = Dialect(
        name=dialect_name(options.backend),
        model=options.model or known.get("name", ""),
        stream=not options.disable_stream,
        ignore_eos=not options.disable_ignore_eos,
        extra=options.extra_request_body,
    )
    title = _title(options, base_url, prompts)
    others = make_prompts(argparse.Namespace(**{**vars(options), "seed": ~options.seed}), vocabulary)
    warm_up(base_url, headers, dialect, others[: options.warmup_requests])
    runs: list[tuple[Json, list[RequestResult]]] = []
    for number in range(options.repeat):
        if options.flush_cache:
            run_async(_flush(base_url, headers))
        result = measure(base_url, headers, dialect, prompts, options, seed=options.seed + number)
        facts = summarise(
            result,
            rate=options.request_rate,
            max_concurrency=options.max_concurrency,
            limits=limits,
            streamed=dialect.stream,
        )
        runs.append((facts, result.outcomes))
        if options.json != "-":
            print(show(facts, title) + "\n\n" + histogram(result.outcomes) + "\n")
    if options.repeat > 1 and options.json != "-":
        print(_over_runs([facts for facts, _ in runs]))
    _write(options, base_url, dialect, runs)
    if options.plot:
        plot(runs[-1][1], options.plot, title)
    if all(facts["completed"] == 0 for facts, _ in runs):
        raise BoughError(what="no request was answered", why="; ".join(runs[-1][0]["errors"]))


def measure(
    base_url: str,
    headers: dict[str, str],
    dialect: Dialect,
    prompts: list[BenchPrompt],
    options: argparse.Namespace,
    *,
    seed: int,
) -> ShareResult:
    """One run over all prompts."""
    due = arrivals(len(prompts), options.request_rate, options.arrival, seed)
    calls = [
        BenchRequest(at_s=at_s, body=msgspec.Raw(msgspec.json.encode(dialect.body(prompt))), input_len=prompt.input_len)
        for at_s, prompt in zip(due, prompts, strict=True)
    ]
    share = ClientShare(
        base_url=base_url,
        headers=headers,
        dialect=dialect,
        calls=calls,
        max_concurrency=options.max_concurrency,
        begin_s=0.0,
    )
    return drive(share, options.client_processes)


def warm_up(base_url: str, headers: dict[str, str], dialect: Dialect, prompts: list[BenchPrompt]) -> None:
    """Sends a few requests that do not count. Raises `BoughError` if they fail: so would all others."""
    if not prompts:
        return
    calls = [
        BenchRequest(at_s=0.0, body=msgspec.Raw(msgspec.json.encode(dialect.body(prompt))), input_len=prompt.input_len)
        for prompt in prompts
    ]
    share = ClientShare(
        base_url=base_url, headers=headers, dialect=dialect, calls=calls, max_concurrency=0, begin_s=0.0
    )
    for outcome in drive(share).outcomes:
        if outcome.error:
            raise BoughError(
                what="the warm-up request failed",
                why=outcome.error,
                fix="try another --backend, or shorter prompts; --warmup-requests 0 goes on regardless",
            )


async def ask_server(base_url: str, headers: dict[str, str], options: argparse.Namespace) -> Json:
    """What the server reports about its model: `name`, `tokenizer_path`, `vocab_size`, as far as it does. Raises
    `Unavailable` if there is no answer.
    """
    client = StreamingClient(base_url, headers)
    known: Json = {}
    try:
        for path, read in (("/v1/models", _first_model), ("/model_info", _model_info)):
            try:
                known |= read(await client.call("GET", path))
            except BoughError as error:
                if error.status == 503:
                    raise
    finally:
        client.close()
    if not options.model and not known.get("name") and dialect_name(options.backend) != "native":
        raise ConfigError(what="the server names no model", why="/v1/models has none", fix="give --model NAME")
    return known


def _first_model(answer: Any) -> Json:
    models = answer.get("data", []) if isinstance(answer, dict) else []
    return {"name": models[0]["id"]} if models else {}


def _model_info(answer: Any) -> Json:
    wanted = ("tokenizer_path", "vocab_size")
    return {name: answer[name] for name in wanted if answer.get(name)} if isinstance(answer, dict) else {}


async def _flush(base_url: str, headers: dict[str, str]) -> None:
    client = StreamingClient(base_url, headers)
    try:
        await client.call("POST", "/flush_cache")
    finally:
        client.close()


def _vocabulary(options: argparse.Namespace, known: Json) -> WordList:
    tokenizer: Tokenizer | None = None
    path = options.tokenizer or known.get("tokenizer_path", "")
    if options.tokenizer or (path and Path(path).exists()):
        tokenizer = load_tokenizer(path)
    size = options.vocab_size or known.get("vocab_size", 0) or (tokenizer.vocab_size if tokenizer is not None else 0)
    if tokenizer is None and options.dataset_name == "sharegpt" and options.json != "-":
        print("note: no tokenizer (see --tokenizer): how long answers should be is guessed from their words")
    return WordList(tokenizer=tokenizer, size=size)


def _checked(options: argparse.Namespace) -> dict[str, float]:
    """The goodput limits, once the flags make sense together. Raises `ConfigError`."""
    for name in ("max_concurrency", "warmup_requests"):
        if getattr(options, name) < 0:
            raise ConfigError(what=f"--{name.replace('_', '-')} is negative", fix="give 0 or more")
    if options.client_processes < 1 or options.repeat < 1:
        raise ConfigError(what="--client-processes and --repeat must be at least 1")
    if 0 < options.max_concurrency < options.client_processes:
        raise ConfigError(
            what=f"{options.client_processes} client processes can't share {options.max_concurrency} places",
            fix="raise --max-concurrency or lower --client-processes",
        )
    if options.plot:
        need_matplotlib()
    limits = goodput_limits(options.goodput)
    if options.disable_stream and set(limits) - {"e2e"}:
        raise ConfigError(
            what="without streaming there is no first token to time", fix="leave out --disable-stream, or use e2e only"
        )
    return limits


def _title(options: argparse.Namespace, base_url: str, prompts: list[BenchPrompt]) -> str:
    rate = (
        "all at once"
        if math.isinf(options.request_rate)
        else f"{options.request_rate:g} per second ({options.arrival})"
    )
    cap = f", at most {options.max_concurrency} at once" if options.max_concurrency else ""
    return f"{options.backend} at {base_url}: {options.dataset_name}, {describe(prompts)}, {rate}{cap}"


def _over_runs(runs: list[Json]) -> str:
    lines = [f"over {len(runs)} runs (mean and 95 % interval)"]
    for name, label in (
        ("request_throughput", "requests/s"),
        ("output_throughput", "output tokens/s"),
        ("mean_ttft_ms", "mean TTFT, ms"),
        ("mean_tpot_ms", "mean TPOT, ms"),
        ("mean_e2e_ms", "mean E2E, ms"),
    ):
        if name in runs[0]:
            mean, half = confidence([facts[name] for facts in runs])
            lines.append(f"  {label:<22} {mean:,.2f} +- {half:,.2f}")
    return "\n".join(lines)


def _write(
    options: argparse.Namespace, base_url: str, dialect: Dialect, runs: list[tuple[Json, list[RequestResult]]]
) -> None:
    if not options.json:
        return
    asked = {
        "base_url": base_url,
        "backend": dialect.name,
        "model": dialect.model,
        "dataset": options.dataset_name,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "arrival": options.arrival,
        "max_concurrency": options.max_concurrency,
        "seed": options.seed,
    }
    report: Json = {**asked, **runs[-1][0]}
    if len(runs) > 1:
        report["runs"] = [facts for facts, _ in runs]
    if options.output_details:
        report["requests"] = msgspec.to_builtins(runs[-1][1])
    if options.json == "-":
        print(json.dumps(report, indent=2))
        return
    with Path(options.json).open("a", encoding="utf-8") as file:
        file.write(json.dumps(report) + "\n")


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be more than 0, or inf")
    return value


def _object(text: str) -> Json:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


if __name__ == "__main__":
    main()
