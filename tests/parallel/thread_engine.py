"""A whole engine with its ranks as threads of one process: everything that `bough.engine.build` makes, but for sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
import torch
from in_process import Mailbox

from bough.cache.prefix import PrefixCache
from bough.config.hosts import crew_of
from bough.config.layout import Layout
from bough.config.server_args import build_config
from bough.core.messages import Generate, LogprobSpec, Shutdown, pack_ids
from bough.core.sampling import GrammarSpec, SamplingParams
from bough.core.step import Runner
from bough.distributed.collectives import ALONE
from bough.distributed.mesh import Mesh
from bough.distributed.shared_memory import Patience
from bough.distributed.threads import ThreadMeshes
from bough.engine.agree import part_of
from bough.engine.build import kv_scales, load_model, make_runner, open_device, steps_in_flight
from bough.engine.decide import Decided, decide
from bough.engine.expert_plan import plan_experts
from bough.engine.held import RankMemory, of_rank
from bough.engine.lockstep import Agreement, LockstepInbox, LockstepRunner, exchange_over
from bough.engine.loop import Loop
from bough.engine.pipeline import PipelineRunner, run_stage, sampling_rank
from bough.engine.worker import BroadcastRunner, run_worker
from bough.engine_client.replicas import Replicas
from bough.layers.spread import TokenSpread
from bough.platform.facts import detect
from bough.runner.context import ContextShare
from bough.runner.model_runner import ModelRunner
from bough.scheduler.limits import Limits
from bough.scheduler.media import MediaAccount
from bough.scheduler.queues import Queues
from tests.sim.harness import Grammars

torch.set_num_threads(1)
PATIENCE_S = 30.0


class ThreadSource:
    """Where a thread takes messages from."""

    def __init__(self) -> None:
        self.queue: Queue[Any] = Queue()
        self.closed = False

    def drain(self, block_s: float) -> Sequence[Any]:
        messages = []
        try:
            messages.append(self.queue.get(timeout=block_s) if block_s else self.queue.get_nowait())
            while True:
                messages.append(self.queue.get_nowait())
        except Empty:
            return messages

    def send(self, message: Any) -> None:
        self.queue.put(message)


class ThreadChannel:
    """To several threads."""

    def __init__(self, sources: Sequence[ThreadSource]) -> None:
        self._sources = sources

    def send(self, message: Any) -> None:
        for each in self._sources:
            each.send(message)


@dataclass(frozen=True)
class Asked:
    """A prompt with media."""

    ids: Sequence[int]
    features: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    """What `Generate` has for them."""


class Scheduler:
    """One scheduler's ends."""

    def __init__(self) -> None:
        self.inbox = ThreadSource()
        self.mailbox = Mailbox()


