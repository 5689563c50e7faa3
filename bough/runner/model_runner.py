"""Runs steps in order on one device: packs, launches (graph or eager), samples, and hands back what will come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bough.config.step_memory import SCORED_AT_ONCE
from bough.core.messages import LogprobSpec
from bough.core.step import Launched, LogprobArrays, Mask, Outcome, RunnerLimits, SlotSetup, Step, StepMedia
from bough.kernels.ahead import pending
from bough.kernels.attention.inputs import HostLengths
from bough.kernels.draft_tree import TreePath
from bough.kernels.step_start import SlotState
from bough.layers.batch import Model
from bough.memory.mha import KVPool
from bough.memory.states import StatePool
from bough.memory.transfer import download, upload
from bough.platform.device import Device
from bough.runner.accepting import AcceptRule
from bough.runner.context import AttentionFactory, ContextShare
from bough.runner.copies import PageCopies
from bough.runner.cross import CrossPages
from bough.runner.encoder import MediaTensors, TowerRunner, media_tensors, turn_slots
from bough.runner.forward import Extent, Forward
from bough.runner.graphs import Extents, Graphs
from bough.runner.hidden import HiddenSlots, HiddenWanted
from bough.runner.inference import without_gradients
from bough.runner.inputs import Packer, StepTensors, stage_bytes
from bough.runner.items import StepItems, items_of
from bough.runner.kv_scales import log_scales
from bough.runner.moves import Mover
from bough.runner.proposing import Bounds, Proposer, Read
from bough.runner.staging import Stage, Stages
from bough.runner.states import DraftHistory, StepState, load_states, save_states
from bough.sampler.scoring import Scores, join_scores, score
from bough.sampler.shaping import LogitProcessor, ReadingProcessor, RichSamples, Shaper, apply_masks
from bough.sampler.state import Samples, SlotParams


class ModelRunner:
    """A `core.step.Runner` over one model on one device."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        limits: RunnerLimits,
        attention: AttentionFactory,
        device: Device,
        *,
        graph_max_tokens: int = 0,
        processors: Mapping[str, LogitProcessor] | None = None,
        readers: Mapping[str, ReadingProcessor] | None = None,
        mover: Mover | None = None,
        samples: bool = True,
        proposer: Proposer | None = None,
        most_drafts: int = 0,
        tree_width: int = 0,
        encoder: TowerRunner | None = None,
        context: ContextShare | None = None,
        cross: AttentionFactory | None = None,
        rule: AcceptRule | None = None,
        states: StatePool | None = None,
        measures_scales: bool = False,
    ) -> None:
        """`processors`, `readers`: as `Shaper` takes them. `mover` carries out `Step.moves`; without one there must be
        none. Without `samples` it is a stage that passes on what it has computed: another one samples, and its steps
        hear of that by `LaunchedStep.learn`. `proposer` leaves the drafts of `Step.proposals`, at most `most_drafts`
        per row; they form trees with paths of `tree_width` tokens, if that is not 0. `encoder` carries out
        `Step.media`; without one the model takes text only, or this stage does not begin it. `context`: where ranks
        share the KV of sequences. `cross`: attends to media, where the model has cross attention; not the object that
        attends to tokens. `rule`: which drafts count. `states`: of layers that keep one. `measures_scales`:
        those of the pool are taken from the first prompts."""
        self.samples = samples
        self.states = states
        self.limits = limits
        self.mover = mover
        self.machine = device
        self.device = device.torch_device
        state = SlotState.make(
            limits.num_slots,
            limits.pages_per_slot,
            self.device,
            most_drafts=most_drafts,
            trees=tree_width > 0,
            turns=limits.media is not None and limits.media.axes > 0,
            adapters=limits.num_adapters > 0,
            line_parts=limits.layout.line_parts,
            media_widths=limits.layout.line_widths(limits.pages_per_slot)[len(limits.layout.line_parts) :],
            odds=limits.vocab_size if rule is not None and rule.needs_odds else 0,
        )
        self.encoder = encoder
        self.pool = pool
        self.context = context
        self.forward = Forward(model, pool, state, attention, proposer, tree_width, context, rule)
        if cross is not None:
            self.forward.cross = CrossPages(pool, state, cross, limits.layout.fixed_positions)
            self.forward.narrows = False  # the last layer that keeps KV reads media
        self.packer = Packer(limits.num_slots, limits.pages_per_slot, limits.layout)
        self.params = SlotParams(limits.num_slots, limits.vocab_size)
        self.shaper = Shaper(limits.vocab_size, self.device, processors, readers)
        self.hidden = HiddenSlots()
        self.copies = PageCopies(pool)
        self.measures_scales = measures_scales
        """The pool's scales are not known yet: no graph is captured."""
        self.before_step: Callable[[], None] | None = None
        """Called before every step, on every rank."""
        self._stages = Stages(device, stage_bytes(limits))
        self.graphs: Graphs | None = None
        self._history = DraftHistory(limits.num_slots)
        self._adapters = np.zeros(limits.num_slots + 1, np.int32)
        """By slot: its adapter, as the device has it."""
        if states is not None:
            self.forward.narrows = False  # the last layer may keep a state, of all tokens
        if graph_max_tokens and device.is_async:
            self.graphs = Graphs(
                self.forward,
                max_tokens=graph_max_tokens,
                context_length=limits.context_length,
                spare_slot=limits.num_slots,
                column_pages=max(1, limits.layout.column_pages),
                states=states,
            )

    @without_gradients
    def launch(self, step: Step) -> Launched:
        if self.before_step is not None:
            self.before_step()
        for setup in step.setups:
            self.params.fill(setup)
            self.shaper.assign(setup)
            self.hidden.note(setup)
        for moves in step.moves:
            assert self.mover is not None, "a runner that can't move KV gets no joins"
            self.mover.move(moves)
        stage = self._stages.take()
        if len(step.copy_from):
            self.copies.copy(step.copy_from, step.copy_to, stage)
        samples = self.params.gather(step)
        states = self.hidden.of(step)
        media = self._media(step.media) if step.media is not None else None
        drafted = 0
        if self.states is not None:
            load_states(step, self.states)
            if self.states.most_drafts and self._history.note(step):
                drafted = 1 + int(step.drafts.max(initial=0))
        if len(step.adapters):
            self._note_adapters(step)
        items = items_of(step, self.params.setups)
        is_plain = not len(step.prompt_logprobs) and states is None and media is None and items is None
        if self.measures_scales and step.num_rows:
            return self._measure(step, samples, stage, states, media, items, drafted)
        if self.graphs is not None and is_plain and not self.measures_scales:
            launched = self._replay(self.graphs, step, samples, stage, drafted > 0)
            if launched is not None:
                return launched
        return self._eager(step, samples, stage, states, media, items, drafted)

    def _note_adapters(self, step: Step) -> None:
        """Brings the device's adapters of the step's slots up to date."""
        held = self.forward.state.adapter
        assert held is not None, "rows have adapters only where the model has some"
        changed = self._adapters[step.slots] != step.adapters
        if changed.any():
            slots, adapters = step.slots[changed], step.adapters[changed]
            self._adapters[slots] = adapters
            held.index_copy_(0, upload(slots.astype(np.int64), self.device), upload(adapters, self.device))

    def _media(self, media: StepMedia) -> MediaTensors | None:
        """Turns slots, has items computed, and gives what the step reads of the store; None: nothing."""
        turn_slots(self.forward.state, media, self.device)
        lengths = self.forward.state.media_len
        if lengths is not None and len(media.fixed_slots):
            at = upload(media.fixed_slots.astype(np.int64), self.device)
            lengths.index_copy_(0, at, upload(media.fixed_lengths.astype(np.int64), self.device))
        if self.encoder is not None and media.encode:
            self.encoder.encode(media.encode)
        if not any(map(len, (media.at, media.axes_at, media.fixed_rows, media.sights))):
            return None
        return media_tensors(media, self.encoder, self.device)

    def idle(self) -> None:
        """Uses a moment without work to capture a graph that was missed. Not while kernels are compiled: it might wait for
        one, and a request for it."""
        if self.graphs is not None and not self.measures_scales and not pending():
            with torch.inference_mode():
                self.graphs.capture_one_wanted()

    def clear(self) -> None:
        self.machine.synchronize()

    def _replay(self, graphs: Graphs, step: Step, samples: Samples, stage: Stage, drafted: bool) -> Launched | None:
        """`drafted`: whether rows have drafts whose part in a state is not certain, or had some."""
        is_plain = not len(samples.rich) and not len(step.constrained)
        size = Extents(
            step.num_tokens,
            step.num_rows,
            samples.count,
            samples.width,
            proposals=step.proposals,
            drafted=drafted,
            adapted=len(step.adapters) > 0,
        )
        if (step.proposals >= 0 or drafted) and step.num_decodes < step.num_rows:
            # A proposer treats prompts otherwise than decode rows, and so do states.
            size = size._replace(max_query=step.num_tokens + 1)
        elif step.num_rows < step.num_tokens:
            size = size._replace(max_query=int(step.num_query.max()))
        captured = graphs.serve(size, "sampled" if is_plain else "logits", step.shared is not None)
        if captured is None:
            return None
        writes_table = len(step.table_at) <= captured.layout.sizes.writes
        if not writes_table:
            self._write_table_apart(step, stage)
        room = stage.room(captured.layout.num_bytes)
        self.packer.pack(step, samples, captured.layout, room.array, writes_table=writes_table)
        captured.replay(room.tensor)
        if self.states is not None:
            save_states(step, self.states)
        launched = LaunchedStep(self, step, samples, captured.tensors, stage)
        launched.read = captured.read
        if is_plain:
            launched.finish(captured.result[: len(samples.rows)])
        else:
            # The next replay overwrites the graph's output, and a step in flight may still need it.
            launched.have_logits(captured.result[: samples.count].clone())
        return launched

    def _measure(
        self,
        step: Step,
        samples: Samples,
        stage: Stage,
        states: HiddenWanted | None,
        media: MediaTensors | None,
        items: StepItems | None,
        drafted: int,
    ) -> Launched:
        """The first step. Its own KV is written with the scales that it is measured for."""
        self.forward.measures_scales = True
        launched = self._eager(step, samples, stage, states, media, items, drafted)
        self.forward.measures_scales = self.measures_scales = False
        log_scales(self.pool, step.num_tokens)
        return launched

    def _write_table_apart(self, step: Step, stage: Stage) -> None:
        """A step with more page-table writes than its graph has room for makes them ahead of it."""
        at, pages = stage.bring(step.table_at, torch.int64), stage.bring(step.table_pages, torch.int32)
        self.forward.write_table(at, pages)
        self.packer.write_table(step)

    def _eager(
        self,
        step: Step,
        samples: Samples,
        stage: Stage,
        states: HiddenWanted | None,
        media: MediaTensors | None,
        items: StepItems | None,
        drafted: int,
    ) -> Launched:
        tensors = self.packer.upload(step, samples, stage)
        kept = None if self.states is None else StepState(self.states, drafted, step)
        extent = Extent(
            max_query=int(step.num_query.max()),
            max_kv=int((step.context + step.num_query).max()),
            span_tokens=0 if step.shared is None else int(step.num_query[: step.num_decodes].sum()),
            levels=0 if step.shared is None else int(step.shared.level[-1]) + 1,
            host=HostLengths(num_query_R=step.num_query, context_R=step.context),
            has_drafts=samples.starts is not None,
            cut=None if self.context is None else self.context.cut(step),
            adapted=len(step.adapters) > 0,
        )
        scored = self._scored_positions(step, items)
        num_samples = samples.count
        at = tensors.sample_at_L
        if scored is not None:
            at = torch.cat([at, upload(scored.at, self.device)])
        num_scored = len(at)
        if states is not None:
            at = torch.cat([at, upload(states.at, self.device)])
        launched = LaunchedStep(self, step, samples, tensors, stage)
        launched.read = self.forward.reading(step.proposals)
        wanted = at if self.samples else None
        hidden = self.forward.hidden(tensors, extent, wanted, read=launched.read, media=media, items=items, states=kept)
        if self.states is not None:
            save_states(step, self.states)
        if not self.samples:
            return launched
        if states is not None:
            launched.have_states(states, hidden[num_scored:])
        if scored is not None:
            launched.prompt_scores = self._score_prompt(hidden[num_samples:num_scored], scored)
        if launched.read is not None:
            launched.read.sampled_LD = hidden[:num_samples]
        if num_samples:
            logits = self.forward.model.logits(hidden[:num_samples])
            launched.have_logits(logits)
        else:
            nothing = torch.empty(0, dtype=torch.int64, device=self.device)
            launched.finish(launched.propose(nothing, nothing))
        return launched

    def _scored_positions(self, step: Step, items: StepItems | None) -> _Scored | None:
        """Positions of prefill chunks that predict a prompt token whose score was asked for, and ends of items."""
        if not len(step.prompt_logprobs):
            return None
        ends = np.cumsum(step.num_query)
        at, targets, rows, specs = [], [], [], []
        for row, following in zip(step.prompt_logprobs.tolist(), step.following.tolist(), strict=True):
            spec = self._logprob_spec(int(step.slots[row]))
            first = max(spec.start - 1, int(step.context[row]))
            start = int(ends[row] - step.num_query[row])
            length = int(step.num_query[row]) - (1 if following < 0 else 0)
            local = np.arange(first - int(step.context[row]), length)
            if self.params.setups[int(step.slots[row])].items is not None:
                local = (items.scored(row) if items is not None else np.empty(0, np.int64)) - start
            predicted = np.append(step.tokens[start + 1 : start + int(step.num_query[row])], max(following, 0))
            at.append(start + local)
            targets.append(predicted[local])
            rows.append(np.full(len(local), row, np.int32))
            specs.extend([spec] * len(local))
        return _Scored(np.concatenate(at), np.concatenate(targets), np.concatenate(rows), specs)

    def _score_prompt(self, hidden: Tensor, scored: _Scored) -> Scores | None:
        targets = upload(scored.targets.astype(np.int64), self.device)
        parts = []
        at_once = SCORED_AT_ONCE[self.machine.kind]
        for begin in range(0, len(hidden), at_once):
            piece = slice(begin, begin + at_once)
            logits = self.forward.model.logits(hidden[piece])
            parts.append(score(logits, targets[piece], scored.rows[piece], scored.specs[piece]))
        return join_scores(parts).download() if parts else None

    def _logprob_spec(self, slot: int) -> LogprobSpec:
        spec = self.params.setups[slot].logprobs
        assert spec is not None, "a row without a LogprobSpec is never scored"
        return spec

    def rich_setups(self, samples: Samples) -> list[SlotSetup]:
        return [self.params.setups[int(samples.slots[i])] for i in samples.rich]


