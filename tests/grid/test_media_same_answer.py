"""Prompts with images: answers stay what transformers says, however the engine is set up and whatever else is asked for.

Features are switched in pairs. Streams, tools and sessions through real processes are in tests/e2e/test_media.py, graphs in
tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from in_process import Answer, InProcess, Setup
from pairwise import pairwise_cover
from PIL import Image
from prompts import Prompt, make_prompt, noise, reference_inputs
from seeing import load
from test_deepseek_ocr2 import by_transformers, load as load_ocr2
from test_tiles import prepared
from tiny_gemma3n import AUDIO_ID, IMAGE_ID, heard, load_gemma3n
from tiny_phi4mm import AUDIO, load_phi4, placed_prompt, sound
from tiny_tiles import TILE_FAMILIES, load_tiled
from tiny_vision import END, IMAGE, START, VOCAB, make_tokenizer
from transformers import PreTrainedModel
from whole_engine import PatientGrammars

from bough.core.media import Features
from bough.core.messages import LogprobSpec, Pause, Resume, ToEngine
from bough.core.sampling import GrammarSpec, SamplingParams
from bough.grammar import Grammars, Settings, Vocabulary
from bough.layers.decoder import Decoder
from bough.models.registry import facts_of
from bough.multimodal.placing import Placer
from bough.multimodal.processor import Prepared, Processed
from bough.tokenizer import load_tokenizer

AXES: dict[str, list[Any]] = {
    "asked": ["plain", "grammar", "scores", "several", "second turn"],
    "company": ["alone", "with text", "cached", "retracted", "tiny pool"],
    "family": ["qwen2_5_vl", "gemma3"],
    "page_size": [16, 1, 5],
    "chunk_tokens": [512, 11],
    "overlap": [True, False],
    "radix_cache": [True, False],
    "attention": ["torch", "cpu"],
    "drafts": ["none", "ngram", "known"],
    "stream": [True, False],
    "step_patches": [4096, 1],
    "media_rows": [512, 48],
}
NEW = 12
LETTERS = "abcdefgh"
SPELLED = GrammarSpec(kind="regex", source=f"[{LETTERS[0]}-{LETTERS[-1]}]{{{NEW + 5}}}")
TEXT = [7, 8, 9, 10, 30, 31]
LATER = [40, 41, 42]
FURTHER_QWEN = ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
RELATED = {
    "deepseek_ocr2", "gemma4", "glm46v", "glm4v_moe", "idefics2-quarters", "idefics3", "llava", "mistral3", "onevision",
    "qwen2_vl", "qwen3_5_moe", "qwen3_vl_moe",
}  # fmt: skip
"""Families that differ from another one in what the engine does not see, or (DeepSeek-OCR 2) have long prompts: their row
is a long case."""


@dataclass(frozen=True)
class Case:
    """A prompt for us and for transformers."""

    prompt: Prompt
    given: dict[str, torch.Tensor]
    """What transformers takes beside ids."""
    theirs: PreTrainedModel | None = None
    """Whose answer it is; None: that of its family's model. Adapters are merged into weights of their own."""

    def further(self, more: list[int]) -> Case:
        """With text behind it."""
        ids = self.prompt.ids + more
        positions = self.prompt.positions
        if positions:
            axes = np.frombuffer(positions, np.int32).reshape(3, -1)
            rest = axes.max() + 1 + np.arange(len(more), dtype=np.int32)
            positions = np.concatenate([axes, np.broadcast_to(rest, (3, len(more)))], 1).astype(np.int32).tobytes()
        given = {
            name: torch.cat([value, value.new_zeros(1, len(more))], 1) if name.endswith("type_ids") else value
            for name, value in self.given.items()
        }
        prompt = replace(self.prompt, ids=ids, positions=positions)
        return Case(prompt, given, self.theirs)


