"""Programs end to end over HTTP: appending, reading, roles, branching, streaming, errors."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
import traceback
from contextvars import copy_context

import lang_toy_model as toy
import pytest
from lang_fake_server import FakeServer
from pydantic import BaseModel

import bough
import bough.lang as sgl
from bough.lang import executor


def toy_text(prompt: str, max_new_tokens: int) -> str:
    return toy.detokenize(toy.generate(toy.tokenize(prompt), max_new_tokens))


def test_text_and_generations_alternate(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s, name):
        s += "Hello " + name + ": " + sgl.gen("first", max_tokens=5)
        s += " and " + sgl.gen("second", max_tokens=3)

    state = program.run(name="Ada", backend=backend)
    first = toy_text("Hello Ada: ", 5)
    second = toy_text(f"Hello Ada: {first} and ", 3)
    assert state["first"] == first
    assert state.get_var("second") == second
    assert state.text() == f"Hello Ada: {first} and {second}"
    assert state.get_meta_info("second")["completion_tokens"] == 3
    assert "first" in state
    assert "third" not in state


def test_python_decides_on_generated_values(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    fake.script = [(r"Tool: $", "search"), (r"Query: $", "cats\nmore"), (r"Sum: $", "plus")]

    @sgl.function
    def program(s):
        s += "Tool: " + sgl.gen("tool")
        if s["tool"] == "search":
            s += "\nQuery: " + sgl.gen("query", stop="\n")
        else:
            s += "\nSum: " + sgl.gen("sum")
        return s["query"].upper()

    state = program.run(backend=backend)
    assert state.ret_value == "CATS"
    assert "sum" not in state
    assert state.text() == "Tool: search\nQuery: cats"


def test_a_variable_generated_again_is_waited_for_again(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    fake.script = [(rf"step {i}: $", f"v{i}") for i in range(5)]

    @sgl.function
    def program(s):
        seen = []
        for i in range(5):
            s += f"step {i}: " + sgl.gen("x", stop="\n") + "\n"
            seen.append(s["x"])
        return seen

    assert program.run(backend=backend).ret_value == ["v0", "v1", "v2", "v3", "v4"]


def test_roles_use_the_servers_own_template(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    fake.script = [("assistant\n$", "  Hi there.")]

    @sgl.function
    def program(s):
        s += sgl.system("Be brief.")
        with s.user():
            s += "Hello"
        s += sgl.assistant_begin() + sgl.gen("reply") + sgl.assistant_end()

    state = program.run(backend=backend)
    assert state.text() == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n  Hi there.<|im_end|>\n"
    )
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi there."},
    ]
    assert "<|im_end|>" in fake.bodies("/generate")[-1]["sampling_params"]["stop"]


def test_template_falls_back_to_the_model_path_then_to_default(fake: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += sgl.user("Hi")
        s += sgl.assistant(sgl.gen("reply", max_tokens=1))

    fake.model_info = {"model_path": "meta-llama/Llama-3.1-8B-Instruct"}
    text = program.run(backend=sgl.RuntimeEndpoint(fake.url)).text()
    assert text.startswith("<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>")
    fake.model_info = {"model_path": "some/base-model"}
    assert program.run(backend=sgl.RuntimeEndpoint(fake.url)).text().startswith("USER:Hi\nASSISTANT:")
    named = sgl.RuntimeEndpoint(fake.url, chat_template_name="vicuna_v1.1")
    assert "USER:Hi ASSISTANT:" in program.run(backend=named).text()


def test_defaults_of_a_run_and_what_gen_overrides(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += "a: " + sgl.gen("x")
        s += sgl.gen("y", max_tokens=2, temperature=0.3, stop=["!", "?"], top_k=7, min_p=0.1, stop_regex="[0-9]")
        s += sgl.gen("z", frequency_penalty=0.5, presence_penalty=0.25, ignore_eos=True, min_tokens=1, top_p=0.5,
                     stop_token_ids=[3], max_tokens=3, return_logprob=True, logprob_start_len=0, top_logprobs_num=2,
                     return_text_in_logprobs=True)  # fmt: skip

    program.run(backend=backend, max_new_tokens=4, temperature=0, stop="Z")
    x, y, z = fake.bodies("/generate")
    assert (x["sampling_params"]["max_new_tokens"], x["sampling_params"]["temperature"]) == (4, 0)
    assert x["sampling_params"]["stop"] == ["Z"]
    assert "return_logprob" not in x
    assert y["sampling_params"] | {
        "max_new_tokens": 2, "temperature": 0.3, "stop": ["!", "?"], "top_k": 7, "min_p": 0.1, "stop_regex": ["[0-9]"],
    } == y["sampling_params"]  # fmt: skip
    assert z["sampling_params"] | {
        "frequency_penalty": 0.5, "presence_penalty": 0.25, "ignore_eos": True, "min_new_tokens": 1, "top_p": 0.5,
        "stop_token_ids": [3], "max_new_tokens": 3, "temperature": 0,
    } == z["sampling_params"]  # fmt: skip
    assert (z["return_logprob"], z["logprob_start_len"], z["top_logprobs_num"]) == (True, 0, 2)


def test_n_samples_make_a_list(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s):
        s += "Say: " + sgl.gen("many", n=3, max_tokens=2)

    state = program.run(backend=backend)
    assert len(state["many"]) == 3
    assert state.text() == "Say: " + state["many"][0]
    assert [meta["completion_tokens"] for meta in state.get_meta_info("many")] == [2, 2, 2]


def test_constrained_generation(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    @sgl.function
    def program(s):
        s += sgl.gen_int("int") + sgl.gen_string("str") + sgl.gen("bool", dtype=bool) + sgl.gen("float", dtype="float")
        s += sgl.gen("re", regex="(ab|c)[0-9]{2}") + sgl.gen("js", json_schema={"type": "integer"})

    state = program.run(backend=backend)
    assert int(state["int"]) == 0
    assert state["str"] == '""'
    assert state["bool"] == "True"
    assert float(state["float"]) == 0.0
    assert state["re"] == "ab00"
    assert json.loads(state["js"]) == 3


class Line(BaseModel):
    item: str
    price: float


class Invoice(BaseModel):
    number: int
    lines: list[Line]


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


def test_gen_into_a_pydantic_model_or_a_dataclass(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s):
        s += "Invoice: " + sgl.gen("invoice", schema=Invoice) + "\nPoint: " + sgl.gen("point", schema=Point)

    state = program.run(backend=backend)
    assert state["invoice"] == Invoice(number=3, lines=[Line(item="word", price=3.5)])
    assert state["point"] == Point(3, 3)
    assert json.loads(state.text().split("\n")[0].removeprefix("Invoice: "))["number"] == 3


def test_var_scope_and_set_var(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    fake.script = [("two $", "TWO")]

    @sgl.function
    def program(s):
        s += "one "
        with s.var_scope("part"):
            s += "two " + sgl.gen("x") + " three"
        s["mine"] = 7
        s.set_var("other", 8)

    state = program.run(backend=backend)
    assert state["part"] == "two TWO three"
    assert state["mine"] + state["other"] == 15


def test_fork_gathers_variables_in_order(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s):
        s += "Root: "
        s["before"] = 1
        forks = s.fork(3)
        forks += lambda i: f"branch {i}: " + sgl.gen("x", max_tokens=2)
        forks += ["a", "b", "c"]
        forks += sgl.gen("y", max_tokens=1)
        forks[1] += sgl.gen("only_one", max_tokens=1)
        forks.join()
        return [len(forks), *(branch.text() for branch in forks)]

    state = program.run(backend=backend)
    xs = [toy_text(f"Root: branch {i}: ", 2) for i in range(3)]
    assert state["x"] == xs
    assert len(state["y"]) == 3
    assert len(state["only_one"]) == 1
    assert state["before"] == 1
    assert state.text() == "Root: "
    assert state.ret_value[0] == 3
    assert state.ret_value[3].startswith(f"Root: branch 2: {xs[2]}c")


def test_branches_run_at_the_same_time_without_threads_of_their_own(
    backend: sgl.RuntimeEndpoint, fake: FakeServer
) -> None:
    @sgl.function
    def program(s):
        s += "Root: " + sgl.gen("start", max_tokens=1)
        assert s["start"]
        fake.answer_when = 9  # the root and all its branches
        forks = s.fork(8)
        forks += lambda i: f"{i}" + sgl.gen("x", max_tokens=1)
        threads = {t.name for t in threading.enumerate() if t.name.startswith("bough")}
        forks.join()
        return threads

    state = program.run(backend=backend)
    assert fake.most_at_once == 8
    assert len(state["x"]) == 8
    assert state.ret_value == {"bough-lang"}


def test_copy_leaves_the_state_alone(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s):
        s += "A "
        with s.copy() as tmp:
            tmp += "aside " + sgl.gen("aside", max_tokens=2)
        s += "B"

    state = program.run(backend=backend)
    assert state.text() == "A B"
    assert state["aside"] == [toy_text("A aside ", 2)]


def test_nested_forks(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s):
        s += "0"
        outer = s.fork(2)
        for i, branch in enumerate(outer):
            branch += f"1{i}"
            inner = branch.fork(2)
            inner += lambda j: f"2{j}" + sgl.gen("leaf", max_tokens=1)
            inner.join()
        outer.join()

    state = program.run(backend=backend)
    assert state["leaf"] == [[toy_text(f"01{i}2{j}", 1) for j in range(2)] for i in range(2)]


def test_join_concatenates_texts_and_says_so(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s):
        s += "Root."
        forks = s.fork(2)
        forks += lambda i: f" Part {i}."
        forks.join("concate_and_append")
        s += " End: " + sgl.gen("end", max_tokens=1)

    state = program.run(backend=backend)
    assert state.text() == "Root. Part 0. Part 1. End: " + state["end"]
    assert state.get_meta_info("join")["kind"] == "text"
    assert "KV join" in state.get_meta_info("end")["join"]["why"]


def test_join_on_the_servers_kv(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    fake.server_info["kv_join"] = True

    @sgl.function
    def program(s):
        s += "Root."
        forks = s.fork(2, position_ids_offset=[0, 5])
        forks += lambda i: f" Part {i}."
        forks.join("concate_and_append")
        s += " End: " + sgl.gen("end", max_tokens=1)
        s += sgl.gen("more", max_tokens=1)

    state = program.run(backend=backend)
    join = fake.bodies("/concate_and_append_request")[0]
    filled = {body["rid"]: body["text"] for body in fake.bodies("/generate") if "rid" in body}
    assert filled[join["dst_rid"]] == "Root."
    assert [filled[rid] for rid in join["src_rids"]] == ["Root. Part 0.", "Root. Part 1."]
    assert join["position_ids_offset"] == [0, 5]
    end, more = fake.bodies("/generate")[-2:]
    assert end["text"] == " End: "
    assert more["text"] == " End: " + state["end"]
    assert end["session_params"] == {"id": "session-1", "rid": join["dst_rid"]}
    assert state.text() == f"Root. Part 0. Part 1. End: {state['end']}{state['more']}"
    assert state.get_meta_info("join") == {"kind": "kv", "computed_tokens": 0}


@pytest.mark.parametrize("how", ["refused", "no route", "switched off"])
def test_kv_join_falls_back_to_text(backend: sgl.RuntimeEndpoint, fake: FakeServer, how: str) -> None:
    fake.server_info["kv_join"] = True
    if how == "refused":
        fake.join_reply = {"success": False, "message": "no RoPE here"}
    elif how == "no route":
        fake.fail_with["/concate_and_append_request"] = (404, {"message": "unknown route"})
    else:
        sgl.global_config.enable_parallel_encoding = False

    @sgl.function
    def program(s):
        s += "Root."
        forks = s.fork(2)
        forks += lambda i: f" Part {i}."
        forks.join("concate_and_append")
        s += " End: " + sgl.gen("end", max_tokens=1)

    state = program.run(backend=backend)
    reasons = {"refused": "no RoPE here", "no route": "unknown route", "switched off": "enable_parallel_encoding"}
    assert state.get_meta_info("join")["kind"] == "text"
    assert reasons[how] in state.get_meta_info("join")["why"]
    assert fake.bodies("/generate")[-1]["text"] == "Root. Part 0. Part 1. End: "


def test_streaming_gives_the_text_piece_by_piece(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    fake.script = [("Q: $", "the answer is London"), ("again: $", "yes")]

    @sgl.function
    def program(s):
        s += "Q: " + sgl.gen("x") + "\nagain: " + sgl.gen("y")

    plain = program.run(backend=backend)
    fake.taken = threading.Semaphore(1)
    state = program.run(backend=backend, stream=True)
    pieces = []
    for piece in state.text_iter():
        pieces.append(piece)
        fake.taken.release()
    fake.taken = None
    assert len(pieces) > 4
    assert "".join(pieces) == state.text() == plain.text()
    state = program.run(backend=backend, stream=True)
    assert "".join(state.text_iter("x")) == "the answer is London"
    assert "".join(state.text_iter("y")) == "yes" == state["y"]


async def test_streaming_asynchronously(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    fake.script = [("Q: $", "the answer is London")]

    @sgl.function
    def program(s):
        s += "Q: " + sgl.gen("x")

    @sgl.function
    async def async_program(s):
        s += "Q: " + sgl.gen("x")
        assert await s.aget("x") == "the answer is London"

    for one in (program, async_program):
        fake.taken = threading.Semaphore(1)
        state = await one.arun(backend=backend, stream=True)
        pairs = []
        async for pair in state.text_async_iter("x", return_meta_data=True):
            pairs.append(pair)
            fake.taken.release()
        fake.taken = None
        assert len(pairs) > 4
        assert "".join(piece for piece, _ in pairs) == "the answer is London"
        counts = [meta["completion_tokens"] for _, meta in pairs]
        assert counts == sorted(counts)
        state = one.run(backend=backend, stream=True)
        assert "".join([piece async for piece in state.text_async_iter()]) == "Q: the answer is London"


def test_streams_of_servers_that_send_pieces(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    fake.server_info["incremental_streaming_output"] = True
    fake.script = [("Q: $", "the answer is London")]

    @sgl.function
    def program(s):
        s += "Q: " + sgl.gen("x")

    state = program.run(backend=backend, stream=True)
    assert "".join(state.text_iter("x")) == "the answer is London"


def test_use_thread_false_executes_line_by_line(backend: sgl.RuntimeEndpoint, fake: FakeServer) -> None:
    counts = []

    @sgl.function
    def program(s):
        for _ in range(3):
            s += "x" + sgl.gen(max_tokens=1)
            counts.append(len(fake.bodies("/generate")))

    program.run(backend=backend, use_thread=False)
    assert counts == [1, 2, 3]


@pytest.mark.parametrize("model_type", ["deepseek-r1", "qwen3", "server-side"])
def test_separate_reasoning(backend: sgl.RuntimeEndpoint, fake: FakeServer, model_type: str) -> None:
    replies = {"deepseek-r1": "hmm so</think>42", "qwen3": "\n<think>hmm so</think>42", "server-side": "hmm so||42"}
    fake.script = [("assistant\n$", replies[model_type])]

    @sgl.function
    def program(s):
        s += sgl.user("6 x 7?")
        s += sgl.assistant(sgl.separate_reasoning(sgl.gen("answer"), model_type=model_type))

    for stream in (False, True):
        state = program.run(backend=backend, stream=stream)
        assert "".join(state.text_iter("answer")) == "42"
        assert state["answer"] == "42"
        assert state["answer_reasoning_content"] == "hmm so"
        assert state.text().endswith("<|im_start|>assistant\n42<|im_end|>\n")


def test_a_failed_expression_names_the_programs_line(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s):
        s += "fine " + sgl.gen("a", max_tokens=1)
        s += "POISON" + sgl.gen("b")  # the line to blame
        s += "after " + sgl.gen("c")

    with pytest.raises(sgl.ProgramError) as caught:
        program.run(backend=backend)
    line = program.func.__code__.co_firstlineno + 3
    assert caught.value.origin.line == line
    assert "the line to blame" in str(caught.value)
    assert "poisoned prompt" in str(caught.value)
    assert isinstance(caught.value.__cause__, sgl.BackendError)


def test_reading_what_failed_raises_inside_the_program(backend: sgl.RuntimeEndpoint) -> None:
    caught = []

    @sgl.function
    def program(s):
        s += "fine " + sgl.gen("a", max_tokens=1)
        s += "POISON" + sgl.gen("b")
        try:
            s["b"]
        except sgl.ProgramError as error:
            caught.append(error)
        return s["a"]

    with pytest.raises(sgl.ProgramError):
        program.run(backend=backend)
    assert caught[0].origin.function == "program"


def test_exceptions_of_the_programs_python_keep_their_line(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a", max_tokens=1)
        return 1 / 0

    with pytest.raises(ZeroDivisionError) as caught:
        program.run(backend=backend)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert any(frame.line == "return 1 / 0" for frame in frames)


def test_a_failed_branch_fails_the_join_with_its_own_line(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def joined(s):
        s += "Root"
        forks = s.fork(2)
        forks[0] += sgl.gen("x", max_tokens=1)
        forks[1] += "POISON" + sgl.gen("x")
        forks.join()

    @sgl.function
    def not_joined(s):
        s += "Root"
        s.fork(1)[0].user("POISON" + sgl.gen("x"))

    @sgl.function
    def looked_at(s):
        s += "Root"
        branch = s.fork(1)[0]
        branch += "POISON" + sgl.gen("x")
        return branch.error()

    with pytest.raises(sgl.ProgramError) as caught:
        joined.run(backend=backend)
    assert caught.value.origin.line == joined.func.__code__.co_firstlineno + 5
    with pytest.raises(sgl.ProgramError):
        not_joined.run(backend=backend)
    assert isinstance(looked_at.run(backend=backend).ret_value, sgl.ProgramError)


def test_forks_of_a_failed_state_do_not_hang(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s):
        s += "POISON" + sgl.gen("x")
        forks = s.fork(2)
        forks += sgl.gen("y")
        deeper = forks[0].fork(2)
        deeper += sgl.gen("z")
        deeper.join()
        forks.join()
        late = s.fork(1)
        late += sgl.gen("w")
        return late[0].error()

    with pytest.raises(sgl.ProgramError, match="poisoned"):
        program.run(backend=backend)


def test_unknown_variables_and_bad_appends(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def reads_unknown(s):
        s += "x" + sgl.gen("a", max_tokens=1)
        return s["b"]

    @sgl.function
    def appends_number(s):
        s += 7

    @sgl.function
    def nests_roles(s):
        s += sgl.user_begin() + sgl.assistant("x")

    with pytest.raises(KeyError, match="it has 'a'"):
        reads_unknown.run(backend=backend)
    with pytest.raises(sgl.LangError, match="type int"):
        appends_number.run(backend=backend)
    with pytest.raises(sgl.ProgramError, match="assistant begins inside user"):
        nests_roles.run(backend=backend)


def test_a_streamed_failure_reaches_whoever_follows(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s):
        s += "ok " + sgl.gen("a", max_tokens=2)
        s += "POISON" + sgl.gen("b")

    state = program.run(backend=backend, stream=True)
    with pytest.raises(sgl.ProgramError, match="poisoned"):
        list(state.text_iter())
    assert isinstance(state.error(), sgl.ProgramError)
    assert state["a"] == toy_text("ok ", 2)
    with pytest.raises(sgl.ProgramError):
        state["b"]


def test_programs_inside_programs(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def part(s, n):
        s += f"part {n}: " + sgl.gen(f"p{n}", max_tokens=1)

    @sgl.function
    def whole(s):
        part(s, 1)
        part(s, n=2)
        other = part(n=3)
        return other["p3"]

    sgl.set_default_backend(backend)
    state = whole()
    assert "p1" in state
    assert "p2" in state
    assert state.ret_value == toy_text("part 3: ", 1)


def test_sync_programs_run_inside_a_running_loop(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s):
        s += "x " + sgl.gen("a", max_tokens=2)

    async def notebook_cell() -> str:
        return program.run(backend=backend)["a"]

    assert asyncio.run(notebook_cell()) == toy_text("x ", 2)


class _Slow:
    """A lock after whose release the loop's thread pauses, so that other threads get in between."""

    def __init__(self, lock: threading.RLock) -> None:  # type: ignore[valid-type]
        self._lock = lock
        self.pause_s = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if threading.current_thread().name == "bough-lang":
            time.sleep(self.pause_s)