class ThreadEngine:
    """`with ThreadEngine(path, tp_size=2) as engine: engine.ask(prompts)`. Settings are those of `bough serve`."""

    def __init__(self, path: Path, **settings: Any) -> None:
        base = {
            "model": str(path), "skip_tokenizer_init": True, "device": "cpu", "dtype": "float32", "cpu_threads": 1,
            "custom_kernels": False, "max_total_tokens": 4096, "page_size": 4, "max_running_requests": 8,
        }  # fmt: skip
        config = build_config(**{**base, **settings})
        self.parallel = config.parallel
        self.layout = Layout.of(self.parallel)
        self.decided: Decided = decide(config, detect("cpu"), lambda machine: part_of(machine, self.layout.size))
        self._ranks = ThreadMeshes(self.layout, PATIENCE_S)
        self._sources = [ThreadSource() for _ in range(self.layout.size)]
        self._outcomes = ThreadSource()
        self.schedulers = [Scheduler() for _ in range(self.layout.dp)]
        self.held: list[RankMemory | None] = [None] * self.layout.size
        self.loops: dict[int, Loop] = {}
        self.runners: dict[int, ModelRunner] = {}
        self.errors: list[BaseException] = []
        self.features: dict[str, np.ndarray] = {}
        """Of media, by path."""
        self._next_id = 0
        self._threads = [threading.Thread(target=self._run, args=(rank,)) for rank in range(self.layout.size)]

    # -- one rank --------------------------------------------------------------------------------------------------

    def _run(self, rank: int) -> None:
        try:
            runner, spread = self._build(rank, self._ranks.meshes[rank])
            with torch.inference_mode():
                self._serve(rank, self._ranks.meshes[rank], runner, spread)
        except BaseException as error:
            self.errors.append(error)
            self._ranks.break_up(f"rank {rank} has failed: {error}")
            for source in (*self._sources, self._outcomes):
                source.closed = True

    def _build(self, rank: int, mesh: Mesh) -> tuple[ModelRunner, TokenSpread | None]:
        checkpoint, facts, pooling, resolved = self.decided[:4]
        config, plan = resolved.config, resolved.plan
        device = open_device(config, 0)
        spread = TokenSpread(mesh) if mesh.tokens.size > 1 else None
        experts = plan_experts(config.parallel, facts)
        model = load_model(checkpoint, config, plan, device, mesh, pooling, None, experts, spread)
        runner = make_runner(
            model,
            config,
            plan,
            device,
            facts,
            pooling,
            kv_scales(checkpoint, config, facts, rank),
            sharing_context=mesh.cp,
            same_requests=mesh.replica,
        )
        assert isinstance(runner, ModelRunner)
        assert isinstance(model, torch.nn.Module)
        self.held[rank] = of_rank(rank, model, runner.pool, runner.states)
        self.runners[rank] = runner
        return runner, spread

    def _serve(self, rank: int, mesh: Mesh, runner: ModelRunner, spread: TokenSpread | None) -> None:
        crew, patience = crew_of(self.parallel, rank), Patience(PATIENCE_S)
        if rank == crew[0]:
            self._schedule(mesh, runner, crew, spread)
        elif self.layout.pp == 1:
            run_worker(self._sources[rank], runner, patience, spread)
        else:
            sink = self._outcomes if rank == sampling_rank(self.parallel) else None
            run_stage(self._sources[rank], runner, patience, sink)

    def _schedule(self, mesh: Mesh, local: ModelRunner, crew: list[int], spread: TokenSpread | None) -> None:
        config = self.decided.resolved.config
        ends = self.schedulers[mesh.dp.rank]
        others = ThreadChannel([self._sources[rank] for rank in crew[1:]])
        runner: Runner = local
        inbox: Any = ends.inbox
        company: LockstepRunner | None = None
        if spread is not None:
            peers = [each.inbox for each in self.schedulers if each is not ends]
            talk = mesh.dp.talk if mesh.dp.size > 1 else ALONE
            agreement = Agreement(exchange_over(talk), ThreadChannel(peers).send)
            runner = company = LockstepRunner(local, agreement, spread, others if len(crew) > 1 else None)
            inbox = LockstepInbox(inbox, agreement)
        elif self.layout.pp > 1:
            runner = PipelineRunner(local, others, self._outcomes)
        elif len(crew) > 1:
            runner = BroadcastRunner(local, others)
        limits = Limits.of(local.limits, config.scheduler, max_step_drafts=0, seed=0)
        if self.layout.pp > 1:
            limits = replace(limits, num_stages=self.layout.pp, micro_batch=0)
        cache = PrefixCache(num_pages=limits.num_pages, layout=limits.layout, num_snapshots=limits.num_snapshots)
        queues = Queues(limits, Grammars())
        if local.limits.media is not None:
            queues.media = MediaAccount(local.limits.media, lambda given: self.features[given.path])
        loop = Loop(
            runner=runner, queues=queues, cache=cache, limits=limits, inbox=inbox, outbox=ends.mailbox,
            depth=steps_in_flight(config), strict=True, company=company, idle_s=0.05,
        )  # fmt: skip
        self.loops[mesh.dp.rank] = loop
        loop.run()
        if company is not None:
            company.stop(inbox)
        elif isinstance(runner, PipelineRunner | BroadcastRunner):
            runner.stop()

    # -- for tests -------------------------------------------------------------------------------------------------

    def __enter__(self) -> ThreadEngine:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for each in self.schedulers:
            each.inbox.send(Shutdown(0.0))
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._ranks.break_up("the test is over")
        if error is None:
            assert not self.errors, self.errors
            assert not any(thread.is_alive() for thread in self._threads), "a rank has not ended"

    def submit(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        scheduler: int = 0,
        logprobs: LogprobSpec | None = None,
        grammar: GrammarSpec | None = None,
        **media: Any,
    ) -> int:
        self._next_id += 1
        sampling = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True, grammar=grammar)
        message = Generate(
            id=self._next_id,
            rid=str(self._next_id),
            prompt=pack_ids(prompt),
            sampling=sampling,
            logprobs=logprobs,
            **media,
        )
        self.schedulers[scheduler].inbox.send(message)
        return self._next_id

    def answer(self, request: int, scheduler: int = 0, reasons: Sequence[str] = ("length",)) -> list[int]:
        give_up_s = time.monotonic() + 2 * PATIENCE_S
        answers = self.schedulers[scheduler].mailbox.answers
        while request not in answers or answers[request].end is None:
            assert not self.errors, self.errors
            assert time.monotonic() < give_up_s, "no answer comes"
            time.sleep(0.001)
        assert answers[request].end.reason in reasons, answers[request].end
        return answers[request].tokens

    def ask(self, prompts: Sequence[Sequence[int] | Asked], new_tokens: int = 12) -> list[list[int]]:
        """Greedy answers, from each scheduler in turn."""
        count = len(self.schedulers)
        return self.ask_at([at % count for at in range(len(prompts))], prompts, new_tokens)

    def ask_at(
        self, schedulers: Sequence[int], prompts: Sequence[Sequence[int] | Asked], new_tokens: int
    ) -> list[list[int]]:
        """Greedy answers, all prompts at once, each from the scheduler that is named for it."""
        given = [each if isinstance(each, Asked) else Asked(each) for each in prompts]
        for each in given:
            self.features |= each.features
        asked = [self.submit(each.ids, new_tokens, at, **each.more) for at, each in zip(schedulers, given, strict=True)]
        return [self.answer(*each) for each in zip(asked, schedulers, strict=True)]

    @property
    def engines(self) -> list[ThreadEngine]:
        """As `ThreadReplicas.engines`."""
        return [self]

    def scores(self, prompt: Sequence[int], scheduler: int = 0) -> list[float]:
        """Log-probabilities of a prompt's tokens but the first, and of the token that is drawn behind it."""
        request = self.submit(prompt, 1, scheduler, LogprobSpec(start=0))
        self.answer(request, scheduler)
        answer = self.schedulers[scheduler].mailbox.answers[request]
        assert answer.prompt_logprobs is not None
        found = [*answer.prompt_logprobs.logprobs[1:], *answer.output_logprobs[0].logprobs]
        return [each for each in found if each is not None]

    def kv(self, rank: int) -> list[np.ndarray]:
        """A rank's keys."""
        return [each.numpy() for each in self.runners[rank].pool.keys]

    def contexts(self) -> list[ContextShare | None]:
        """What ranks share."""
        return [runner.context for runner in self.runners.values()]


