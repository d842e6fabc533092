"""What a cache drops first: cost per byte and age, against a model that does the sums for each entry."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmbroker.proto import messages as m
from mmbroker.shelves import COPIES, LAST, USUAL, Shelves, shelf_of, worth

from .shell import Shell, item, key

KIB = 1024
#: A picture's pixels, and what an encoder made of them, us a KiB.
CHEAP, DEAR = 4, 400


def costs(shell: Shell, name: str, per_kib: int | None, pages: int = 1) -> None:
    """A feature that nobody holds, and what it cost."""
    costs_all(shell, {name: per_kib}, pages)


def costs_all(shell: Shell, named: dict[str, int | None], pages: int = 1) -> None:
    """Several, let go of at once."""
    peer = shell.client()
    leases = peer.lease(*(item(name, pages) for name in named))
    stated = [None if per_kib is None else per_kib * 4 * pages for per_kib in named.values()]
    sealings = [m.Sealing(lease.lease, cost=cost) for lease, cost in zip(leases, stated, strict=True)]
    answer = peer.ask(m.Seal(sealings))
    assert isinstance(answer, m.Sealed)
    peer.drop(*answer.refs)


def there(shell: Shell) -> set[str]:
    """Names of what is cached."""
    books = shell.broker.books
    return {place[1].value.decode().lstrip(".") for place in books.features}


@settings(deadline=None)
@given(st.data())
def test_it_goes_as_greedy_dual_says(data: Any) -> None:
    """The model: each entry's due time, and whoever came first among equals of one cost."""
    shelves: Shelves[str] = Shelves()
    model: dict[int, tuple[int, int, int]] = {}  # number -> due, shelf, order
    clock = order = 0
    for _ in range(data.draw(st.integers(1, 60))):
        move = data.draw(st.sampled_from(["lay", "lay", "lay", "lift", "next", "next feature"]))
        if move == "lay":
            order += 1
            shelf = data.draw(st.integers(COPIES, LAST))
            model[order] = clock + worth(shelf), shelf, order
            shelves.lay(order, str(order), shelf, clock)
        elif move == "lift":
            number = data.draw(st.integers(0, order))
            assert shelves.lift(number) == (model.pop(number, None) is not None)
        else:
            copies = move == "next"
            wanted = [(*key, n) for n, key in model.items() if copies or key[1] != COPIES]
            found = shelves.next(copies)
            if not wanted:
                assert found is None
                continue
            due, _, _, number = min(wanted)
            assert found == (due, str(number))
            if data.draw(st.booleans()):
                clock = max(clock, due)
                shelves.lift(number)
                del model[number]
        assert sorted(shelves) == sorted(str(number) for number in model)
        assert len(shelves) == len(model)
        assert all(number in shelves and shelves.get(number) == str(number) for number in model)


def test_shelves_are_for_costs_per_byte() -> None:
    assert shelf_of(None, 1 << 20) == shelf_of(USUAL * KIB, 1 << 20)
    assert shelf_of(100, KIB) == shelf_of(100_000, 1000 * KIB)
    assert shelf_of(1000, KIB) > shelf_of(100, KIB) > shelf_of(1, KIB) > shelf_of(0, KIB) > COPIES
    assert shelf_of(0, 0) > COPIES
    assert shelf_of(-5, KIB) == shelf_of(0, KIB)
    assert shelf_of((1 << 63) - 1, 1) == LAST
    assert worth(COPIES) == 0 and all(worth(n + 1) > worth(n) for n in range(LAST))


def test_what_is_cheap_to_make_again_goes_first() -> None:
    """Although it came last."""
    shell = Shell(pages=4, segment=4)
    for name, per_kib in (("dear", DEAR), ("usual", None), ("cheap", 0), ("dear too", DEAR)):
        costs(shell, name, per_kib)
    for goes in ("cheap", "usual"):
        before = there(shell)
        costs(shell, f"instead of {goes}", DEAR)
        assert before - there(shell) == {goes}


def test_a_large_one_goes_before_a_small_one_that_costs_as_much() -> None:
    shell = Shell(pages=8, segment=8)
    costs(shell, "small", 400, pages=1)
    costs(shell, "large", 100, pages=4)
    costs(shell, "more", 100, pages=4)
    assert there(shell) == {"small", "more"}


def test_what_nobody_asks_for_goes_however_dear_it_was() -> None:
    """Each thing that goes makes what is left worth less, against what comes."""
    shell = Shell(pages=4, segment=4)
    costs(shell, "dear", DEAR)
    for number in range(10 * DEAR // CHEAP):
        costs(shell, f"cheap {number}", CHEAP)
        if "dear" not in there(shell):
            break
    else:
        raise AssertionError("it stays for ever")
    assert number > DEAR // CHEAP, "it stayed for as long as it was worth"


def test_what_is_asked_for_again_is_worth_as_much_as_new() -> None:
    shell = Shell(pages=4, segment=4)
    peer = shell.client()
    for name in ("a", "b", "c", "d"):
        costs(shell, name, CHEAP)
    (ref,) = peer.ask(m.Lookup([key("a")])).refs
    peer.drop(ref)
    costs(shell, "e", CHEAP)
    assert there(shell) == {"a", "c", "d", "e"}


@pytest.mark.parametrize("limits", [{"watermark": 0.5}, {"cached_features": 2}])
def test_limits_are_kept_in_the_same_order(limits: dict[str, Any]) -> None:
    shell = Shell(pages=4, segment=4, **limits)
    costs_all(shell, {"dear": DEAR, "cheap": CHEAP, "dear too": DEAR, "cheap too": CHEAP})
    assert there(shell) == {"dear", "dear too"}


def test_an_operator_who_empties_the_cache_does_not_make_it_worth_less() -> None:
    shell = Shell(pages=4, segment=4)
    costs(shell, "dear", DEAR)
    costs(shell, "cheap", CHEAP)
    shell.client("operator").ask(m.Evict(1))
    assert there(shell) == {"dear"}
    assert shell.broker.books.clock == 0
