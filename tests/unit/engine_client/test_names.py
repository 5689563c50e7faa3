"""Names are random: long, and never twice, not even in a process that was forked."""

from __future__ import annotations

import os
import string

from bough.engine_client.names import random_name


def test_names_are_digits_and_all_different() -> None:
    names = [random_name() for _ in range(2000)]
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {32}
    assert set("".join(names)) == set(string.hexdigits.lower())


def test_a_forked_process_has_names_of_its_own() -> None:
    random_name()  # there is a stock now
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, " ".join(random_name() for _ in range(100)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = set(os.read(read, 8192).decode().split())
    os.close(read)
    os.close(write)
    assert len(theirs) == 100
    assert theirs.isdisjoint(random_name() for _ in range(1000))