@dataclass(frozen=True)
class Family:
    """A tiny model that sees: ours, theirs, and prompts."""

    model: Decoder
    theirs: PreTrainedModel
    cases: tuple[Case, ...]
    atomic: int = 0
    """Positions of an image, where it is computed in one chunk."""
    states: bool = False
    """Layers keep one."""
    placeholders: frozenset[int] = frozenset({IMAGE})
    room: int = 0
    """Tokens of a context, where they are more than usual."""

    def said(self, answer: list[int]) -> list[int]:
        """An answer up to where a placeholder was drawn, of which transformers' models believe that it stands for an
        image."""
        return next((answer[:at] for at, token in enumerate(answer) if token in self.placeholders), answer)

    def says(self, case: Case, **extra: Any) -> list[int]:
        ids = torch.tensor([case.prompt.ids])
        with torch.no_grad():
            out = (case.theirs or self.theirs).generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
                eos_token_id=None, pad_token_id=0, **case.given, **extra,
            )  # fmt: skip
        return out[0, len(case.prompt.ids) :].tolist()  # type: ignore[no-any-return]

    def scores(self, case: Case, answer: list[int]) -> list[float]:
        """Log-probabilities of all tokens but the first, of the prompt and of an answer."""
        whole = case.further(answer)
        with torch.no_grad():
            logits = (case.theirs or self.theirs)(input_ids=torch.tensor([whole.prompt.ids]), **whole.given).logits[0]
        if self.theirs.config.model_type == "cohere2_vision":  # its text model alone scales them
            logits = logits * self.theirs.config.text_config.logit_scale
        found = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(whole.prompt.ids[1:])[:, None])
        values: list[float] = found[:, 0].tolist()
        return values


def _qwen(name: str) -> Family:
    seen = load(name)
    mark = [START, IMAGE, END]
    one, other = noise(24, 40), noise(24, 40, seed=1)
    prompts = [
        make_prompt(seen.processor, [5, 6, *mark, 9, 10, 11], [one]),
        make_prompt(seen.processor, [5, 6, *mark, 9, *mark, 10], [one, noise(16, 16)]),
        make_prompt(seen.processor, [5, 6, *mark, 9, 10, 11], [other]),
        make_prompt(seen.processor, TEXT, []),
    ]
    cases = tuple(Case(prompt, reference_inputs(prompt, seen.tower)) for prompt in prompts)
    return Family(seen.model, seen.reference, cases, states=bool(facts_of(seen.checkpoint.config).state_mixers))


def _tiled(name: str) -> Family:
    tiled = load_tiled(name)
    mark, placer = tiled.family.mark, Placer(tiled.processor, tiled.tokenizer)
    facts = facts_of(tiled.checkpoint.config)
    assert facts.tower is not None
    cases, kinds = [], ""
    for text, shapes in (
        (f"a{mark}bcd", [(24, 40)]),
        (f"a{mark}b{mark}", [(24, 40), (37, 20)]),
        (f"a{mark}bcd", [(16, 16)]),
    ):
        images = [Image.fromarray(noise(*shape)) for shape in shapes]
        media = [prepared(name, image) for image in images]
        alone = [each for each, _ in media]
        placed = placer.place_spelled(tiled.tokenizer.encode(placer.spelled(text, alone), True), alone)
        theirs = tiled.theirs(text, images)
        assert placed.ids.tolist() == theirs["input_ids"][0].tolist()
        given = {
            key: value for key, value in theirs.items() if key not in ("input_ids", "attention_mask", "num_patches")
        }
        kinds = next((key for key in given if key.endswith("type_ids")), "")
        positions = b""
        if tiled.processor.axes:
            positions = tiled.processor.positions(placed.ids, placed.items).astype("<i4").tobytes()
        features = {each.features.path: array for each, array in media}
        cases.append(Case(Prompt(placed.ids.tolist(), placed.items, positions, features), given))
    zeros = torch.zeros(1, len(TEXT), dtype=torch.int64)
    cases.append(Case(Prompt(TEXT, (), b"", {}), {kinds: zeros} if kinds else {}))
    most = facts.tower.max_positions if facts.tower.atomic else 0
    return Family(tiled.model, tiled.reference, tuple(cases), atomic=most, states=bool(facts.state_mixers))


def _gemma3n() -> Family:
    """Its images are computed; what transformers has of them was recorded."""
    tiny = load_gemma3n()
    placer, mark, heard_mark = Placer(tiny.processor, tiny.tokenizer), "<image_soft_token>", "<audio_soft_token>"
    cases = []
    for text, images, sounds in (
        (f"a{mark}bcd", [0], []),
        (f"a{mark}b{heard_mark}", [2], [1]),
        (f"a{mark}bcd", [1], []),
    ):
        media = [*map(tiny.image, images), *map(tiny.sound, sounds)]
        alone = [each for each, _ in media]
        placed = placer.place_spelled(tiny.tokenizer.encode(placer.spelled(text, alone), True), alone)
        features = {each.features.path: array for each, array in media}
        given = {"pixel_values": torch.tensor(images)[:, None].float(), **(heard(sounds) if sounds else {})}
        cases.append(Case(Prompt(placed.ids.tolist(), placed.items, b"", features), given))
    cases.append(Case(Prompt(TEXT, (), b"", {}), {}))
    return Family(tiny.model, tiny.reference, tuple(cases), placeholders=frozenset({IMAGE_ID, AUDIO_ID}))


