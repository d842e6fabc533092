"""Every kind of tensor arrives as it was put: dtype, shape and each bit; what is none is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import mmbroker
from mmbroker.proto.errors import InvalidMessage
from tests.kit import BrokerProcess, Puppet
from tests.rig import DTYPES, VIEWS, Rig, same, values

ALL = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@ALL
@pytest.mark.parametrize("view", VIEWS)
def test_every_dtype_and_view(rig: Rig, dtype: torch.dtype, view: str) -> None:
    tensor = VIEWS[view](values(dtype, (4, 6)))
    with rig.client.put(tensor, to="a") as held, rig.table.take(held.ref.to_wire()) as use:
        assert same(use.tensor, tensor)
        assert (held.ref.shape, held.ref.nbytes) == (tuple(tensor.shape), tensor.numel() * dtype.itemsize)
        assert use.digest == held.digest == mmbroker.digest(tensor)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("key", [None, "given"], ids=["content key", "caller's key"])
def test_conjugate_and_negative_views(rig: Rig, dtype: torch.dtype, key: str | None) -> None:
    tensor = torch.randn(4, 6, dtype=dtype)
    for i, view in enumerate((tensor.conj(), tensor.conj().t(), tensor.conj().imag, tensor.conj()[1:])):
        name = None if key is None else f"{key} {dtype} {i}"
        with rig.client.put(view, to="a", key=name) as held, rig.table.take(held.ref) as use:
            assert same(use.tensor, view)
            assert torch.equal(use.tensor, view.resolve_conj().resolve_neg())


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_under_a_given_key_is_not_hashed_and_still_right(rig: Rig, view: str) -> None:
    tensor = VIEWS[view](values(torch.float32, (4, 6), seed=1))
    with rig.client.put(tensor, to="a", key=f"view {view}") as held, rig.table.take(held.ref) as use:
        assert same(use.tensor, tensor)
        assert use.digest == mmbroker.Key.caller(f"view {view}").value


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0, 5), (4096, 0)], ids=str)
@ALL
def test_empty_tensors_take_no_memory(rig: Rig, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    with rig.client.put(torch.empty(shape, dtype=dtype), to="a") as held, rig.table.take(held.ref) as use:
        assert same(use.tensor, torch.empty(shape, dtype=dtype))
        assert held.ref.nbytes == 0


@pytest.mark.parametrize("first", ["ml_dtypes", "mmbroker"])
def test_every_dtype_beside_a_library_that_teaches_numpy_more(
    broker: BrokerProcess, puppet: Callable[..., Puppet], first: str
) -> None:
    """Engines' libraries import it; numpy then knows names that torch refuses."""
    wrong = puppet()(f"""
        import {first}, ml_dtypes, numpy, torch, mmbroker
        from tests.rig import DTYPES, same, values
        assert "bfloat16" in numpy.sctypeDict
        result = []
        with mmbroker.connect({str(broker.directory)!r}) as client:
            table = client.attach(engine="a")
            for dtype in DTYPES:
                tensor = values(dtype, (4, 6))
                with client.put(tensor, to="a") as held, table.take(held.ref) as use:
                    if not same(use.tensor, tensor):
                        result.append(str(dtype))
                with client.get_or_create(str(dtype), (4, 6), dtype) as lease:
                    lease.tensor.copy_(tensor)
    """)
    assert wrong == []


EMPTY = torch.empty(0, 3)


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [torch.arange(3)],
        [EMPTY, torch.arange(3), torch.ones(2)],
        [torch.arange(3), EMPTY, torch.ones(2)],
        [torch.arange(3), torch.ones(2), EMPTY],
        [EMPTY],
        [torch.tensor(1.5), torch.tensor(True)],
        [values(dtype, (3, n), seed=n) for n, dtype in enumerate(DTYPES, 1)],
        [values(torch.bfloat16, (n % 7, 5), seed=n) for n in range(300)],
        [view(values(torch.float64, (4, 6))) for view in VIEWS.values()],
    ],
    ids=[
        "none", "one", "empty first", "empty inside", "empty last", "empty only", "scalars", "dtypes", "300", "views",
    ],
)  # fmt: skip
def test_several_tensors_as_one_feature(rig: Rig, parts: list[torch.Tensor]) -> None:
    with rig.client.put_list(parts, to="a") as held, rig.table.take(held.ref.to_wire()) as use:
        assert isinstance(use.tensor, list)
        assert len(use.tensor) == len(parts) == held.ref.shape[0]
        assert all(map(same, use.tensors, parts))
        assert use.digest == mmbroker.digest(parts)


