"""Log-probabilities on their way out: arrays of a step become per-request lists."""

from __future__ import annotations

from bough.core.messages import LogprobSpec, TokenLogprobs
from bough.core.step import LogprobArrays
from bough.scheduler.queues import Job


def add_position(into: TokenLogprobs, arrays: LogprobArrays, at: int, spec: LogprobSpec) -> None:
    """Appends one scored position."""
    into.token_ids.append(int(arrays.token_ids[at]))
    into.logprobs.append(float(arrays.logprobs[at]))
    if spec.top:
        ids = arrays.top_ids[at, : spec.top].tolist()
        values = arrays.top_logprobs[at, : spec.top].tolist()
        into.top.append([(i, v) for i, v in zip(ids, values, strict=True) if i >= 0])
    if spec.token_ids:
        values = arrays.chosen_logprobs[at, : len(spec.token_ids)].tolist()
        into.chosen.append(list(zip(spec.token_ids, values, strict=True)))


def empty_scores() -> TokenLogprobs:
    return TokenLogprobs(token_ids=[], logprobs=[], top=[], chosen=[])


def add_output(job: Job, arrays: LogprobArrays, at: int) -> None:
    """Scores the row's newest output token."""
    if job.ask.logprobs is not None:
        if job.output_scores is None:
            job.output_scores = empty_scores()
        add_position(job.output_scores, arrays, at, job.ask.logprobs)


def add_prompt(job: Job, arrays: LogprobArrays, positions: list[int], start: int) -> None:
    """Scores prompt tokens from a chunk that began at `start`; those scored before (it was computed twice) are left out."""
    spec = job.ask.logprobs
    if spec is None or not job.scores_prompt:
        return
    if job.prompt_scores is None:
        job.prompt_scores = empty_scores()
    if job.ask.items:
        _add_items(job, job.prompt_scores, arrays, positions, start)
        return
    if job.scored_to == 0:
        add_unpredicted(job)
    token = max(start + 1, spec.start, 1)
    for at in positions:
        if token == job.scored_to:
            add_position(job.prompt_scores, arrays, at, spec)
            job.scored_to += 1
        token += 1


def _add_items(job: Job, into: TokenLogprobs, arrays: LogprobArrays, positions: list[int], start: int) -> None:
    """Scores the ends of a chunk's items."""
    assert job.ask.logprobs is not None, "asked for by the request"
    end, ends = job.items_at, []
    for length in job.ask.items:
        end += length
        if end > start:
            ends.append(end)
    for at, end in zip(positions, ends, strict=False):  # the chunk may be over before the prompt is
        if end > job.scored_to:
            add_position(into, arrays, at, job.ask.logprobs)
            job.scored_to = end


def add_unpredicted(job: Job) -> None:
    """The first prompt token: nothing predicts it."""
    spec = job.ask.logprobs
    assert spec is not None, "asked for by the request"
    if job.prompt_scores is None:
        job.prompt_scores = empty_scores()
    job.prompt_scores.token_ids.append(int(job.prompt[0]))
    job.prompt_scores.logprobs.append(None)
    if spec.top:
        job.prompt_scores.top.append([])
    if spec.token_ids:
        job.prompt_scores.chosen.append([])
    job.scored_to = 1
