"""An honest producer and an honest engine beside the attack: whatever they put is what they take, all the time."""

from __future__ import annotations

import threading

import torch

import mmbroker


#: Between rounds, in seconds: they are there to be served, not to load the broker.
_PAUSE = 0.005


class Bystander:
    """Works in a thread from the start until `stop`; for a process of its own."""

    def __init__(self, directory: str) -> None:
        self.rounds = 0
        self.error = ""
        self._over = threading.Event()
        self._directory = directory
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with (
                mmbroker.connect(
                    self._directory, name="honest engine", namespace="bystander", timeout=10
                ) as engine,
                mmbroker.connect(
                    self._directory, name="honest worker", namespace="bystander", timeout=10
                ) as worker,
            ):
                table = engine.attach(engine="engine-a", access="readonly")
                while not self._over.wait(_PAUSE):
                    self._round(worker, table)
                    self.rounds += 1
        except BaseException as error:
            self.error = f"{type(error).__name__} after {self.rounds} rounds: {error}"

    def _round(self, worker: mmbroker.Client, table: mmbroker.FeatureTable) -> None:
        """Three features of other bytes each time, two of them new."""
        n = self.rounds
        wanted = [
            torch.full((1 + n % 5000,), n % 251, dtype=torch.uint8),
            torch.arange(n % 97),
            torch.arange(3),
        ]
        helds = worker.put_many(wanted, to="engine-a")
        for held, tensor in zip(helds, wanted, strict=True):
            with table.take(held.ref) as use:
                assert torch.equal(use.tensor, tensor), f"wrong bytes in round {n}"
        for held in helds:
            held.drop()

    def stop(self) -> int:
        """The rounds that went well; all of them must have."""
        self._over.set()
        self._thread.join()
        assert not self.error, self.error
        return self.rounds
