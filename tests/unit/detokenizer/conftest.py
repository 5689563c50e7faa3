from __future__ import annotations

import pytest

from bough.config.default_model import default_model_path
from bough.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def smollm() -> Tokenizer:
    return load_tokenizer(default_model_path())
