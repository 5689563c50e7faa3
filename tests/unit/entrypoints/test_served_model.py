"""What an API worker finds out about the model by itself, while the engine loads."""

from __future__ import annotations

import pytest

from bough.cli.config_flags import parse
from bough.config.concerns import ServerConfig
from bough.config.hf import open_checkpoint
from bough.core.errors import BoughError
from bough.engine_client.sampling import sampling_defaults
from bough.entrypoints.served_model import load_tokenizer_side, make_served


@pytest.mark.parametrize("flag", ["--reasoning-parser", "--tool-call-parser", "--completion-template"])
def test_names_that_nothing_has_are_refused_before_there_is_an_engine(flag: str) -> None:
    checkpoint = open_checkpoint("")
    for known in ("auto", "none"):
        load_tokenizer_side(parse([flag, known], {}).loaded.config, checkpoint)
    with pytest.raises(BoughError, match="'nope'"):
        load_tokenizer_side(parse([flag, "nope"], {}).loaded.config, checkpoint)


def test_preferred_parameters_come_before_the_models_own() -> None:
    recommended = {"temperature": 0.2, "top_k": 50}
    preferred = ServerConfig(preferred_sampling_params='{"temperature": 0.7, "max_new_tokens": 9}')
    assert sampling_defaults(preferred, recommended) == {"temperature": 0.7, "top_k": 50, "max_new_tokens": 9}
    assert sampling_defaults(ServerConfig(), recommended) == recommended
    only = ServerConfig(preferred_sampling_params='{"top_p": 0.5}', sampling_defaults="openai")
    assert sampling_defaults(only, recommended) == {"top_p": 0.5}
    for wrong in ('{"temperature": -1}', '{"temprature": 1}'):
        with pytest.raises(BoughError, match="preferred_sampling_params"):
            load_tokenizer_side(parse(["--preferred-sampling-params", wrong], {}).loaded.config, open_checkpoint(""))
    for flag in ("--preferred-sampling-params", "--default-chat-template-kwargs"):
        for wrong in ("{", "[]"):
            with pytest.raises(BoughError, match="is no JSON object"):
                parse([flag, wrong], {})


@pytest.mark.parametrize(
    ("setting", "names", "patterns"),
    [
        ("", ("SmolLM2-135M-Instruct",), ()),
        ("one, two,one", ("one", "two"), ()),
        ("claude-*,gpt-5?", ("SmolLM2-135M-Instruct",), ("claude-*", "gpt-5?")),
        ("claude-*,mine", ("mine",), ("claude-*",)),
    ],
)
def test_names_of_the_model(setting: str, names: tuple[str, ...], patterns: tuple[str, ...]) -> None:
    checkpoint = open_checkpoint("")
    config = parse(["--served-model-name", setting], {}).loaded.config
    served = make_served(config, checkpoint, None, {"context_length": 8})
    assert (served.name, served.names, served.patterns) == (names[0], names, patterns)
