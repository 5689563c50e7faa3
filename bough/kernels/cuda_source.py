"""CUDA sources that come with the package: compiled by NVRTC at first use, kept on disk, launched through the driver.

NVRTC comes with torch's CUDA wheels; nothing is linked or built at installation.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from bough.config.cache_directory import cache_directory
from bough.kernels import ahead
from bough.kernels.choices import facts_of
from bough.platform.whole_file import write_whole

log = logging.getLogger("bough.kernels")

_COMMON = tuple(
    Path(__file__).with_name(name)
    for name in ("hopper.cuh", "hopper_tiles.cuh", "codes.cuh", "experts.cuh", "cluster_sums.cuh")
)
"""What sources may include."""
SWIZZLED_BYTES = 128
"""The width of a tile that the copy engine lays out for the tensor cores."""
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # bytes: CU_TENSOR_MAP_SWIZZLE_...
_NOT_SWIZZLED = 0

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_TENSOR_MAP_TYPES = {torch.float16: 6, torch.bfloat16: 9, torch.float8_e4m3fn: 0, torch.uint8: 0}  # 8 bits: as bytes


class CudaSourceError(Exception):
    """NVRTC is missing or refused, or the driver did; the message says which."""


@cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "").partition(".")[0]
    name = f"libnvrtc.so.{major}"
    site = Path(torch.__file__).parents[1]
    near = [site / "nvidia" / folder / "lib" / name for folder in (f"cu{major}", "cuda_nvrtc")]
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    for candidate in (*near, Path(torch.__file__).parent / "lib" / name, Path(home) / "lib64" / name, Path(name)):
        if candidate.exists() or str(candidate) == name:
            try:
                for part in candidate.parent.glob(f"libnvrtc-builtins.so.{major}*"):
                    ctypes.CDLL(str(part))  # NVRTC asks for it by name only
                return ctypes.CDLL(str(candidate))
            except OSError:
                continue
    raise CudaSourceError(f"{name} was not found; it comes with torch's CUDA wheels and with the CUDA toolkit")


def find_nvrtc() -> None:
    """Loads NVRTC now instead of with the first source. Raises `CudaSourceError` where there is none."""
    _nvrtc()


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaSourceError(str(error)) from error


def check(result: int, doing: str) -> None:
    """Raises `CudaSourceError` for what a call to the driver has returned, unless it went well."""
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise CudaSourceError(f"{doing}: {(text.value or b'unknown error').decode()} ({result})")


def compile_cubin(source: str, architecture: str, defines: Mapping[str, int]) -> bytes:
    """Machine code of `source` for, say, "sm_90a". Needs NVRTC, but no device."""
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    count = len(_COMMON)
    texts = (ctypes.c_char_p * count)(*(path.read_bytes() for path in _COMMON))
    names = (ctypes.c_char_p * count)(*(path.name.encode() for path in _COMMON))
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"bough.cu", count, texts, names):
        raise CudaSourceError("NVRTC could not be started")
    try:
        options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{k}={v}" for k, v in defines.items())]
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            message = _nvrtc_text(nvrtc, program, "ProgramLog").decode(errors="replace")
            raise CudaSourceError("NVRTC refused: " + " ".join(message.split())[:500])
        return _nvrtc_text(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc_text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.raw


def cached_cubin(path: Path, architecture: str, defines: Mapping[str, int]) -> bytes:
    """As `compile_cubin`, from the cache where it has it. Safe against several processes at once.

    Empty in a rehearsal (`kernels.ahead`), where it isn't in the cache.
    """
    source = path.read_text()
    common = (header.read_text() for header in _COMMON)
    parts = (source, *common, architecture, repr(sorted(defines.items())), str(torch.version.cuda))
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    made: bytes | None = None
    try:
        target = cache_directory() / "kernels" / f"{path.stem}_{key}.cubin"
        if target.exists():
            return target.read_bytes()
        if ahead.asks_for_cubin(key, path, architecture, defines):
            return b""
        if target.exists():  # by now
            return target.read_bytes()
        made = compile_cubin(source, architecture, defines)
        target.parent.mkdir(exist_ok=True)
        write_whole(target, made)
    except OSError as error:
        log.info("compiled CUDA code is not kept: %s", error)
    return compile_cubin(source, architecture, defines) if made is None else made


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True)
class Held:
    """A kernel's argument, in memory from where a launch copies it. Never changed, so launches may share one."""

    memory: object
    address: int


