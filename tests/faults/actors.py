"""Producers and engines that do what a test asks: real clients, in processes that a zygote made.

Each public method is a verb; its arguments and its result are JSON. An error of the library's is an answer as well, by
its type and text: whoever asked decides whether it was allowed, and whether to ask again.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
import traceback
from typing import Any

import torch

import mmbroker
from mmbroker.proto.errors import BrokerError, FeatureMissing, StaleReference

from . import load
from .steps import cut, install_client, trap

#: How long each call of a client may take, in seconds.
TIMEOUT = 5.0


def pattern(seed: int, nbytes: int) -> bytes:
    """Bytes that only this seed and size have, computed the same way by whoever reads them."""
    block = hashlib.shake_128(f"{seed}/{nbytes}".encode()).digest(min(nbytes, 4096))
    whole, rest = divmod(nbytes, 4096)
    return block * whole + block[:rest] if whole else block


def tensor_of(seed: int, nbytes: int) -> torch.Tensor:
    data = bytearray(pattern(seed, nbytes))
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def reads(tensor: torch.Tensor, seed: int, nbytes: int) -> bool:
    """Has a tensor exactly these bytes?"""
    return bool(tensor.numel() == nbytes and tensor.numpy().tobytes() == pattern(seed, nbytes))


class Actor:
    """One process: a client, perhaps attached as an engine's rank."""

    def __init__(self) -> None:
        self.client: mmbroker.Client | None = None
        self.table: mmbroker.FeatureTable | None = None
        self.held: list[mmbroker.Held] = []
        self.kept: list[Any] = []

    # --- both -------------------------------------------------------------------------------------------------------

    def connect(self, path: str, name: str, namespace: str | None = None) -> None:
        if self.client is None:
            self.client = mmbroker.connect(path, name=name, namespace=namespace, timeout=TIMEOUT)

    def arm(self, **order: Any) -> None:
        trap.arm(**order)

    def disarm(self) -> bool:
        return trap.disarm()

    def seen(self) -> list[str]:
        return sorted(trap.seen)

    def cut(self, which: str) -> int:
        """Cut this process's own connection."""
        return cut(which)

    def connected(self, reconnects: int = 0) -> bool:
        """Wait until there is a session, after so many losses."""
        return _until(
            lambda: self._client.connected and self._client.stats()["reconnects"] >= reconnects, TIMEOUT
        )

    def reconnects(self) -> int:
        return self._client.stats()["reconnects"]

    def stats(self) -> dict[str, int]:
        return self._client.stats()

    def close(self) -> None:
        """An orderly end."""
        if self.client is not None:
            if self.table is not None:
                self.table.close()
            self.kept.clear()
            self.client.close()

    @property
    def _client(self) -> mmbroker.Client:
        assert self.client is not None
        return self.client

    # --- a producer -------------------------------------------------------------------------------------------------

    def put(self, seeds: list[int], sizes: list[int], to: str | None, timeout: float = TIMEOUT) -> list[Any]:
        """Features of these sizes, in one call; their references."""
        tensors = [tensor_of(seed, nbytes) for seed, nbytes in zip(seeds, sizes, strict=True)]
        helds = self._client.put_many(tensors, to=to, timeout=timeout)
        self.held += helds
        return [_wire(held.ref) for held in helds]

    def write(self, seed: int, nbytes: int, to: str | None, timeout: float = TIMEOUT) -> Any:
        """A feature written in place, whose tensor outlives its lease a little."""
        out = self._client.get_or_create(f"written {seed}", (nbytes,), torch.uint8, to=to, timeout=timeout)
        if out.lease is None:
            held = out.held
        else:
            tensor = out.lease.tensor
            tensor.copy_(tensor_of(seed, nbytes))
            held = out.lease.seal(timeout)
            del tensor
        assert held is not None
        self.held.append(held)
        return _wire(held.ref)

    def lease(self, seed: int, nbytes: int, timeout: float = TIMEOUT) -> None:
        """Lease, and keep its tensor; `scribble` writes to it."""
        out = self._client.get_or_create(f"leased {seed}", (nbytes,), torch.uint8, timeout=timeout)
        assert out.lease is not None
        self.kept.append((out.lease, out.lease.tensor))

    def scribble(self, value: int) -> int:
        """Fill what is leased, whether or not the broker still knows of it."""
        for _, tensor in self.kept:
            tensor.fill_(value)
        return len(self.kept)

    def let_go(self) -> None:
        """Give leases back, and forget their tensors."""
        for lease, _ in self.kept:
            lease.abort()
        self.kept.clear()

    def abort(self, seed: int, nbytes: int, timeout: float = TIMEOUT) -> None:
        """Lease, and give it back unwritten."""
        out = self._client.get_or_create(f"aborted {seed}", (nbytes,), torch.uint8, timeout=timeout)
        assert out.lease is not None
        out.lease.abort()

    def lookup(self, seed: int, nbytes: int, to: str | None) -> Any:
        """The reference of what was put with this seed and size, or None."""
        held = self._client.lookup(mmbroker.digest(tensor_of(seed, nbytes)), to=to)
        if held is None:
            return None
        self.held.append(held)
        return _wire(held.ref)

    def drop(self) -> None:
        """Drop all holds."""
        while self.held:
            self.held.pop().drop()

    # --- an engine --------------------------------------------------------------------------------------------------

    def attach(self, engine: str, access: str, rank: int = 0, world: int = 1) -> None:
        if self.table is None:
            self.table = self._client.attach(
                engine=engine, rank=rank, world=world, access=access, timeout=TIMEOUT
            )

    def check(self, refs: list[Any], seeds: list[int], sizes: list[int]) -> dict[str, Any]:
        """Read each feature as a model would: how many are missing, and which have wrong bytes."""
        assert self.table is not None
        missing: list[str] = []
        wrong: list[int] = []
        for ref, seed, nbytes in zip(refs, seeds, sizes, strict=True):
            try:
                with self.table.take(_unwire(ref)) as use:
                    if not reads(use.tensor, seed, nbytes):
                        wrong.append(seed)
            except (FeatureMissing, StaleReference) as error:
                missing.append(f"{type(error).__name__}: {error}")
        return {"missing": missing, "wrong": wrong}

    def hold_on(self, refs: list[Any]) -> None:
        """Take features, and keep them in use."""
        assert self.table is not None
        self.kept += [self.table.take(_unwire(ref)) for ref in refs]

    def still_reads(self, seeds: list[int], sizes: list[int]) -> bool:
        """Has what is in use the bytes that it had?"""
        return all(reads(use.tensor, *feature) for use, *feature in zip(self.kept, seeds, sizes, strict=True))

    def release(self) -> None:
        for use in self.kept:
            use.release()
        self.kept.clear()

    def at_rest(self) -> bool:
        """Wait until nothing is left in the table."""
        table = self.table
        assert table is not None
        return _until(lambda: not (table.stats()["entries"] or table.stats()["unsettled"]), TIMEOUT)


def _until(condition: Any, seconds: float) -> bool:
    end, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        if time.monotonic() > end:
            return False
        pause.wait(0.002)
    return True


def _wire(ref: mmbroker.Reference) -> dict[str, Any]:
    return {k: v.hex() if isinstance(v, bytes) else v for k, v in ref.to_wire().items()}


def _unwire(ref: dict[str, Any]) -> dict[str, Any]:
    return {k: bytes.fromhex(v) if k in ("boot", "digest") else v for k, v in ref.items()}


def main(channel: socket.socket, **arm: Any) -> None:
    """`arm`: a step and what to do there; see `steps.Trap`. With `part`, it is one of the load's instead."""
    if "part" in arm:
        load.part(channel, **arm)
    torch.set_num_threads(1)
    install_client()
    trap.channel = channel
    if arm:
        trap.arm(**arm)
    actor = Actor()
    while data := channel.recv(1 << 20):
        verb, arguments = json.loads(data)
        try:
            answer = {"result": getattr(actor, verb)(**arguments)}
        except BrokerError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        except BaseException:
            answer = {"bug": traceback.format_exc()}
        try:
            channel.send(json.dumps(answer).encode())
        except OSError:
            break
    os._exit(0)  # as a process that ends without closing its client
