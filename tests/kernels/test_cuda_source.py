"""What a launch hands to the driver, without a device."""

import ctypes
from typing import Any

import pytest
import torch

from bough.kernels import cuda_source
from bough.kernels.cuda_source import CudaKernel, current_stream, tensor_map


class Pair(ctypes.Structure):
    _fields_ = (("left", ctypes.c_int), ("right", ctypes.c_int))


class Driver:
    """Notes launches: the configuration, and where the arguments lie."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, list[int]]] = []
        self.maps: list[dict[str, Any]] = []
        self.read: list[tuple[int, Any]] = []
        """Places and kinds of the arguments of which a launch notes the values."""
        self.values: list[int | None] = []

    def cuCtxPushCurrent_v2(self, _context: object) -> int:
        return 0

    def cuCtxPopCurrent_v2(self, _context: object) -> int:
        return 0

    def cuTensorMapEncodeTiled(self, *given: Any) -> int:
        _, kind, _, memory, shape, strides, box, _, _, swizzle, *_ = given
        numbers = {"shape": list(shape), "strides": list(strides), "box": list(box)}
        self.maps.append({"kind": kind, "memory": memory.value, "swizzle": swizzle, **numbers})
        return 0

    def cuLaunchKernelEx(self, config: Any, _function: object, arguments: Any, _extra: None) -> int:
        self.launches.append((config._obj, list(arguments)))
        self.values = [
            kind.from_address(arguments[place]).value for place, kind in self.read
        ]  # theirs for the launch only
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(cuda_source, "_driver", lambda: found)
    cuda_source._encoded.cache_clear()
    return found


def kernel() -> CudaKernel:
    made = object.__new__(CudaKernel)
    made._threads, made._shared_bytes = 384, 1000
    made._context, made._function = ctypes.c_void_p(), ctypes.c_void_p()
    return made


def test_arguments_of_every_kind_arrive(driver: Driver) -> None:
    x, pair = torch.zeros(4, 64, dtype=torch.bfloat16), Pair(3, 4)
    tiles = tensor_map(x, 4)
    driver.read = [(place, ctypes.c_void_p if place in (2, 3) else ctypes.c_int) for place in (1, 2, 3, 5, 6)]
    kernel().launch(12, (tiles, 5, x, None, pair, -7, True), 0)
    ((_, at),) = driver.launches
    assert at[0] == tiles.address
    assert at[4] == ctypes.addressof(pair)
    assert driver.values == [5, x.data_ptr(), None, -7, 1]


def test_launches_that_differ_are_configured_apart(driver: Driver) -> None:
    launched = kernel()
    asked = [(12, 7, True), (12, 8, True), (13, 7, True), (12, 7, False), (12, 7, True)]
    for blocks, stream, early in asked:
        launched.launch(blocks, (), stream, early=early)
    seen = [(c.grid[0], c.stream, bool(c.attributes[0].value[0])) for c, _ in driver.launches]
    assert seen == asked
    assert all((c.grid[1], c.grid[2], *c.block, c.shared_bytes) == (1, 1, 384, 1, 1, 1000) for c, _ in driver.launches)


def test_a_matrix_is_described_as_it_lies(driver: Driver) -> None:
    wide = torch.zeros(8, 3, 64, dtype=torch.float16)
    tensor_map(wide, 4)
    tensor_map(wide[:, :2], 4)  # heads of a larger product
    tensor_map(wide[:1, :2], 4)  # one row has no stride
    tensor_map(wide.view(8, 192).bfloat16(), 2, 104)
    expected = [([192, 8], 384, [64, 4]), ([128, 8], 384, [64, 4]), ([128, 1], 256, [64, 4]), ([192, 8], 384, [104, 2])]
    assert [(each["shape"], each["strides"][0], each["box"]) for each in driver.maps] == expected
    assert [each["kind"] for each in driver.maps] == [6, 6, 6, 9]
    assert [each["swizzle"] for each in driver.maps] == [3, 3, 3, 0]
    assert {each["memory"] for each in driver.maps[:3]} == {wide.data_ptr()}


def test_a_matrix_that_moves_or_is_cut_otherwise_gets_another_map(driver: Driver) -> None:
    """A weight that is replaced, in place of the module's or of its memory, is described anew."""
    weight = torch.nn.Parameter(torch.zeros(8, 64, dtype=torch.bfloat16), requires_grad=False)
    first = tensor_map(weight, 4)
    assert tensor_map(weight, 4) is first
    assert tensor_map(weight, 8) is not first
    weight.data = torch.ones(8, 64, dtype=torch.bfloat16)
    assert tensor_map(weight, 4) is not first
    assert tensor_map(weight[1:], 4) is not tensor_map(weight, 4)


def test_the_current_stream_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", [50, 60].__getitem__, raising=False)
    assert [current_stream(torch.device("cuda", index)) for index in (0, 1)] == [50, 60]
