"""The threads that share the hashing of a process's features. No torch here."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor


class HashPool:
    """A few threads that share the hashing of all features of this process, made when first needed."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._making = threading.Lock()

    def map(self, leaf: Callable[[memoryview], bytes], chunks: Iterable[memoryview]) -> Iterable[bytes]:
        todo = list(chunks)
        if len(todo) < 2 or hash_threads() < 2:
            return map(leaf, todo)
        with self._making:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(hash_threads(), thread_name_prefix="mmbroker-hash")
            threads = self._pool
        return threads.map(leaf, todo)

    def forget(self) -> None:
        """In a forked child: the threads are the parent's."""
        self._pool, self._making = None, threading.Lock()


def hash_threads() -> int:
    """How many threads hash: ``MMBROKER_HASH_THREADS``, else one a core, at most four."""
    chosen = os.environ.get("MMBROKER_HASH_THREADS", "")
    return max(1, int(chosen)) if chosen.isdecimal() else min(4, os.cpu_count() or 1)


pool = HashPool()
os.register_at_fork(after_in_child=pool.forget)
