"""What tests of kernels on a GPU have in common."""

import pytest
import torch


@pytest.fixture(scope="session")
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