def bounds_of(step: Step, samples: Samples) -> Bounds:
    """What is known of a step's sampling rows before it runs."""
    kv_len = step.context + step.num_query
    return Bounds(
        kv_len=kv_len[samples.rows] if len(samples.rows) else np.ones(1, np.int32),
        max_kv=int(kv_len.max()),
        only_decodes=step.num_decodes == step.num_rows,
        greedy=not samples.floats[0].any(),
    )


class _Scored:
    __slots__ = ("at", "rows", "specs", "targets")

    def __init__(self, at: np.ndarray, targets: np.ndarray, rows: np.ndarray, specs: list[LogprobSpec]) -> None:
        self.at, self.targets, self.rows, self.specs = at, targets, rows, specs


class LaunchedStep:
    """A step in flight. Sampling happens at once unless a grammar's masks must come first."""

    def __init__(self, runner: ModelRunner, step: Step, samples: Samples, tensors: StepTensors, stage: Stage) -> None:
        self._runner = runner
        self._step = step
        self._samples = samples
        self._tensors = tensors
        self._stage = stage
        self._logits: Tensor | None = None
        self._result: npt.NDArray[np.int64] | None = None
        """In a room of the stage, there once the step is done: the sampling rows' tokens, or how many and which."""
        self._scores: Scores | None = None
        self._failed: dict[int, str] = {}
        self._barred: tuple[list[int], Tensor] | None = None
        """Rows with a list of allowed tokens, and whether anything is left of it."""
        self.prompt_scores: Scores | None = None
        self.hidden: HiddenWanted | None = None
        self._states: Tensor | None = None
        self.read: Read | None = None
        """For the proposer, where one runs."""

    @property
    def step(self) -> Step:
        return self._step

    @property
    def has_trees(self) -> bool:
        """Whether it verifies drafts that form trees."""
        return self.read is not None and self.read.tree is not None

    def have_states(self, wanted: HiddenWanted, states: Tensor) -> None:
        """Hidden states that were asked for. Which of a tree's belong to the answer is known when it has been walked."""
        self.hidden = wanted
        if self.has_trees:
            self._states = states
        else:
            wanted.keep(states)

    @property
    def needs_masks(self) -> bool:
        return self._logits is not None

    def have_logits(self, logits: Tensor) -> None:
        if len(self._step.constrained):
            self._logits = logits
        else:
            self._draw(logits, None)

    @without_gradients
    def sample(self, masks: Mask) -> None:
        assert self._logits is not None, "sample is called once, and only if needs_masks"
        logits, self._logits = self._logits, None
        self._draw(logits, masks)

    @without_gradients
    def learn(self, tokens: npt.NDArray[np.int32]) -> None:
        """What another stage has sampled, by row: the slots go on from there. Called once per step, in their order."""
        drawn = upload(tokens[self._samples.rows].astype(np.int64), self._runner.device)
        if len(drawn):
            self._runner.forward.keep(drawn, self._tensors)
        self._stage.seal()

    def finish(self, result: Tensor) -> None:
        """Queues the copy of the rows' tokens [rows], or of what `Forward.verify` gave, to the host."""
        room = self._stage.room(result.nbytes)
        room.tensor.view(torch.int64).view(result.shape).copy_(result, non_blocking=True)
        self._result = room.array.view(np.int64).reshape(result.shape)
        self._stage.seal()

    def wait(self) -> Outcome:
        assert self._result is not None, "a step with constrained rows is waited for after sample"
        rows, result, count = self._samples.rows, self._result, self._step.proposals
        width = min(self._samples.width, self._runner.forward.tree_width or self._samples.width)
        tokens = np.full((self._step.num_rows, width), -1, np.int32)
        counts = self._step.samples.astype(np.int32)
        self._stage.wait()
        drafts = parents = None
        if result.ndim == 1:
            tokens[rows, 0] = result
        else:
            counts[rows] = result[:, 0]
            tokens[rows] = result[:, 1 : 1 + tokens.shape[1]]
            if count > 0:
                drafts = np.zeros((self._step.num_rows, count), np.int32)
                if self._runner.forward.tree_width:
                    parents = drafts.copy()
                    parents[rows], result = result[:, -count:], result[:, :-count]
                drafts[rows] = result[:, -count:]
        return Outcome(
            tokens=tokens,
            counts=counts,
            drafts=drafts,
            parents=parents,
            output_logprobs=self._host(self._scores),
            prompt_logprobs=self._host(self.prompt_scores),
            hidden_states=self.hidden.by_row() if self.hidden is not None else {},
            failed=self._failed,
            barred=self._without_choice(),
        )

    def _without_choice(self) -> tuple[int, ...]:
        if self._barred is None:
            return ()
        rows, barred = self._barred
        return tuple(row for row, none_left in zip(rows, barred.tolist(), strict=True) if none_left)

    def _host(self, scores: Scores | None) -> LogprobArrays | None:
        return scores.arrays() if scores is not None else None

    def _draw(self, raw: Tensor, masks: Mask | None) -> None:
        runner, samples, tensors = self._runner, self._samples, self._tensors
        setups = runner.rich_setups(samples)
        logits = raw
        rich = None
        if setups:
            rich = RichSamples.of(samples, setups, tensors, self._seen())
            logits = runner.shaper.shape(raw, rich)
            owners = samples.owners()
            self._failed = {int(samples.rows[owners[at]]): why for at, why in runner.shaper.take_failed().items()}
        if masks is not None and len(masks):
            masked = upload(samples.of_rows(self._step.constrained), runner.device)
            spare = logits is not raw or all(setup.logprobs is None for setup in setups)
            logits = apply_masks(logits, masked, upload(masks, runner.device), in_place=spare)
        blocked = self._blocked(logits, setups)
        drawn = runner.forward.draw(logits, tensors, has_drafts=samples.starts is not None)
        if samples.starts is None:
            result = runner.forward.keep(drawn, tensors)
        elif self.read is not None and self.has_trees:
            walked = runner.forward.walk(self.read, tensors, drawn, len(samples.rows), blocked)
            self._tensors, drawn, result = walked.tensors, walked.drawn_L, walked.path.result
            raw, logits = self._follow(walked.path, raw, logits, rich)
        else:
            result = runner.forward.verify(drawn, tensors, len(samples.rows), samples.width, blocked)
        if rich is not None:
            runner.shaper.advance(rich, result)
            self._score(raw, logits, drawn, setups)
        self.finish(self.propose(drawn, result))

    def _seen(self) -> Tensor | None:
        """Bits of the query tokens that each token sees, where drafts form trees."""
        tree = None if self.read is None else self.read.tree
        return None if tree is None else tree.seen_T

    def _follow(self, path: TreePath, raw: Tensor, logits: Tensor, rich: RichSamples | None) -> tuple[Tensor, Tensor]:
        """What scores and states are made of, in the order of the paths that were taken."""
        if self._states is not None and self.hidden is not None:
            at = upload(self.hidden.at, self._runner.device)
            place_of = torch.zeros_like(path.from_T)
            place_of[at] = torch.arange(len(at), device=at.device)
            self.hidden.keep(self._states[place_of[path.from_T[at]]])
            self._states = None
        if rich is None:
            return raw, logits
        return raw[path.from_L], raw[path.from_L] if logits is raw else logits[path.from_L]

    def propose(self, drawn_L: Tensor, result: Tensor) -> Tensor:
        """Has drafts made for the next step. Returns `result` with them behind it, where there are any."""
        step, samples = self._step, self._samples
        if self.read is None or not self.read.proposes:
            return result
        bounds = bounds_of(step, samples)
        return self._runner.forward.propose(self.read, self._tensors, drawn_L, result, bounds, step.proposals)

    def _blocked(self, logits: Tensor, setups: list[SlotSetup]) -> Tensor | None:
        """bool [L]: samples for which nothing is left of a list of allowed tokens; None: no row has such a list."""
        samples, device = self._samples, self._runner.device
        listed = [
            int(at) for at, s in zip(samples.rich, setups, strict=True) if s.sampling.allowed_token_ids is not None
        ]
        if not listed:
            return None
        at = upload(np.array(listed, np.int64), device)
        none_left = logits[at].amax(-1) == -torch.inf
        owners = samples.owners()[listed]
        firsts = np.flatnonzero(np.diff(owners, prepend=-1))
        self._barred = samples.rows[owners[firsts]].tolist(), download(none_left[upload(firsts, device)])
        return torch.zeros(len(logits), dtype=torch.bool, device=device).index_copy_(0, at, none_left)

    def _score(self, raw: Tensor, shaped: Tensor, tokens: Tensor, setups: list[SlotSetup]) -> None:
        asked = [
            (int(i), s.logprobs) for i, s in zip(self._samples.rich, setups, strict=True) if s.logprobs is not None
        ]
        if not asked:
            return
        index = np.array([i for i, _ in asked], np.int64)
        at = upload(index, self._runner.device)
        logits = raw[at].float()
        processed = np.array([spec.processed for _, spec in asked])
        if processed.any():
            wanted = upload(processed, self._runner.device)
            temperature = self._tensors.temperature_L[at].clamp_min(1e-5)[:, None]
            tempered = torch.where(temperature > 1e-5, shaped[at].float() / temperature, shaped[at].float())
            logits = torch.where(wanted[:, None], tempered, logits)
        rows = self._samples.rows[self._samples.owners()[index]].astype(np.int32)
        self._scores = score(logits, tokens[at], rows, [spec for _, spec in asked]).download()