class ThreadReplicas:
    """`--dp-size`: engines beside one another, with a model and a KV cache each. Who is asked is chosen as servers do."""

    def __init__(self, path: Path, *, dp_size: int, **settings: Any) -> None:
        self.engines = [ThreadEngine(path, dp_size=dp_size, **settings) for _ in range(dp_size)]
        self._places = [(each, at) for each in self.engines for at in range(len(each.schedulers))]
        self._replicas = Replicas([Unsent()] * len(self._places), (), "round_robin")

    def __enter__(self) -> ThreadReplicas:
        for each in self.engines:
            each.__enter__()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for each in self.engines:
            each.__exit__(kind, error, trace)

    def ask(self, prompts: Sequence[Sequence[int] | Asked], new_tokens: int = 12) -> list[list[int]]:
        """Greedy answers."""
        places = [self._replicas.choose(np.empty(0, np.int32), "") for _ in prompts]
        answers: dict[int, list[int]] = {}
        for engine in self.engines:
            its = [number for number, place in enumerate(places) if self._places[place][0] is engine]
            schedulers = [self._places[places[number]][1] for number in its]
            given = engine.ask_at(schedulers, [prompts[number] for number in its], new_tokens)
            answers |= dict(zip(its, given, strict=True))
        assert len(set(places)) == min(len(prompts), len(self._places)), "all of them were asked"
        return [answers[number] for number in range(len(prompts))]


class Unsent:
    """Requests go to an engine's threads by another way."""

    def send(self, message: Any) -> None:
        raise AssertionError("nothing is sent here")

    def send_all(self, messages: Sequence[Any]) -> None:
        raise AssertionError("nothing is sent here")

    def close(self) -> None: ...


def spread_over(path: Path, **settings: Any) -> ThreadEngine | ThreadReplicas:
    """Engines as these settings say."""
    return ThreadReplicas(path, **settings) if settings.get("dp_size", 1) > 1 else ThreadEngine(path, **settings)
