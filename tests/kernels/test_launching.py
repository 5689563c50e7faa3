"""The short way to launch a Triton kernel, without a device: it must run the very form that Triton would have run."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("kernels are interpreted, none is compiled", allow_module_level=True)

from triton import language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from bough.kernels import launching  # noqa: E402
from bough.kernels.launching import Launcher  # noqa: E402

Arguments = tuple[
    tuple[torch.Tensor, ...], tuple[int, ...], tuple[float, ...], tuple[object, ...], int, tuple[int, ...]
]


@triton.jit(do_not_specialize=["count"])
def _scaled(x, out, stride, at, count, factor, shift, N: tl.constexpr, DOUBLE: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    launching.wait(PDL)
    place = tl.program_id(0) * stride + at + tl.arange(0, N)
    value = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32) * factor + shift
    if DOUBLE:
        value += value
    tl.store(out + place, value.to(out.dtype.element_ty))


class Device:
    """A driver of Triton's for a Hopper GPU that isn't there: compiles, and notes what would run."""

    def __init__(self) -> None:
        self.launches: list[tuple[object, tuple[int, ...], list[object]]] = []
        """Which form, its grid and its stream, and its arguments, tensors as their addresses."""
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (None, 1, 0, 0, 1024),
            unload_module=lambda _: None,
            get_device_properties=lambda _: {"max_shared_mem": 232448},
        )

    def launcher_cls(self, _source: object, metadata: object) -> Any:
        def run(x: int, y: int, z: int, stream: int, _function: object, _packed: object, *rest: Any) -> None:
            given = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in rest[3:]]
            self.launches.append((metadata, (x, y, z, stream), given))

        return run

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, stream: SimpleNamespace) -> Iterator[Device]:
    made = Device()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a tensor's device here
    monkeypatch.setattr(triton.runtime.driver, "_active", made)
    yield made
    _scaled.device_caches.clear()


def memory(dtype: torch.dtype = torch.bfloat16, offset: int = 0) -> torch.Tensor:
    return torch.zeros(64, dtype=dtype)[offset:]


X, OUT = memory(), memory()
USUAL: Arguments = ((X, OUT), (32, 16), (2.0, 0.5), (16, False, True), 4, (64,))
OTHERS: tuple[Arguments, ...] = (
    ((memory(torch.float16), OUT), *USUAL[1:]),
    ((memory(offset=8), memory(offset=16)), *USUAL[1:]),  # elsewhere, and aligned
    ((memory(offset=1), OUT), *USUAL[1:]),  # not aligned
    ((X, memory(offset=7)), *USUAL[1:]),
    (USUAL[0], (1, 16), *USUAL[2:]),  # a stride of 1 is compiled in
    (USUAL[0], (32, 1), *USUAL[2:]),
    (USUAL[0], (33, 16), *USUAL[2:]),
    (USUAL[0], (48, 0), *USUAL[2:]),
    (USUAL[0], (2**33, 16), *USUAL[2:]),
    (USUAL[0], (True, 16), *USUAL[2:]),
    (*USUAL[:2], (1.0, 0.0), *USUAL[3:]),
    (*USUAL[:2], (1, 0), *USUAL[3:]),  # integers for floats
    (*USUAL[:3], (8, False, True), 4, (64,)),
    (*USUAL[:3], (16, True, True), 4, (64,)),
    (*USUAL[:3], (16, False, False), 4, (64,)),
    (*USUAL[:4], 8, (64,)),
    (*USUAL[:5], (63,)),
    (*USUAL[:5], (1,)),
    (*USUAL[:5], (0,)),
    (*USUAL[:5], (2**31 - 1,)),
    (*USUAL[:5], (2**31,)),
    (*USUAL[:5], (True,)),
)


def launch(launcher: Launcher, grid: tuple[int, int], arguments: Arguments) -> None:
    """As on a device that has PDL or not, as the last constant says."""
    tensors, integers, floats, (*constants, pdl), num_warps, counts = arguments
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "has_pdl", lambda _: pdl)
        launcher.launch(grid, tensors, integers, floats, tuple(constants), num_warps, counts)


def by_triton(device: Device, arguments: Arguments, grid: tuple[int, int] = (3, 2)) -> Any:
    """The launch, if nothing is kept."""
    tensors, integers, floats, constants, num_warps, counts = arguments
    options = {"launch_pdl": True} if constants[-1] else {}
    numbers = (*map(int, (*integers, *counts)), *map(float, floats))
    _scaled[grid](*tensors, *numbers, *constants, num_warps=num_warps, **options)
    return device.launches.pop()


@pytest.mark.parametrize("first", [USUAL, *OTHERS[::-1]])
def test_runs_the_form_that_triton_would(device: Device, first: Arguments) -> None:
    """Whichever forms are there already, and be it launched the short way or not."""
    launcher = Launcher(_scaled)
    for arguments in (first, *OTHERS, USUAL, *OTHERS, USUAL):
        form, where, given = by_triton(device, arguments)
        launch(launcher, (3, 2), arguments)
        ran, there, taken = device.launches.pop()
        assert ran is form
        assert (there, taken) == (where, given)
        assert not device.launches


def test_triton_is_not_asked_again(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(_scaled)
    launch(launcher, (3, 2), USUAL)
    monkeypatch.setattr(type(_scaled), "run", None)
    launch(launcher, (9, 1), (*USUAL[:5], (17,)))  # as many as never before
    assert [where for _, where, _ in device.launches] == [(3, 2, 1, 7), (9, 1, 1, 7)]


def test_goes_to_the_current_stream(device: Device, stream: SimpleNamespace) -> None:
    launcher = Launcher(_scaled)
    for handle in (7, 8, 9):
        stream.cuda_stream = handle
        launch(launcher, (1, 1), USUAL)
    assert [where[3] for _, where, _ in device.launches] == [7, 8, 9]


def test_keeps_nothing_where_triton_knows_more(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On AMD's devices; and where Triton launches on another device than the tensors'."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    amd = Launcher(_scaled)
    launch(amd, (1, 1), USUAL)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    astray = Launcher(_scaled)
    launch(astray, (1, 1), USUAL)
    assert not amd._forms
    assert not astray._forms


def test_a_count_that_triton_looks_at_is_refused(device: Device) -> None:
    """Its kernel would be launched for other counts too."""
    with pytest.raises(ValueError, match="at must be in"):
        launch(Launcher(_scaled), (1, 1), (USUAL[0], (32,), *USUAL[2:5], (16, 64)))


def test_a_triton_with_other_launchers_launches_itself(device: Device) -> None:
    launcher = Launcher(_scaled)
    launch(launcher, (1, 1), USUAL)
    ((key, (_, *rest)),) = launcher._forms.items()

    def otherwise(*_: object) -> None:
        raise TypeError("function takes exactly 12 arguments")

    launcher._forms[key] = (otherwise, *rest)  # type: ignore[assignment]
    for _ in range(3):
        launch(launcher, (1, 1), USUAL)
    assert len(device.launches) == 4
    assert len({id(form) for form, _, _ in device.launches}) == 1


def test_forms_are_bounded(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launcher, "MOST_FORMS", 3)
    launcher = Launcher(_scaled)
    for stride in range(16, 16 * 9, 16):
        launch(launcher, (1, 1), (USUAL[0], (stride, 16), *USUAL[2:]))
    assert len(device.launches) == 8
    assert len(launcher._forms) <= 3
