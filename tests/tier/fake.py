"""A store in this process's memory, which does what a test wants: fail, wait, forget, or hand out something else."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mmbroker.tier.objects import Altered
from mmbroker.tier.store import StoreError
from tests.kit import PATIENCE


class FakeStore:
    """`objects` by name. `trouble` is called before each call with its name (``read``, ``write``, ...) and its
    argument, and may raise or wait."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: Counter[str] = Counter()
        self.registered: dict[int, int] = {}
        self.trouble: Callable[[str, str], None] = lambda *_: None
        self._changed = threading.Condition()

    def register(self, address: int, nbytes: int) -> None:
        with self._changed:
            self._enter("register", "")
            assert not any(a < address + nbytes and address < a + n for a, n in self.registered.items()), (
                "memory is registered twice"
            )
            self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        with self._changed:
            del self.registered[address]

    def exist(self, names: Sequence[str]) -> list[bool]:
        for name in names:
            self._enter("exist", name)
        return [name in self.objects for name in names]

    def read(self, name: str, offset: int, address: int, nbytes: int) -> bool:
        self._enter("read", name)
        self._check(address, nbytes)
        data = self.objects.get(name)
        if data is None:
            return False
        if len(data) < offset + nbytes:
            raise Altered("it is shorter")
        ctypes.memmove(address, data[offset : offset + nbytes], nbytes)
        return True

    def write(self, name: str, pieces: Sequence[tuple[int, int]]) -> None:
        self._enter("write", name)
        for address, nbytes in pieces:
            self._check(address, nbytes)
        with self._changed:
            self.objects.setdefault(name, b"".join(ctypes.string_at(a, n) for a, n in pieces))
            self._changed.notify_all()

    def remove(self, name: str) -> None:
        self._enter("remove", name)
        with self._changed:
            self.objects.pop(name, None)
            self._changed.notify_all()

    def remove_all(self, prefix: str) -> int:
        self._enter("remove_all", prefix)
        names = [name for name in self.objects if name.startswith(prefix)]
        for name in names:
            del self.objects[name]
        return len(names)

    def probe(self) -> None:
        self._enter("probe", "")

    def close(self) -> None:
        pass

    def _enter(self, call: str, argument: str) -> None:
        with self._changed:
            self.calls[call] += 1
            self._changed.notify_all()
        self.trouble(call, argument)

    def _check(self, address: int, nbytes: int) -> None:
        assert any(a <= address and address + nbytes <= a + n for a, n in self.registered.items()), (
            "the store was given memory that is not registered"
        )

    # --- for tests --------------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], object]) -> None:
        """Until something is true of `objects` or `calls`."""
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE), f"{self.calls}, {list(self.objects)}"

    def broken(self, *calls: str) -> None:
        """Have such calls fail; none: have all go well."""

        def trouble(call: str, _: str) -> None:
            if call in calls:
                raise StoreError("the store is broken")

        self.trouble = trouble

    @contextmanager
    def stuck(self, *calls: str) -> Iterator[threading.Semaphore]:
        """Have such calls wait until the end of the block. What is yielded is released by each that does."""
        entered, gate = threading.Semaphore(0), threading.Event()

        def trouble(call: str, _: str) -> None:
            if call in calls:
                entered.release()
                gate.wait(PATIENCE)

        before, self.trouble = self.trouble, trouble
        try:
            yield entered
        finally:
            self.trouble = before
            gate.set()
