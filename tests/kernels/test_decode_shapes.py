"""With which shape rows that decode are read: by how many there are, and by what a multiprocessor holds."""

import pytest
import torch

pytest.importorskip("triton")

from bough.bench.kernel_inputs import LLAMA_8B, decode_inputs
from bough.kernels.attention import triton_backend as backend
from bough.kernels.attention.plan import Kind, Shape


@pytest.mark.parametrize(
    ("kilobytes", "names"),
    [
        (228, {8: "FEW_DECODE", 9: "DECODE", 66: "DECODE", 67: "MANY_DECODE", 512: "MANY_DECODE"}),
        (164, {512: "DECODE"}),
    ],
)
def test_more_rows_than_programs_at_once_get_fewer_programs(
    kilobytes: int, names: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "num_sms", lambda device: 132)
    monkeypatch.setattr(backend, "shared_bytes_per_sm", lambda device: kilobytes * 1024)
    kind = Kind(num_heads=32, num_kv_heads=8, window=None, causal=True)

    def chosen(rows: int) -> Shape:
        return backend._decode_shape(
            decode_inputs(rows, 3, 9, 16, LLAMA_8B, torch.device("cpu"), copies=1).inputs, kind
        )

    assert {rows: chosen(rows) for rows in names} == {rows: vars(backend)[name] for rows, name in names.items()}
