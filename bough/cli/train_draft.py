"""`bough train-draft MODEL OUT --method eagle3`: trains a draft head for a model, on the model's own answers."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bough.config.command_line import CommandParser
from bough.config.memory_plan import show_bytes
from bough.core.errors import ConfigError

if TYPE_CHECKING:
    from argparse import Namespace

    import torch

    from bough.config.hf import Checkpoint
    from bough.training.fit import DraftJudgement
    from bough.training.samples import Sample

T = TypeVar("T")
_METHODS = {"eagle3": "EAGLE3", "medusa": "MEDUSA"}
_ASKED_AT_ONCE = 2048
_TURNS_SHARE = 1 / 3
"""Share of the time for answers that is used for user messages written by the model: they have a third of an answer's
tokens."""
_SPOKEN_FOR = ("num_drafts", "medusa_layers", "answer_tokens", "max_length", "epochs", "batch_tokens", "held_back")


def parser() -> CommandParser:
    made = CommandParser(
        prog="bough train-draft",
        description="Trains a draft head for a model (docs/speculative_decoding.md): the model answers prompts, and "
        "the head is trained on the answers. Serve it with `bough serve MODEL --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path OUT`, or MEDUSA.",
    )
    made.add_argument("model", metavar="MODEL", help="directory, hub id or .gguf file; default: the embedded model")
    made.add_argument("out", metavar="OUT", help="directory to write; it must not exist")
    made.add_argument("--method", choices=tuple(_METHODS), default="eagle3", help="kind of head (default: eagle3)")
    asked = made.add_argument_group("training data")
    asked.add_argument(
        "--prompts", action="append", default=[], metavar="FILE",
        help='one prompt per line: {"prompt": ...}, {"messages": [...]}, a JSON string or plain text; may be repeated',
    )  # fmt: skip
    asked.add_argument(
        "--texts", action="append", default=[], metavar="PATH",
        help="text file or directory (.md, .txt, .rst, .py) whose pieces the model is asked about; may be repeated",
    )  # fmt: skip
    asked.add_argument(
        "--text-prompts", type=int, default=1000, help="maximum number of questions about --texts (default: 1000)"
    )
    asked.add_argument(
        "--sampled-prompts", type=int, default=None, metavar="N",
        help="number of user messages that the model writes itself (default: 2000 without other prompts, else 0)",
    )  # fmt: skip
    asked.add_argument("--answer-tokens", type=int, default=256, help="maximum tokens of an answer (default: 256)")
    asked.add_argument(
        "--max-length", type=int, default=1024, help="maximum tokens of a prompt and its answer (default: 1024)"
    )
    asked.add_argument(
        "--temperature", type=float, nargs="+", default=[0.7], metavar="T",
        help="temperature of the answers; several are used in turn (default: 0.7)",
    )  # fmt: skip
    asked.add_argument("--max-total-tokens", type=int, default=0, metavar="N",
                       help="KV cache of the engine that answers, in tokens (default: all free memory)")  # fmt: skip
    asked.add_argument("--max-answer-minutes", type=float, default=60.0,
                       help="maximum minutes of answering; remaining prompts are left out (default: 60)")  # fmt: skip
    asked.add_argument("--save-answers", default="", metavar="FILE", help="write prompts and answers, as token ids")
    asked.add_argument(
        "--answers", default="", metavar="FILE", help="train on a file of --save-answers, without generating answers"
    )
    asked.add_argument(
        "--held-back", type=int, default=64,
        help="number of prompts for evaluation: the tokens per step are measured on them (default: 64)",
    )  # fmt: skip
    how = made.add_argument_group("head and training")
    how.add_argument(
        "--num-drafts", type=int, default=0, help="number of drafts; Medusa has one head for each (default: 5)"
    )
    how.add_argument("--draft-vocab", type=int, default=0, help="draft only this many most frequent tokens, with a "
                     "separate output matrix (default: all, with the model's head)")  # fmt: skip
    how.add_argument("--token-map", type=int, default=0, metavar="N", help="draft only the N most frequent tokens, with the "
                     "model's own head; only their ids are stored (default: all)")  # fmt: skip
    how.add_argument("--medusa-layers", type=int, default=1, help="residual layers of a Medusa head (default: 1)")
    how.add_argument("--epochs", type=int, default=4, help="number of epochs (default: 4)")
    how.add_argument(
        "--max-minutes", type=float, default=60.0, help="maximum minutes of training, without answering (default: 60)"
    )
    how.add_argument("--learning-rate", type=float, default=1e-3, help="maximum learning rate (default: 0.001)")
    how.add_argument(
        "--batch-tokens", type=int, default=8192, help="tokens per batch, including padding (default: 8192)"
    )
    how.add_argument("--seed", type=int, default=0)
    how.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="device for answering and training"
    )
    how.add_argument("--revision", default="", help="branch, tag or commit of a model on the hub")
    return made


def run(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(list(argv))
    arguments.num_drafts = arguments.num_drafts or 5
    _check(arguments)
    import torch

    from bough.config.hf import open_checkpoint
    from bough.training.write import check_out

    check_out(Path(arguments.out))
    checkpoint = open_checkpoint("" if arguments.model == "default" else arguments.model, revision=arguments.revision)
    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(arguments.seed)
    learned, held_back = _samples(arguments, checkpoint)
    _train(arguments, checkpoint, learned, held_back, torch.device(arguments.device))
    return 0


def _check(arguments: Namespace) -> None:
    for name in _SPOKEN_FOR:
        if getattr(arguments, name) < 1:
            raise ConfigError(what=f"--{name.replace('_', '-')} must be at least 1", param=name)
    for name in ("learning_rate", "max_minutes", "max_answer_minutes"):
        if not getattr(arguments, name) > 0:
            raise ConfigError(what=f"--{name.replace('_', '-')} must be above 0", param=name)
    if arguments.max_total_tokens < 0:
        raise ConfigError(what="--max-total-tokens must not be below 0", param="max_total_tokens")
    if not all(0 <= each <= 2 for each in arguments.temperature):
        raise ConfigError(what="--temperature must be between 0 and 2", param="temperature")
    if arguments.num_drafts > 16:
        raise ConfigError(what="--num-drafts must be at most 16", why="drafts that far away are hardly ever right")
    if arguments.draft_vocab and arguments.token_map:
        raise ConfigError(
            what="--draft-vocab and --token-map can't be had together",
            why="a head drafts by a matrix of its own, or by the model's",
            fix="leave out one of them",
            param="token_map",
        )
    if not arguments.answers and arguments.answer_tokens >= arguments.max_length:
        raise ConfigError(
            what=f"--answer-tokens {arguments.answer_tokens} leave no room for a prompt",
            why=f"--max-length is {arguments.max_length}",
            fix="raise --max-length, or lower --answer-tokens",
            param="answer_tokens",
        )
    if arguments.answers and (arguments.prompts or arguments.texts or arguments.sampled_prompts):
        raise ConfigError(
            what="--answers can't be had with --prompts, --texts or --sampled-prompts",
            why="what is learned from a file has been asked already",
            fix="leave out one of them",
            param="answers",
        )


def _samples(arguments: Namespace, checkpoint: Checkpoint) -> tuple[list[Sample], list[Sample]]:
    """The training answers, and the held-back greedy answers for evaluation."""
    from bough.models.registry import facts_of
    from bough.training.samples import answer_prompts, load_samples, save_samples

    if arguments.answers:
        whole = load_samples(Path(arguments.answers), facts_of(checkpoint.config, "auto").vocab)
        whole = [sample for sample in whole if len(sample.ids) <= arguments.max_length]
        return _split(whole, arguments.held_back, "answers")
    with _Answering(arguments) as answering:
        prompts = answering.prompts()
        random.Random(arguments.seed).shuffle(prompts)
        learned, kept = _split(prompts, arguments.held_back, "prompts")
        held_back = answer_prompts(kept, answering.ask, [0.0], arguments.answer_tokens)
        samples = answer_prompts(learned, answering.ask, arguments.temperature, arguments.answer_tokens)
    if not samples or not held_back:
        raise ConfigError(what="the model answers nothing", why="all its answers are empty", fix="name other prompts")
    if arguments.save_answers:
        save_samples([*held_back, *samples], Path(arguments.save_answers))
    return samples, held_back


def _split(found: list[T], held_back: int, what: str) -> tuple[list[T], list[T]]:
    """(the others, the first `held_back`)"""
    if len(found) <= held_back:
        raise ConfigError(
            what=f"there are {len(found)} {what}, of which {held_back} would be held back",
            why="nothing would be left to learn from (or none is short enough for --max-length)",
            fix="name more, or lower --held-back",
            param="held_back",
        )
    return found[held_back:], found[:held_back]


class _Answering:
    """An engine that generates the answers; its memory is freed before the training begins."""

    def __init__(self, arguments: Namespace) -> None:
        self._asked = arguments

    def __enter__(self) -> _Answering:
        from bough.offline import Engine
        from bough.training.samples import Prompts

        asked = self._asked
        settings: dict[str, Any] = {"revision": asked.revision} if asked.revision else {}
        if asked.max_total_tokens:
            settings["max_total_tokens"] = asked.max_total_tokens
        model = "" if asked.model == "default" else asked.model
        self._engine = Engine(model_path=model, device=asked.device, context_length=asked.max_length + 1, **settings)
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None, "an engine that was not started without one"
        self._prompts = Prompts(tokenizer, asked.seed)
        self._began = time.monotonic()
        self._ends = self._began + 60 * asked.max_answer_minutes
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.shutdown()

    def prompts(self) -> list[list[int]]:
        asked = self._asked
        found = [prompt for path in asked.prompts for prompt in self._prompts.of_file(Path(path))]
        if asked.texts:
            found += self._prompts.of_texts(map(Path, asked.texts), asked.text_prompts)
        count = asked.sampled_prompts
        if count is None:
            count = 0 if found else 2000
        if count:
            ends = self._ends
            self._ends = self._began + _TURNS_SHARE * (ends - self._began)
            found += self._prompts.of_model(count, self.ask)
            self._ends = ends
        most = asked.max_length - asked.answer_tokens
        short = [prompt for prompt in found if 0 < len(prompt) <= most]
        if len(short) < len(found):
            print(f"{len(found) - len(short)} prompts have more than {most} tokens, and are left out", flush=True)
        return short

    def ask(self, prompts: Sequence[list[int]], temperatures: Sequence[float], most: int) -> list[list[int]]:
        """Answers to all prompts, or to the first of them, if there is no time for more."""
        answers: list[list[int]] = []
        began = time.monotonic()
        for begin in range(0, len(prompts), _ASKED_AT_ONCE):
            if begin and time.monotonic() > self._ends:
                print(f"time for answers is over: {len(prompts) - begin} prompts are left out", flush=True)
                break
            some = list(prompts[begin : begin + _ASKED_AT_ONCE])
            params = [
                {
                    "temperature": temperatures[number % len(temperatures)],
                    "max_new_tokens": most,
                    "sampling_seed": self._asked.seed + number,
                }
                for number in range(begin, begin + len(some))
            ]
            outputs = self._engine.generate(input_ids=some, sampling_params=params)
            assert isinstance(outputs, list), "as many answers as prompts"
            answers += [each["output_ids"] for each in outputs]
        tokens, seconds = sum(map(len, answers)), time.monotonic() - began
        print(f"{len(answers)} answers, {tokens:,} tokens in {seconds:.0f} s", flush=True)
        return answers


def _train(
    arguments: Namespace,
    checkpoint: Checkpoint,
    learned: Sequence[Sample],
    held_back: Sequence[Sample],
    device: torch.device,
) -> None:
    from bough.training.fit import HeadFit, Schedule, frequent_tokens
    from bough.training.heads import Eagle3Trainee, MedusaTrainee, Trainee
    from bough.training.target import TrainingTarget
    from bough.training.write import write_head

    target = TrainingTarget(checkpoint, device, arguments.max_length + 1)
    vocab, own = target.facts.vocab, bool(arguments.draft_vocab)
    wanted = arguments.draft_vocab or arguments.token_map
    if wanted < 0 or wanted > vocab:
        name = "draft_vocab" if own else "token_map"
        raise ConfigError(what=f"--{name.replace('_', '-')} {wanted} is not between 0 and {vocab:,}", param=name)
    ids_V = frequent_tokens(learned, vocab, wanted).to(device) if wanted else None
    trainee: Trainee
    if arguments.method == "eagle3":
        trainee = Eagle3Trainee(target, ids_V, own_head=own)
    else:
        trainee = MedusaTrainee(target, ids_V, arguments.num_drafts, arguments.medusa_layers, own_head=own)
    schedule = Schedule(
        num_drafts=arguments.num_drafts,
        epochs=arguments.epochs,
        minutes=arguments.max_minutes,
        learning_rate=arguments.learning_rate,
        batch_tokens=arguments.batch_tokens,
        seed=arguments.seed,
    )
    fit = HeadFit(target, trainee, schedule)
    began = time.monotonic()
    loss = fit.run(learned, lambda said: print(said, flush=True))
    seconds = time.monotonic() - began
    found = fit.judge(held_back)
    report = {
        "model": checkpoint.name,
        "method": _METHODS[arguments.method],
        "answers": len(learned),
        "answer_tokens": sum(len(sample.answer) for sample in learned),
        "seconds": round(seconds, 1),
        "loss": round(loss, 4),
        "held_back": {"prompts": len(held_back), **_as_dict(found)},
    }
    size = write_head(trainee, Path(arguments.out), report)
    print(
        f"{arguments.out}: {_METHODS[arguments.method]}, {show_bytes(size)}, trained in {seconds:.0f} s, loss {loss:.3f}"
    )
    print(
        f"{found.accept_length:.2f} tokens per step on {len(held_back)} prompts that were held back (greedy, "
        f"{arguments.num_drafts} drafts); right at each place: {', '.join(f'{each:.2f}' for each in found.by_position)}"
    )
    print(
        f"bough serve {arguments.model} --speculative-algorithm {_METHODS[arguments.method]} "
        f"--speculative-draft-model-path {arguments.out}"
    )


def _as_dict(found: DraftJudgement) -> dict[str, Any]:
    return {"accept_length": found.accept_length, "by_position": list(found.by_position), "steps": found.steps}
