"""Logit processors through the whole engine: named by a request, with the request's own values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bough
from bough.core.errors import ConfigError, InvalidRequest, RequestFailed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CODE = """
import torch

def only(logits, params):
    keep = torch.tensor([int(each["token"]) for each in params], device=logits.device)[:, None]
    return torch.where(torch.arange(logits.shape[1], device=logits.device) == keep, logits, -torch.inf)

def broken(logits, params):
    raise RuntimeError("secret")
"""


@pytest.fixture(scope="module")
def engine(tiny_settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[bough.Engine]:
    home: Path = tmp_path_factory.mktemp("processors")
    (home / "my_processors.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(home))
        made = bough.Engine(
            **tiny_settings, logit_processors="only=my_processors:only,broken=my_processors:broken", log_level="error"
        )
    with made:
        yield made


def test_each_request_its_own(engine: bough.Engine) -> None:
    params: list[dict[str, Any]] = [
        {"logit_processor": "only", "custom_params": {"token": 77}, "max_new_tokens": 3, "ignore_eos": True},
        {"logit_processor": "only", "custom_params": {"token": 88}, "max_new_tokens": 3, "temperature": 0},
        {"max_new_tokens": 3, "temperature": 0},
    ]
    made: Any = engine.generate(["a", "b", "b"], params)
    assert made[0]["output_ids"] == [77] * 3
    assert made[1]["output_ids"] == [88] * 3
    plain: Any = engine.generate("b", {"max_new_tokens": 3, "temperature": 0})
    assert made[2]["output_ids"] == plain["output_ids"]


def test_unknown_names_and_failures(engine: bough.Engine) -> None:
    with pytest.raises(InvalidRequest, match="no logit processor"):
        engine.generate("a", {"logit_processor": "other"})
    params: list[dict[str, Any]] = [
        {"logit_processor": "broken", "max_new_tokens": 3},
        {"max_new_tokens": 3, "ignore_eos": True},
    ]
    failed, fine = engine.generate(["a", "b"], params)
    assert failed["meta_info"]["finish_reason"]["type"] == "abort"
    assert "broken" in failed["meta_info"]["finish_reason"]["message"]
    assert "secret" not in failed["meta_info"]["finish_reason"]["message"]
    assert len(fine["output_ids"]) == 3
    with pytest.raises(RequestFailed, match="broken"):
        engine.generate("a", {"logit_processor": "broken"})


def test_what_can_not_be_loaded_ends_the_start(tiny_settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="can't be loaded"):
        bough.Engine(**tiny_settings, logit_processors="x=nowhere_at_all:y")
