"""Five prompts, some of which begin alike, answered alone, together, with a warm cache, retracted or with few pages."""

from __future__ import annotations

from in_process import DraftsOnDevice, InProcess, Setup

from bough.core.sampling import SamplingParams
from bough.layers.batch import Model

COMMON = [(7 * i + 3) % 120 + 3 for i in range(37)]
PROMPTS = [
    [*COMMON, 5, 17, 99],
    [42],
    [*COMMON, 5, 88],
    [100, 90, 80, 70, 60, 50, 40],
    [*COMMON[:20], 9, 9, 9, 30, 31],
]
NEW_TOKENS = 24


def answers_of(
    model: Model, combination: dict[str, object], known: list[list[int]], drafts: dict[str, DraftsOnDevice]
) -> list[list[int]]:
    """Greedy answers to PROMPTS under `combination`: fields of Setup, and the company that they are answered in.

    `known` are the answers that drafts named "known" are taken from, `drafts` what may draft on the device by its name."""
    options = dict(combination)
    company = options.pop("company")
    if company == "tiny pool":
        tokens = len(COMMON) + 3 + NEW_TOKENS + 30
        options["num_pages"] = -(-tokens // int(str(options["page_size"]))) + 3
    answers = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, known, strict=True)}
    proposer = drafts.get(str(options["drafts"]))
    engine = InProcess(model, 131, Setup(**options), answers, proposer)  # type: ignore[arg-type]
    greedy = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS)
    if company == "alone":
        return [engine.generate([prompt], greedy)[0] for prompt in PROMPTS]
    if company == "cached":
        engine.generate(PROMPTS[::-1], greedy)
    if company == "retracted":
        return [tokens[:NEW_TOKENS] for tokens in engine.generate_with_a_retraction(PROMPTS)]
    return engine.generate(PROMPTS, greedy)