class TensorMap(Held):
    """How the copy engine walks a matrix in tiles; 128 bytes that a kernel takes by value."""

    __slots__ = ()


@lru_cache(maxsize=4096)
def _encoded(
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    box_rows: int,
    box_columns: int | None,
    swizzled: bool,
) -> TensorMap:
    rows, columns, item = shape[0], math.prod(shape[1:]), dtype.itemsize
    stride_bytes = (strides[0] if rows > 1 else columns) * item
    box_columns = box_columns or SWIZZLED_BYTES // item
    swizzle = _SWIZZLES[box_columns * item] if swizzled else _NOT_SWIZZLED
    memory = ctypes.create_string_buffer(128 + 63)
    address = (ctypes.addressof(memory) + 63) & ~63
    result = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(address), _TENSOR_MAP_TYPES[dtype], 2, ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(stride_bytes),
        (ctypes.c_uint32 * 2)(box_columns, box_rows), (ctypes.c_uint32 * 2)(1, 1),
        0, swizzle, 3, 0,  # not interleaved, promoted to 256 bytes in L2, zeros outside
    )  # fmt: skip
    check(result, "describing a matrix to the copy engine")
    return TensorMap(memory, address)


def can_map(matrix: Tensor) -> bool:
    """Whether the copy engine can read and write it; a third dimension must lie dense in the second."""
    item, strides = matrix.element_size(), matrix.stride()
    if matrix.dtype not in _TENSOR_MAP_TYPES or strides[-1] != 1 or not 2 <= len(strides) <= 3:
        return False
    dense = len(strides) == 2 or strides[1] == matrix.shape[2]
    return dense and strides[0] * item % 16 == 0 and matrix.data_ptr() % 16 == 0


def tensor_map(
    matrix: Tensor, box_rows: int, box_columns: int | None = None, *, swizzled: bool | None = None
) -> TensorMap:
    """Tiles of a matrix for which `can_map`; outside it they read as zero and aren't written.

    They are box_rows x 128 bytes, swizzled; with `box_columns` (a multiple of 16 bytes) as wide as that, row after row, or
    `swizzled` if they are 32, 64 or 128 bytes.
    """
    swizzled = box_columns is None if swizzled is None else swizzled
    return _encoded(matrix.data_ptr(), matrix.shape, matrix.stride(), matrix.dtype, box_rows, box_columns, swizzled)


Argument = TensorMap | Tensor | int | ctypes.Structure | None


@lru_cache(maxsize=4096)
def _number(value: int) -> Held:
    memory = ctypes.c_int(value)
    return Held(memory, ctypes.addressof(memory))


def _held(argument: Argument) -> Held:
    if isinstance(argument, TensorMap):
        return argument
    if isinstance(argument, int):
        return _number(argument)
    if isinstance(argument, ctypes.Structure):
        return Held(argument, ctypes.addressof(argument))
    pointer = ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return Held(pointer, ctypes.addressof(pointer))


_EARLY = (_Attribute * 1)(_Attribute(_PROGRAMMATIC_SERIALIZATION, b"", (1,)))
_IN_ORDER = (_Attribute * 1)(_Attribute(_PROGRAMMATIC_SERIALIZATION, b"", (0,)))


@lru_cache(maxsize=4096)
def _config(blocks: int, threads: int, shared_bytes: int, stream: int, early: bool) -> _LaunchConfig:
    """Kept, since a launch takes no longer than making one. Callers must not change it."""
    return _LaunchConfig((blocks, 1, 1), (threads, 1, 1), shared_bytes, stream, _EARLY if early else _IN_ORDER, 1)


