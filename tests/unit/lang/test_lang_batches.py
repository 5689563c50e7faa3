"""Many programs: order, isolation, threads, ten thousand at once, and what they share in the cache."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import lang_toy_model as toy
import pytest
from lang_fake_server import FakeServer

import bough.lang as sgl
from bough.lang.sampling import SamplingParams
from bough.lang.transcript import Prompt
from tests.covers import long


class Echo(sgl.Backend):
    """Answers at once with the prompt's last word in capitals; counts how many wait at the same time."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.at_once = 0
        self.most_at_once = 0
        self.calls = 0

    @property
    def name(self) -> str:
        return "echo"

    async def async_generate(self, prompt: Prompt, params: SamplingParams) -> sgl.Generation:
        self.calls += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.delay_s)
        self.at_once -= 1
        if "fail" in prompt.text:
            raise RuntimeError("the model is tired")
        return sgl.Generation(prompt.text.split()[-1].upper(), {"completion_tokens": 1})

    async def async_stream(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[sgl.Generation]:
        yield await self.async_generate(prompt, params)


@sgl.function
def shout(s, word):
    s += f"say {word} " + sgl.gen("loud")
    if s["loud"] == "BOOM":
        raise ValueError("boom")


def test_states_come_back_in_order_whatever_their_members_are() -> None:
    words = [f"w{i}" for i in range(20)]
    states = shout.run_batch([{"word": w} for w in words], backend=Echo(0.01), num_threads=4)
    assert [state["loud"] for state in states] == [w.upper() for w in words]
    states = shout.run_batch([(w,) for w in words], backend=Echo(), num_threads="auto")
    assert [state["loud"] for state in states] == [w.upper() for w in words]
    assert shout.run_batch([], backend=Echo()) == []


def test_a_failed_member_neither_hangs_nor_hides_the_others() -> None:
    words = ["a", "boom", "b", "fail", "c"]
    states = shout.run_batch([{"word": w} for w in words], backend=Echo(), num_threads=2)
    errors = [state.error() for state in states]
    assert [states[i]["loud"] for i in (0, 2, 4)] == ["A", "B", "C"]
    assert [errors[i] for i in (0, 2, 4)] == [None, None, None]
    assert isinstance(errors[1], ValueError)
    assert states[1]["loud"] == "BOOM"
    assert isinstance(errors[3], sgl.ProgramError)
    assert "the model is tired" in str(errors[3])
    with pytest.raises(sgl.ProgramError):
        states[3]["loud"]


def test_no_more_threads_than_asked_for() -> None:
    backend = Echo(0.02)
    before = threading.active_count()
    most = 0

    @sgl.function
    def program(s, word):
        nonlocal most
        forks = s.fork(4)
        forks += lambda i: f"say {word}{i} " + sgl.gen("x")
        forks.join()
        most = max(most, threading.active_count())
        return s["x"]

    states = program.run_batch([{"word": f"w{i}"} for i in range(12)], backend=backend, num_threads=3)
    assert [state.ret_value for state in states] == [[f"W{i}{j}" for j in range(4)] for i in range(12)]
    assert most <= before + 3 + 1  # the three, and the one loop of the process if it had not started before
    assert backend.most_at_once <= 12


@pytest.mark.parametrize("count", [1000, long(10_000)])
def test_thousands_of_async_programs_at_once(count: int) -> None:
    class Meeting(Echo):
        """Answers only when all have asked."""

        async def async_generate(self, prompt: Prompt, params: SamplingParams) -> sgl.Generation:
            self.calls += 1
            if self.calls == count:
                everybody.set()
            await everybody.wait()
            return sgl.Generation(prompt.text.split()[-1].upper(), {})

    everybody = asyncio.Event()
    backend = Meeting()

    @sgl.function
    async def program(s, word):
        s += f"say {word} " + sgl.gen("first")
        first = await s.aget("first")
        s += f" then {first}x " + sgl.gen("second")
        await s
        return s["second"]

    before = threading.active_count()
    states = program.run_batch([{"word": f"w{i}"} for i in range(count)], backend=backend)
    assert [state.ret_value for state in states] == [f"W{i}X" for i in range(count)]
    assert backend.calls == 2 * count
    assert threading.active_count() <= before + 1


async def test_async_batches_on_the_callers_loop() -> None:
    loops = set()

    @sgl.function
    async def program(s, word):
        loops.add(asyncio.get_running_loop())
        s += f"say {word} " + sgl.gen("x")
        forks = s.fork(2)
        forks += lambda i: f" more{i} " + sgl.gen("y")
        forks.join()
        await asyncio.gather(*(branch.aget("y") for branch in forks))
        if await s.aget("x") == "BOOM":
            raise ValueError("boom")
        return await s.aget("y")

    backend = Echo(0.01)
    states = await program.arun_batch([{"word": w} for w in ("a", "boom", "c")], backend=backend, num_threads=2)
    assert loops == {asyncio.get_running_loop()}
    assert states[0].ret_value == states[2].ret_value == ["MORE0", "MORE1"]
    assert isinstance(states[1].error(), ValueError)
    state = await program.arun(word="z", backend=backend)
    assert state["x"] == "Z"


def test_async_programs_must_await() -> None:
    @sgl.function
    async def program(s):
        s += "say it " + sgl.gen("x")
        return s["x"]

    with pytest.raises(sgl.LangError, match=r"await s\.aget"):
        program.run(backend=Echo(0.1))


def test_async_width_is_bounded_when_asked() -> None:
    class Five(Echo):
        """Answers only when five have asked."""

        async def async_generate(self, prompt: Prompt, params: SamplingParams) -> sgl.Generation:
            self.calls += 1
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            if self.calls == 5:
                five.set()
            await asyncio.wait_for(five.wait(), 60)
            await asyncio.sleep(self.delay_s)
            self.at_once -= 1
            return sgl.Generation("X", {})

    five = asyncio.Event()
    backend = Five(0.01)

    @sgl.function
    async def program(s, word):
        s += f"say {word} " + sgl.gen("x")

    program.run_batch([{"word": f"w{i}"} for i in range(30)], backend=backend, num_threads=5)
    assert backend.most_at_once == 5


def test_generator_style_is_lazy_and_in_order() -> None:
    backend = Echo()
    states = shout.run_batch(
        [{"word": f"w{i}"} for i in range(1000)], backend=backend, num_threads=2, generator_style=True
    )
    assert backend.calls == 0
    assert next(states)["loud"] == "W0"
    assert next(states)["loud"] == "W1"
    assert backend.calls < 100
    states.close()


def test_progress_bar_counts_to_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    shout.run_batch([{"word": "a"}] * 7, backend=Echo(), progress_bar=True)
    assert capsys.readouterr().err.endswith("7/7 programs\n")


def test_bad_members_are_refused_before_anything_runs() -> None:
    backend = Echo()
    with pytest.raises(sgl.LangError, match="no parameter 'wrod'"):
        shout.run_batch([{"word": "a"}, {"wrod": "b"}], backend=backend)
    with pytest.raises(sgl.LangError, match="missing a required argument"):
        shout.run_batch([{"word": "a"}, {}], backend=backend)
    with pytest.raises(sgl.LangError, match="num_threads"):
        shout.run_batch([{"word": "a"}], backend=backend, num_threads=0)
    assert backend.calls == 0


def test_bind() -> None:
    @sgl.function
    def program(s, greeting, word):
        s += f"{greeting} {word} " + sgl.gen("x")

    bound = program.bind(greeting="say")
    assert bound.run(word="it", backend=Echo()).text() == "say it IT"
    assert [s["x"] for s in bound.run_batch([{"word": "a"}], backend=Echo())] == ["A"]
    with pytest.raises(sgl.LangError, match="no parameter"):
        program.bind(nothing=1)


EXAMPLES = "".join(f"Q: what is the thing number {i}? A: it is the thing number {i}.\n" for i in range(8))


@sgl.function
def few_shot(s, examples, question):
    s += "Answer in the way of the examples.\n"
    s += examples
    s += f"Q: {question} A: " + sgl.gen("answer", max_tokens=4)


def test_the_common_prefix_of_a_batch_is_computed_once(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    members = [{"examples": EXAMPLES, "question": f"and {i}?"} for i in range(16)]
    prefix = "Answer in the way of the examples.\n" + EXAMPLES + "Q: "

    few_shot.run_batch(members, backend=backend, num_threads=16)
    with_caching = fake.computed_tokens
    assert fake.bodies("/generate")[0] == {
        "text": prefix,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
    }
    assert with_caching < len(toy.tokenize(prefix)) + 16 * 20

    fake.start_anew()
    fake.answer_when = 16
    sgl.global_config.enable_precache_with_tracing = False
    few_shot.run_batch(members, backend=backend, num_threads=16)
    assert fake.computed_tokens > 5 * with_caching


class Sharing(Echo):
    """May let prompts wait for one that computes their beginning."""

    has_prefix_cache = True

    def __init__(self, *, shares: bool, refuses: bool = False) -> None:
        super().__init__()
        self.shares = shares
        self.refuses = refuses
        self.cached: list[str] = []
        self.order: list[str] = []

    async def async_shares_in_flight(self) -> bool:
        return self.shares

    async def async_cache_prefix(self, prompt: Prompt) -> None:
        self.cached.append(prompt.text)
        if self.refuses:
            raise sgl.BackendError(what="the prefix is too long", http_status=400)
        self.order.append("prefix")

    async def async_generate(self, prompt: Prompt, params: SamplingParams) -> sgl.Generation:
        self.order.append("member")
        return await super().async_generate(prompt, params)


MEMBERS = [{"examples": EXAMPLES, "question": f"and {i}?"} for i in range(4)]


def test_members_wait_for_their_prefix_unless_the_server_makes_them_wait() -> None:
    eager, careful = Sharing(shares=True), Sharing(shares=False)
    for backend in (eager, careful):
        states = few_shot.run_batch(MEMBERS, backend=backend)
        assert [state.error() for state in states] == [None] * 4
    assert eager.order == ["member"] * 4, "the first brings the prefix, and the server makes the others wait for it"
    assert careful.order == ["prefix"] + ["member"] * 4


def test_branches_of_a_server_that_shares_cost_no_request_of_their_own() -> None:
    @sgl.function
    def program(s):
        s += EXAMPLES
        forks = s.fork(3)
        forks += lambda i: f"{i} " + sgl.gen("x")
        forks.join()

    eager, careful = Sharing(shares=True), Sharing(shares=False)
    assert program.run(backend=eager)["x"] == program.run(backend=careful)["x"]
    assert (eager.cached, careful.cached) == ([], [EXAMPLES])


async def test_a_refused_prefix_is_no_members_fault() -> None:
    @sgl.function
    async def asynchronous(s, examples, question):
        s += examples
        s += f"Q: {question} A: " + sgl.gen("answer")

    for program in (few_shot, asynchronous):
        states = await program.arun_batch(MEMBERS, backend=Sharing(shares=False, refuses=True))
        assert [state.error() for state in states] == [None] * 4


def test_short_prefixes_and_single_members_cost_no_request(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    few_shot.run_batch([{"examples": EXAMPLES, "question": "x"}], backend=backend)
    few_shot.run_batch([{"examples": str(i), "question": "x"} for i in range(2)], backend=backend)
    assert all(body["sampling_params"]["max_new_tokens"] for body in fake.bodies("/generate"))


def test_a_fork_computes_its_new_text_once(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    fake.delay_s = 0.02

    @sgl.function
    def program(s):
        s += EXAMPLES
        forks = s.fork(8)
        forks += lambda i: f"{i}" + sgl.gen("x", max_tokens=1)
        forks.join()
        again = s.fork(8)
        again += lambda i: f"again {i}" + sgl.gen("y", max_tokens=1)
        again.join()

    program.run(backend=backend)
    assert fake.computed_tokens < len(toy.tokenize(EXAMPLES)) + 16 * 12
    assert len([b for b in fake.bodies("/generate") if b["sampling_params"]["max_new_tokens"] == 0]) == 1


def test_cache_puts_the_constant_prefix_into_the_cache(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    @sgl.function
    def program(s, question):
        s += sgl.system("Always answer.")
        s += sgl.user(f"Please: {question}") + sgl.assistant(sgl.gen("a"))

    prefix = program.cache(backend=backend)
    assert prefix == "<|im_start|>system\nAlways answer.<|im_end|>\n<|im_start|>user\nPlease: "
    assert fake.bodies("/generate")[0]["text"] == prefix
    state = program.run(question="why", backend=backend, max_new_tokens=2)
    assert state.get_meta_info("a")["cached_tokens"] == len(toy.tokenize(prefix))


def test_an_interrupted_program_stops_its_requests(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    fake.delay_s = 100.0

    @sgl.function
    def program(s):
        s += "slow " + sgl.gen("x")
        while not fake.bodies("/generate"):
            time.sleep(0.01)
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        program.run(backend=backend)
    while not fake.disconnects:
        assert time.monotonic() - start < 60, "the server never saw the client go"
        time.sleep(0.01)


async def test_cancelling_an_async_program_cancels_its_requests() -> None:
    backend = Echo(100.0)

    @sgl.function
    async def program(s):
        s += "slow one " + sgl.gen("x")
        await s

    task = asyncio.create_task(program.arun(backend=backend))
    async with asyncio.timeout(30):
        while not backend.calls:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while asyncio.all_tasks() != {asyncio.current_task()}:
            await asyncio.sleep(0.01)


def test_verbosity_writes_the_final_text(capsys: pytest.CaptureFixture[str]) -> None:
    sgl.global_config.verbosity = 2
    shout.run(word="hey", backend=Echo())
    assert capsys.readouterr().out == "say hey HEY\n"