def _ocr2() -> Family:
    """Its images have hundreds of positions in any size."""
    folder, _, reference, model, processor = load_ocr2()
    tokenizer, cases = load_tokenizer(folder), []
    placer = Placer(processor, tokenizer)
    for number, (text, shape) in enumerate(
        (("a<image>bcd", (30, 40)), ("<image>", (61, 90)), ("a<image>bcd", (40, 30)))
    ):
        image = Image.fromarray(noise(*shape))
        array, items = processor.image(image, {})
        digest = bytes([number]) * 32
        where = Features(path=f"ocr2-{number}", digest=digest, dtype="uint8", shape=array.shape)
        processed = Processed(dtype="uint8", shape=array.shape, items=items)
        media = [Prepared(kind="image", digest=digest, processed=processed, features=where)]
        placed = placer.place_spelled(tokenizer.encode(placer.spelled(text, media), True), media)
        theirs = by_transformers(folder, text, image)
        assert placed.ids.tolist() == theirs["input_ids"][0].tolist()
        given = {key: theirs[key] for key in theirs if key.startswith(("pixel", "num_"))}
        cases.append(Case(Prompt(placed.ids.tolist(), placed.items, b"", {where.path: np.array(array)}), given))
    cases.append(Case(Prompt(TEXT, (), b"", {}), {}))
    return Family(model, reference, tuple(cases), room=1024)


def _phi4() -> Family:
    """Images and sounds, each with its adapter, and text without."""
    phi4 = load_phi4()
    cases = []
    for text, shapes, seconds, adapter in (
        ("a<|image|>bcd", [(24, 40)], [], "vision"),
        ("a<|image|>b<|audio|>", [(37, 20)], [0.4], "vision"),
        ("a<|audio|>bcd", [], [0.6], "speech"),
        ("hello", [], [], ""),
    ):
        images = [Image.fromarray(noise(*shape)) for shape in shapes]
        sounds = [sound(each) for each in seconds]
        given = phi4.theirs(text, images, sounds)
        prompt = placed_prompt(phi4, text, images, sounds)
        assert prompt.ids == given.pop("input_ids")[0].tolist()
        cases.append(Case(prompt, given, phi4.references[adapter]))
    return Family(phi4.model, phi4.references[""], tuple(cases), placeholders=frozenset({IMAGE, AUDIO}))


OTHERS: dict[str, Callable[[], Family]] = {"gemma3n": _gemma3n, "deepseek_ocr2": _ocr2, "phi4mm": _phi4}


@cache
def family(name: str) -> Family:
    if name in OTHERS:
        return OTHERS[name]()
    return _tiled(name) if name in TILE_FAMILIES else _qwen(name)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grammars]:
    folder = tmp_path_factory.mktemp("letters")
    make_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    made = Grammars(Settings(backend="xgrammar"), lambda: Vocabulary(tokenizer, VOCAB, tokenizer.eos_ids))
    letters.extend(tokenizer.encode(each, False)[0] for each in LETTERS)
    yield made
    made.close()


letters: list[int] = []
"""Ids of LETTERS."""


@cache
def expected(name: str, asked: str) -> list[list[int]]:
    """Transformers' answers to a family's prompts."""
    made = family(name)
    if asked == "grammar":
        return [made.says(case, prefix_allowed_tokens_fn=lambda *_: letters) for case in made.cases]
    if asked == "second turn":
        return [made.says(second(name, number)) for number in range(len(made.cases))]
    return [made.says(case) for case in made.cases]


def second(name: str, number: int) -> Case:
    """A prompt, what was answered, and more text."""
    made = family(name)
    return made.cases[number].further(made.said(expected(name, "plain")[number]) + LATER)


def submitted(engine: InProcess, cases: list[Case], asked: str) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
    if asked == "grammar":
        sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW, grammar=SPELLED)
    extra = {"logprobs": LogprobSpec(start=1, top=2)} if asked == "scores" else {}
    return [
        case.prompt.submit(engine, sampling, **extra) for case in cases for _ in range(3 if asked == "several" else 1)
    ]


