"""A broker, a producer and an engine's rank in one process, shared by a module's tests; and tensors of every kind."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import mmbroker
from mmbroker.proto.dtypes import ITEMSIZE
from tests.kit import BrokerProcess, eventually

DTYPES = [getattr(torch, name) for name in ITEMSIZE]


@dataclass
class Rig:
    """`client` puts to engine ``a``, whose only rank is `table`; `engine` is that rank's client."""

    broker: BrokerProcess
    client: mmbroker.Client
    engine: mmbroker.Client
    table: mmbroker.FeatureTable
    access: str
    _held: list[mmbroker.Held] = field(default_factory=list)

    def settled(self) -> None:
        """Wait until the table has nothing left."""
        eventually(lambda: not (self.table.stats()["entries"] or self.table.stats()["unsettled"]), "an empty table")


def make_rig(access: str, **settings: object) -> Iterator[Rig]:
    root = Path(tempfile.mkdtemp(prefix="mmb-", dir="/tmp"))
    broker = BrokerProcess(root, {"host_mib": 64, "segment_mib": 4, **settings}, [], {})
    try:
        broker.wait_ready()
        with (
            mmbroker.connect(broker.directory, name="producer") as client,
            mmbroker.connect(broker.directory, name="engine") as engine,
        ):
            table = engine.attach(engine="a", access=access)
            yield Rig(broker, client, engine, table, access)
            assert engine.stats()["table_failed"] == 0
        assert broker.stop() == 0, broker.log()
    finally:
        broker.kill()
        broker.clean_up()
        shutil.rmtree(root)


a_rig = contextmanager(make_rig)


@pytest.fixture(scope="module", params=["readonly", "copy"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """In both access modes."""
    yield from make_rig(request.param)


@pytest.fixture(scope="module")
def readonly() -> Iterator[Rig]:
    yield from make_rig("readonly")


def values(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of random bits; bits that no bool or NaN-averse dtype minds."""
    generator = torch.Generator().manual_seed(seed)
    count = 1
    for n in shape:
        count *= n
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in C order."""
    plain = tensor.detach().contiguous().resolve_conj().resolve_neg()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    return got.dtype == wanted.dtype and got.shape == wanted.shape and bits(got) == bits(wanted)


#: Ways in which a tensor's memory is not simply its values in order: name, and how to make one of a (4, 6) tensor.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "steps": lambda t: t[::2, 1::3],
    "offset": lambda t: t[1:3],
    "expanded": lambda t: t[:1].expand(5, 6),
    "broadcast scalar": lambda t: t[0, 0].expand(3, 4),
    "channels last": lambda t: t.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "permuted": lambda t: t.reshape(2, 3, 4).permute(2, 0, 1),
    "scalar": lambda t: t[2, 3],
    "one axis": lambda t: t.reshape(-1),
    "six axes": lambda t: t.reshape(1, 2, 2, 1, 3, 2),
    "empty": lambda t: t[:0],
    "empty in the middle": lambda t: t[:, None, :].expand(4, 3, 6)[:, :0],
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
}
