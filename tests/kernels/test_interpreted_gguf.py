"""Products with blocks of GGUF files by Triton's interpreter: see `interpreted.agree`."""

import pytest
from interpreted import agree

pytest.importorskip("triton")
OPS = "gguf"


@pytest.mark.timeout(900)  # an interpreter is slow, more so on a busy machine
def test_agree_with_their_references() -> None:
    """Each shape, dtype and option at least once."""
    agree(OPS, "each")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_agree_in_every_combination() -> None:
    agree(OPS, "all")
