"""Hidden states of generative models, through scheduler and runner, against transformers' last layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from in_process import GREEDY, InProcess, Mailbox, Setup
from tiny import make_tiny

from bough.config.hf import open_checkpoint
from bough.core.messages import Generate, Pause, Resume, ToDetokenizer, Tokens, pack_ids
from bough.core.sampling import SamplingParams
from bough.models.load import build_model

COMMON = [(7 * i + 3) % 120 + 3 for i in range(37)]
PROMPTS = [[*COMMON, 5, 17, 99], [42], [*COMMON, 5, 88], [100, 90, 80]]
NEW = 9


class Gathering(Mailbox):
    """Also keeps hidden states, in the order they come."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[int, list[list[float]]] = {}

    def send(self, message: ToDetokenizer) -> None:
        super().send(message)
        if isinstance(message, Tokens):
            for row, extra in message.rows.items():
                self.states.setdefault(message.ids[row], []).extend(extra.hidden_states or [])


def ask(engine: InProcess, prompt: list[int], mode: str, stream: bool) -> int:
    engine._next_id += 1
    engine.mailbox.incoming.append(
        Generate(
            id=engine._next_id, rid=str(engine._next_id), prompt=pack_ids(prompt),
            sampling=SamplingParams(temperature=0.0, max_new_tokens=NEW), stream=stream, hidden_states=mode,
        )
    )  # fmt: skip
    return engine._next_id


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, make_tiny("llama", folder)


@pytest.mark.parametrize(
    ("setup", "retract"),
    [
        (Setup(), False),
        (Setup(chunk_tokens=7), False),
        (Setup(radix_cache=False, overlap=False), False),
        (Setup(stream=False), True),
    ],
)
def test_states_are_those_of_the_last_layer(tiny: tuple[Path, torch.nn.Module], setup: Setup, retract: bool) -> None:
    folder, reference = tiny
    model = build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=torch.device("cpu"))
    engine = InProcess(model, 131, setup)
    mailbox = Gathering()
    engine.mailbox = engine.loop.inbox = engine.loop.outbox = mailbox
    engine.generate(PROMPTS[:1], GREEDY)  # leaves a prefix in the cache
    every = [ask(engine, prompt, "all", setup.stream) for prompt in PROMPTS]
    last = [ask(engine, prompt, "last", setup.stream) for prompt in PROMPTS]
    plain = ask(engine, PROMPTS[0], "", setup.stream)
    events = {}
    if retract:
        events = {
            4: lambda: mailbox.incoming.append(Pause(call=1, mode="retract")),
            7: lambda: mailbox.incoming.append(Resume(call=2)),
        }
    answers = engine.finish([*every, *last, plain], events)
    assert not mailbox.states.get(plain)
    for at, prompt in enumerate(PROMPTS):
        tokens = answers[at].tokens
        assert len(tokens) == NEW
        with torch.no_grad():
            out = reference(torch.tensor([[*prompt, *tokens[:-1]]]), output_hidden_states=True)
        expected = out.hidden_states[-1][0]
        states = torch.tensor(mailbox.states[every[at]])
        assert states.shape == expected.shape
        assert (states - expected).abs().max() <= 1e-4
        final = torch.tensor(mailbox.states[last[at]])
        assert (final[-1] - expected[-1]).abs().max() <= 1e-4
        assert len(final) == (NEW if setup.stream else 1)
