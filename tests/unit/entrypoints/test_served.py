"""What an API worker finds out about the model by itself, while the engine loads."""

from __future__ import annotations

import pytest

from bough.cli.config_flags import parse
from bough.core.errors import BoughError
from bough.entrypoints.served import load_model_side


@pytest.mark.parametrize("flag", ["--reasoning-parser", "--tool-call-parser", "--completion-template"])
def test_names_that_nothing_has_are_refused_before_there_is_an_engine(flag: str) -> None:
    for known in ("auto", "none"):
        load_model_side(parse([flag, known], {}).loaded.config)
    with pytest.raises(BoughError, match="'nope'"):
        load_model_side(parse([flag, "nope"], {}).loaded.config)
