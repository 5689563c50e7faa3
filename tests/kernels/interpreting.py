"""Makes Triton's interpreter faster without changing what it computes: it is most of the time of the tests that use it."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """For the whole process. Names that this release of Triton does not have are left alone."""
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        _patch_language_once()
    if hasattr(interpreter, "_get_np_dtype"):
        _remember_dtypes()


def _patch_language_once() -> None:
    """The interpreter patches the language's functions for every call of a function by another, though the caller's launch
    has patched them; looking for what to patch takes longer than most of these functions."""
    patch = interpreter._patch_lang
    patched: list[set[int]] = []

    def patch_once(function: Any) -> Any:
        modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if modules and any(modules <= each for each in patched):
            return interpreter._LangPatchScope()
        scope = patch(function)
        restore, before = scope.restore, len(patched)
        patched.append(modules)

        def end() -> None:
            del patched[before:]  # a function called by another is patched for, and never restored
            restore()

        scope.restore = end
        return scope

    interpreter._patch_lang = patch_once


def _remember_dtypes() -> None:
    """The interpreter builds its table of dtypes for every look into it."""
    find = interpreter._get_np_dtype
    known: dict[Any, Any] = {}

    def found(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(element, tl.pointer_type):
            return find(element)
        if element not in known:
            known[element] = find(element)
        return known[element]

    interpreter._get_np_dtype = found
