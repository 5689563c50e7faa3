"""Integers of few bits packed into 32-bit words: AWQ, GPTQ and compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.kernels.packed_linear import Codes
from bough.kernels.packed_linear.codes import CodeKind
from bough.quantization.formats import Awq, Gptq, PackedInts
from bough.quantization.layouts.eight import inputs_of
from bough.quantization.layouts.layout import FLOATS, INT32, Region, StoredSpan, TensorSpec, WeightLayout

_WORD = 32
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of a word that holds each of its eight columns."""


def unpack_words(words: Tensor, bits: int, dim: int) -> Tensor:
    """uint8 codes from int32 words packed along `dim`, lowest bits first; codes may straddle words.

    A group of `32 / gcd(32, bits)` codes fills whole words.
    """
    words = words.movedim(dim, -1).to(torch.int64) & 0xFFFFFFFF
    if _WORD % bits == 0:
        shifts = torch.arange(0, _WORD, bits, device=words.device)
        codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
        return codes.flatten(-2).to(torch.uint8).movedim(-1, dim)
    grouped = words.view(*words.shape[:-1], -1, bits)  # 32 codes in `bits` words
    at = torch.arange(_WORD, device=words.device) * bits
    first, shift = at // _WORD, at % _WORD
    low = grouped[..., first] >> shift
    high = torch.where(shift + bits > _WORD, grouped[..., (first + 1).clamp(max=bits - 1)] << (_WORD - shift), 0)
    codes = (low | high) & ((1 << bits) - 1)
    return codes.flatten(-2).to(torch.uint8).movedim(-1, dim)


def unpack_whole_words(words: Tensor, bits: int, dim: int, count: int) -> Tensor:
    """The same where no code straddles words: the topmost bits may be unused, and so may the last codes."""
    per_word = _WORD // bits
    words = words.movedim(dim, -1).to(torch.int64) & 0xFFFFFFFF
    shifts = torch.arange(per_word, device=words.device) * bits
    codes = ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)
    return codes[..., :count].to(torch.uint8).movedim(-1, dim)


def _kind(bits: int) -> CodeKind:
    return "int4" if bits <= 4 else "int8"


