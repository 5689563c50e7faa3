"""The ranks' meeting place as torch.distributed wants it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from bough.ipc.store import AnyStore


class TorchStore(dist.Store):  # type: ignore[name-defined,misc]
    """A `Store` through which process groups find one another."""

    def __init__(self, store: AnyStore, timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._timeout_s = timeout_s

    def clone(self) -> TorchStore:
        """Another access to the same values, for another thread (NCCL's watchdog). It is this one, which threads may share:
        of a new object torch would keep the half in C++ alone, whose calls lead nowhere once the half in Python is gone."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value.encode() if isinstance(value, str) else value)

    def get(self, key: str) -> bytes:
        return self._store.get(key, self._timeout_s)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        if not self._store.wait(keys, limit_s):
            raise dist.DistStoreError(f"{', '.join(keys)} not set within {limit_s:g} s")

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._store.compare_set(key, expected.encode(), desired.encode())

    def delete_key(self, key: str) -> bool:
        return self._store.delete(key)

    def num_keys(self) -> int:
        return self._store.count()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)