def answered(engine: InProcess, cases: list[Case], asked: str, company: str) -> list[Answer]:
    if company == "alone":
        return [answer for case in cases for answer in engine.finish(submitted(engine, [case], asked))]
    if company == "cached":
        engine.finish(submitted(engine, cases[::-1], "plain"))
    if company != "retracted":
        return engine.finish(submitted(engine, cases, asked))

    def send(message: ToEngine) -> Callable[[], None]:
        return lambda: engine.mailbox.incoming.append(message)

    turns = {3: Pause(call=1, mode="retract"), 6: Resume(call=2), 11: Pause(call=3, mode="retract"), 13: Resume(call=4)}
    found = engine.finish(submitted(engine, cases, asked), {turn: send(message) for turn, message in turns.items()})
    assert engine.queues.counters.retractions >= len(cases), "nothing was thrown out"
    return found


ROWS = pairwise_cover(AXES)
FURTHER = [
    pytest.param(name, (7 * number + 3) % len(ROWS), marks=pytest.mark.long if name in RELATED else ())
    for number, name in enumerate(
        [*FURTHER_QWEN, *(name for name in TILE_FAMILIES if name not in AXES["family"]), *OTHERS]
    )
]


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_every_pair_of_features_keeps_the_answer(number: int, grammars: Grammars) -> None:
    check(ROWS[number], grammars)


@pytest.mark.parametrize(("name", "number"), FURTHER)
def test_a_row_of_the_cover_with_every_other_family(name: str, number: int, grammars: Grammars) -> None:
    check({**ROWS[number], "family": name, "media_rows": max(160, ROWS[number]["media_rows"])}, grammars)


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_every_pair_of_features_keeps_the_answer_with_adapters(number: int, grammars: Grammars) -> None:
    check({**ROWS[number], "family": "phi4mm", "media_rows": max(160, ROWS[number]["media_rows"])}, grammars)


def check(row: dict[str, Any], grammars: Grammars) -> None:
    """Runs a family's prompts as a row of the cover says."""
    options = dict(row)
    name, asked, company = options.pop("family"), options.pop("asked"), options.pop("company")
    made = family(name)
    count = 3 if company == "alone" else 4
    cases = [second(name, at) if asked == "second turn" else made.cases[at] for at in range(count)]
    if made.atomic:
        options |= {"atomic_media": True, "chunk_tokens": max(options["chunk_tokens"], made.atomic + 3)}
    if made.states:
        options["num_snapshots"] = 64
    if made.room:
        options |= {"context_length": made.room, "media_rows": made.room}
    if company == "tiny pool":
        longest = max(len(case.prompt.ids) for case in cases) + NEW + 8
        options["num_pages"] = -(-longest // options["page_size"]) + 3
    wanted = expected(name, asked)[:count]
    known = {tuple(case.prompt.ids): answer for case, answer in zip(cases, wanted, strict=True)}
    engine = InProcess(made.model, VOCAB, Setup(**options), known, grammars=PatientGrammars(grammars))
    found = answered(engine, cases, asked, company)
    if asked == "several":
        wanted = [answer for answer in wanted for _ in range(3)]
    assert [made.said(answer.tokens) for answer in found] == [made.said(answer) for answer in wanted]
    if asked == "scores":
        for case, answer in zip(cases, found, strict=True):
            assert answer.prompt_logprobs is not None
            values = [each for each in answer.prompt_logprobs.logprobs if each is not None]
            values += [each for part in answer.output_logprobs for each in part.logprobs if each is not None]
            theirs = made.scores(case, made.said(answer.tokens))
            assert values[: len(theirs)] == pytest.approx(theirs, abs=2e-4)
    account = engine.queues.media
    assert account is not None
    assert account.store.num_available == account.store.num_blocks, "no request is left in the middle of an item"


@pytest.mark.parametrize("name", AXES["family"])
def test_the_image_counts(name: str) -> None:
    """Prompts that differ by their images only have different scores, so that the others are no accident."""
    made = family(name)
    first, other = made.cases[0], made.cases[2]
    assert first.prompt.ids == other.prompt.ids
    behind = first.prompt.items[0].stop
    scores = [np.array(made.scores(case, [50, 51, 52])[behind:]) for case in (first, other)]
    assert np.abs(scores[0] - scores[1]).max() > 0.01


def test_the_cover_has_every_pair() -> None:
    rows = pairwise_cover(AXES)
    for a, b in combinations(AXES, 2):
        assert len({(row[a], row[b]) for row in rows}) == len(AXES[a]) * len(AXES[b])