def test_what_is_appended_while_the_queue_runs_empty_is_executed(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s):
        slow = s._engine._lock = _Slow(s._engine._lock)
        slow.pause_s = 0.002
        for number in range(24):
            s += sgl.gen(f"v{number}", max_tokens=1)
            s[f"v{number}"]
            time.sleep(0.0003 * number)

    done: list[sgl.ProgramState] = []
    work = threading.Thread(target=lambda: done.append(program.run(backend=backend)), daemon=True)
    work.start()
    work.join(60)
    assert not work.is_alive(), "nobody works off what was appended last"
    assert len(done[0].text()) > 0


def test_branches_that_fork_in_threads_of_their_own_all_begin(
    backend: sgl.RuntimeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = executor.Executor.__init__

    def slowly(self: executor.Executor, run: executor.Run, number: int, waits_for_fork: bool) -> None:
        time.sleep(0.001)
        made(self, run, number, waits_for_fork)

    monkeypatch.setattr(executor.Executor, "__init__", slowly)

    @sgl.function
    def program(s):
        branches = s.fork(4)

        def deeper(branch):
            for at, inner in enumerate(branch.fork(2)):
                inner += f"{at}" + sgl.gen("word", max_tokens=1)
                branch += inner["word"]

        threads = [threading.Thread(target=copy_context().run, args=(deeper, branch)) for branch in branches]
        for thread in threads:
            thread.daemon = True
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "two branches have one number: one never begins"
        return len({branch.text() for branch in branches})

    assert program.run(backend=backend).ret_value == 1


def test_values_that_do_not_exist_yet_cannot_be_compared(backend: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def program(s, read):
        tool = sgl.gen("tool", choices=["search", "calculate"])
        if read(tool):
            s += "never"
        s += tool

    def unappended(tool: object) -> bool:
        return tool == "search"

    for read in (unappended, lambda tool: tool != "search", lambda tool: tool in ("search", "x"), bool):
        with pytest.raises(sgl.LangError, match="has no value to compare yet"):
            program.run(read=read, backend=backend)
    state = program.run(read=lambda tool: tool is None, backend=backend)
    assert state["tool"] in ("search", "calculate")
    with pytest.raises(sgl.LangError, match="has no value"):
        bool(sgl.gen("x"))
    assert sgl.gen("x") == sgl.gen("x")
    assert sgl.gen("x", max_tokens=3) != sgl.gen("x")


def test_sglangs_names_of_the_classes() -> None:
    made = {
        sgl.SglFunction: sgl.function(lambda s: None),
        sgl.SglGen: sgl.gen("x"),
        sgl.SglSelect: sgl.select("x", ["a"]),
        sgl.SglImage: sgl.image("a.png"),
        sgl.SglVideo: sgl.video("a.mp4", 4),
        sgl.SglRoleBegin: sgl.user_begin(),
        sgl.SglRoleEnd: sgl.user_end(),
    }
    for kind, value in made.items():
        assert isinstance(value, kind)
        assert getattr(bough, kind.__name__ if kind.__name__.startswith("Sgl") else f"Sgl{kind.__name__}") is kind