class _OnDevice:
    """The driver, with a context that is the thread's current one for as long as it is entered."""

    __slots__ = ("_context",)

    def __init__(self, context: ctypes.c_void_p) -> None:
        self._context = context

    def __enter__(self) -> ctypes.CDLL:
        driver = _driver()
        check(driver.cuCtxPushCurrent_v2(self._context), "the device's context")
        return driver

    def __exit__(self, *_: object) -> None:
        _driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _primary_context(device: torch.device) -> ctypes.c_void_p:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    context = ctypes.c_void_p()
    check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), index), "the device's context")
    return context


def on_device(device: torch.device) -> _OnDevice:
    """The driver, on a device: `with on_device(device) as driver`. Raises `CudaSourceError` if there is none."""
    return _OnDevice(_primary_context(device))


class CudaKernel:
    """One kernel of a source, loaded on one device."""

    def __init__(self, cubin: bytes, name: str, device: torch.device, threads: int, shared_bytes: int) -> None:
        """An empty `cubin`: a stand-in for a rehearsal."""
        self._threads = threads
        self._shared_bytes = shared_bytes
        self._function = ctypes.c_void_p()
        self._context = _primary_context(device)
        self._is_loaded = bool(cubin)
        if not cubin:
            self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
            return
        with self._on_device() as driver:
            module = ctypes.c_void_p()
            check(driver.cuModuleLoadData(ctypes.byref(module), cubin), f"loading {name}")
            check(driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()), f"finding {name}")
            raised = driver.cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared_bytes)
            check(raised, f"{shared_bytes} bytes of shared memory for {name}")

    def most_clusters(self, cluster: int) -> int:
        """How many clusters run at once; `cluster` is the size that the kernel was compiled for."""
        if not self._is_loaded:
            return int(self._multiprocessors) // cluster
        attributes = (_Attribute * 1)(_Attribute(_CLUSTER_DIMENSION, b"", (cluster, 1, 1)))
        config = _LaunchConfig((cluster, 1, 1), (self._threads, 1, 1), self._shared_bytes, None, attributes, 1)
        found = ctypes.c_int()
        with self._on_device() as driver:
            result = driver.cuOccupancyMaxActiveClusters(ctypes.byref(found), self._function, ctypes.byref(config))
        check(result, "counting clusters")
        return found.value

    def launch(self, blocks: int, arguments: Sequence[Argument], stream: int, *, early: bool = True) -> None:
        """If `early`, it may start before the kernel that comes before it has ended, and must itself wait for that.

        A tensor is passed as its address, None as a null pointer, a structure by value.
        """
        if ahead.is_rehearsing():
            return
        config = _config(blocks, self._threads, self._shared_bytes, stream, early)
        held = [_held(each) for each in arguments]
        pointers = (ctypes.c_void_p * len(held))(*[each.address for each in held])
        with self._on_device() as driver:
            result = driver.cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
        check(result, "launching")

    def _on_device(self) -> _OnDevice:
        return _OnDevice(self._context)


def current_stream(device: torch.device) -> int:
    """The driver's handle of the stream that torch queues work on: what `torch.cuda.current_stream` wraps, which takes
    longer than some launches do."""
    found: int = torch._C._cuda_getCurrentRawStream(device.index)
    return found


class StreamNumbers:
    """Numbers of the streams that launch a kernel, in the order in which they first do: each has a counter of its own there,
    which a launch leaves ready for the next one of the stream, be it from a graph or not."""

    MOST = 256

    def __init__(self, what: str) -> None:
        """`what`: is launched, for an error's sake."""
        self._what = what
        self._numbers: defaultdict[int, int] = defaultdict(itertools.count().__next__)

    def of(self, stream: int) -> int:
        found = self._numbers[stream]
        if found >= self.MOST:
            raise RuntimeError(f"{self._what} from more than {self.MOST} streams")
        return found


def runs_on(device: torch.device, load: Callable[[], object], otherwise: str) -> bool:
    """Whether a device is a Hopper GPU on which `load` gets its kernels.

    Where it is one and they can't be had, the log says why, and what happens `otherwise`.
    """
    if facts_of(device.type, device.index).capability != (9, 0) or torch.version.hip is not None:
        return False
    try:
        load()
    except CudaSourceError as error:
        log.warning("%s: %s", otherwise, error)
        return False
    return True