def test_a_list_of_one_is_not_the_tensor(rig: Rig) -> None:
    tensor = torch.arange(10)
    assert mmbroker.digest([tensor]) != mmbroker.digest(tensor)
    with rig.client.put_list([tensor], to="a") as many, rig.client.put(tensor, to="a") as one:
        assert isinstance(rig.table.take(many.ref).tensor, list)
        assert torch.equal(rig.table.take(one.ref).tensor, tensor)


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1, 38_000_000])
def test_sizes(rig: Rig, nbytes: int) -> None:
    tensor = values(torch.uint8, (nbytes,), seed=nbytes)
    with rig.client.put(tensor, to="a") as held, rig.table.take(held.ref) as use:
        assert same(use.tensor, tensor)
    rig.settled()


def test_requires_grad_history_and_inference_tensors(rig: Rig) -> None:
    leaf = torch.randn(3, requires_grad=True)
    with torch.inference_mode():
        inference = torch.randn(3)
    for tensor in (leaf * 2, leaf, inference):
        with rig.client.put(tensor, to="a") as held, rig.table.take(held.ref) as use:
            assert same(use.tensor, tensor)
            assert not use.tensor.requires_grad


class Subclass(torch.Tensor):
    pass


def test_a_subclass_arrives_as_a_tensor(rig: Rig) -> None:
    tensor = torch.randn(3).as_subclass(Subclass)
    with rig.client.put(tensor, to="a") as held, rig.table.take(held.ref) as use:
        assert torch.equal(use.tensor, tensor.as_subclass(torch.Tensor))


NOT_TENSORS: list[tuple[Any, str]] = [
    (None, "NoneType"),
    (3, "int"),
    (2.5, "float"),
    (True, "bool"),
    ("text", "str"),
    (b"bytes", "bytes"),
    ([1, 2], "list"),
    ([torch.ones(1)], "list"),
    ((torch.ones(1),), "tuple"),
    ({"a": torch.ones(1)}, "dict"),
    (object(), "object"),
    (numpy.ones(3), "numpy.ndarray.*torch.as_tensor"),
    (numpy.ones((2, 2))[::-1], "numpy.ndarray.*torch.as_tensor"),
    (numpy.float32(1), "numpy.float32.*torch.as_tensor"),
]


@pytest.mark.parametrize(("thing", "name"), NOT_TENSORS, ids=[name for _, name in NOT_TENSORS])
def test_what_is_no_tensor_is_refused_by_its_type(readonly: Rig, thing: Any, name: str) -> None:
    client = readonly.client
    for put in (
        lambda: client.put(thing, to="a"),
        lambda: client.put_many([torch.ones(1), thing], to="a"),
        lambda: client.put_list([thing, torch.ones(1)], to="a"),
        lambda: client.put(thing, key="k", to="a"),
    ):
        with pytest.raises(TypeError, match=name):
            put()
    assert readonly.broker.status()["leases"] == 0


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    ],
    ids=["sparse", "quantized", "meta", "nested"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_without_plain_bytes_are_refused(readonly: Rig, make: Any) -> None:
    with pytest.raises(TypeError, match=r"dense tensor|meta device"):
        readonly.client.put(make())


@pytest.mark.parametrize("modality", ["image", "video", "audio", "embedding", "größe"])
def test_the_modality_is_part_of_the_identity(readonly: Rig, modality: str) -> None:
    tensor = torch.arange(5)
    with readonly.client.put(tensor, modality=modality) as held:
        assert held.digest == mmbroker.digest(tensor, modality)
    assert (held.digest == mmbroker.digest(tensor)) == (modality == "image")


def test_a_modality_too_long_is_refused(readonly: Rig) -> None:
    with pytest.raises(InvalidMessage, match="at most 64 printable characters"):
        readonly.client.put(torch.ones(1), modality="m" * 65)
