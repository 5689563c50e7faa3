"""Unguessable names for requests and answers."""

from __future__ import annotations

import os

_AT_ONCE = 256
_DIGITS = 32
_stock: list[str] = []


def random_name() -> str:
    """32 hexadecimal digits from the kernel's random number generator, which is read once per few hundred names."""
    try:
        return _stock.pop()
    except IndexError:
        digits = os.urandom(_AT_ONCE * _DIGITS // 2).hex()
        names = [digits[at : at + _DIGITS] for at in range(0, len(digits), _DIGITS)]
        name = names.pop()
        _stock.extend(names)
        return name


os.register_at_fork(after_in_child=_stock.clear)