def _groups(group: int, num_cols: int) -> int:
    return 1 if group <= 0 else -(-num_cols // group)


@dataclass(frozen=True, slots=True)
class AwqLayout(WeightLayout):
    """All tensors have inputs first."""

    form: Awq

    def tensors(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        rows, cols = shape
        groups = _groups(self.form.group, cols)
        along = None if self.form.group <= 0 else StoredSpan(0, self.form.group)
        return {
            "qweight": TensorSpec((cols, rows // 8), StoredSpan(1, 8), StoredSpan(0), INT32),
            "qzeros": TensorSpec((groups, rows // 8), StoredSpan(1, 8), along, INT32, optional=not self.form.zeros),
            "scales": TensorSpec((groups, rows), StoredSpan(1), along, FLOATS, is_scale=True),
        }

    def problem(self, shape: tuple[int, int]) -> str:
        return "" if shape[0] % 8 == 0 else f"{shape[0]} outputs are no multiple of 8"

    def decode(self, region: Region, tensors: Mapping[str, Tensor]) -> Codes:
        order = torch.tensor(_AWQ_NIBBLES, device=tensors["scales"].device)

        def nibbles(words: Tensor) -> Tensor:
            codes = unpack_words(words, 4, 1)
            return codes.view(codes.shape[0], -1, 8)[..., order].flatten(1)

        zeros = tensors.get("qzeros")
        return Codes(
            "int4",
            nibbles(tensors["qweight"]).T.contiguous(),
            tensors["scales"].T.contiguous(),
            self.form.group if self.form.group > 0 else region.num_cols,
            zero_OG=None if zeros is None or not self.form.zeros else nibbles(zeros).T.contiguous(),
        )


@dataclass(frozen=True, slots=True)
class GptqLayout(WeightLayout):
    """All tensors have inputs first. Codes of 2 and 3 bits become codes of 4, those of 5 to 7 become codes of 8."""

    form: Gptq

    def tensors(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        bits, (rows, cols) = self.form.bits, shape
        groups = _groups(self.form.group, cols)
        along = None if self.form.group <= 0 or self.form.act_order else StoredSpan(0, self.form.group)
        unit = (_WORD // bits, 1) if _WORD % bits == 0 else (_WORD, bits)
        return {
            "qweight": TensorSpec((cols * bits // _WORD, rows), StoredSpan(1), StoredSpan(0, *unit), INT32),
            "qzeros": TensorSpec((groups, rows * bits // _WORD), StoredSpan(1, *unit), along, INT32),
            "scales": TensorSpec((groups, rows), StoredSpan(1), along, FLOATS, is_scale=True),
            "g_idx": TensorSpec((cols,), None, StoredSpan(0), INT32, optional=not self.form.act_order),
        }

    def problem(self, shape: tuple[int, int]) -> str:
        unit = _WORD // self.form.bits if _WORD % self.form.bits == 0 else _WORD
        wrong = [size for size in shape if size % unit]
        return f"{wrong[0]} is no multiple of {unit}, of which {self.form.bits} bits fill words" if wrong else ""

    def decode(self, region: Region, tensors: Mapping[str, Tensor]) -> Codes:
        form = self.form
        zeros = (unpack_words(tensors["qzeros"], form.bits, 1) + form.zero_bias) & ((1 << form.bits) - 1)
        group_of = tensors.get("g_idx")
        return Codes(
            _kind(form.bits),
            unpack_words(tensors["qweight"], form.bits, 0).T.contiguous(),
            tensors["scales"].T.contiguous(),
            form.group if form.group > 0 else region.num_cols,
            zero_OG=_unless_default(zeros.T.contiguous(), form.bits),
            group_of_D=None if group_of is None or not form.act_order else group_of.long(),
        )


@dataclass(frozen=True, slots=True)
class PackedIntsLayout(WeightLayout):
    """Outputs first; codes are signed integers offset by half of their range."""

    form: PackedInts
    straddles: bool = False
    """Codes straddle words, where their bits don't fill them: since release 0.16 of compressed-tensors."""

    def tensors(self, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        form, (rows, cols) = self.form, shape
        unit, groups = self._unit, _groups(form.group, cols)
        along = None if form.group <= 0 or form.act_order else StoredSpan(1, form.group)
        whole = form.group < 0
        scale_shape = (1,) if whole else (rows, groups)
        down = None if whole else StoredSpan(0)
        also = ((), (1, 1)) if whole else ()
        specs = {
            "weight_packed": TensorSpec((rows, _words(cols, unit)), StoredSpan(0), StoredSpan(1, *unit), INT32),
            "weight_scale": TensorSpec(scale_shape, down, along, FLOATS, also=also, is_scale=True),
            "weight_shape": TensorSpec((2,), None, None, frozenset({"I64", "I32"}), optional=True),
            "weight_g_idx": TensorSpec((cols,), None, StoredSpan(0), INT32 | {"I64"}, optional=not form.act_order),
            "input_scale": TensorSpec(
                (), None, None, FLOATS, form.inputs is None or not form.inputs.static, also=((1,),), is_scale=True
            ),
        }
        if not form.symmetric:
            specs["weight_zero_point"] = TensorSpec((_words(rows, unit), groups), StoredSpan(0, *unit), along, INT32)
        return specs

    def decode(self, region: Region, tensors: Mapping[str, Tensor]) -> Codes:
        form, kind = self.form, _kind(self.form.bits)
        shift = (1 << (4 if kind == "int4" else 8) - 1) - (1 << form.bits - 1)
        values = self._unpack(tensors["weight_packed"], 1, region.num_cols) + shift
        zeros = None
        if not form.symmetric:
            zeros = self._unpack(tensors["weight_zero_point"], 0, region.num_rows) + shift
        group_of = tensors.get("weight_g_idx")
        whole = form.group < 0
        scale = tensors["weight_scale"].reshape(1, 1) if whole else tensors["weight_scale"]
        return Codes(
            kind,
            values,
            scale,
            form.group if form.group > 0 else region.num_cols,
            rows=region.num_rows if whole else 1,
            zero_OG=zeros,
            group_of_D=None if group_of is None or not form.act_order else group_of.long(),
            inputs=None if form.inputs is None else inputs_of(form.inputs, tensors),
        )

    @property
    def _unit(self) -> tuple[int, int]:
        """Codes that fill words, and how many words."""
        return (_WORD, self.form.bits) if self.straddles else (_WORD // self.form.bits, 1)

    def _unpack(self, words: Tensor, dim: int, count: int) -> Tensor:
        if not self.straddles:
            return unpack_whole_words(words, self.form.bits, dim, count)
        pad = -words.shape[dim] % self.form.bits
        words = torch.nn.functional.pad(words, (0, pad) if dim == 1 else (0, 0, 0, pad))
        return unpack_words(words, self.form.bits, dim).narrow(dim, 0, count)


def _words(count: int, unit: tuple[int, int]) -> int:
    """Words that `count` codes take; the last ones may be partly used."""
    return -(-count * unit[1] // unit[0])


def _unless_default(zero_OG: Tensor, bits: int) -> Tensor | None:
    """None where all zero points are half of the range of 4 or 8 bits, which kernels take for granted."""
    return None if bits in (4, 8) and bool((zero_OG == 1 << (bits - 1)).all()) else zero_OG
