"""What the two runs gave, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from mmbroker.screen import size, table

from .engine import Answer


@dataclass(frozen=True)
class Run:
    """One engine's answers, in order; what its processes counted, by role; what the broker reported before the first
    request and after the engine's end."""

    answers: list[Answer]
    counters: dict[str, dict[str, int]]
    before: dict[str, Any]
    after: dict[str, Any]

    def total(self, role: str) -> Counter[str]:
        """Counters of all processes whose role starts so."""
        found: Counter[str] = Counter()
        for name, counts in self.counters.items():
            if name.startswith(role):
                found.update(counts)
        return found

    @property
    def features(self) -> int:
        """That reached the scheduler."""
        return self.total("scheduler")["items"]

    @property
    def fallbacks(self) -> int:
        return sum(count for name, count in self.total("tokenizer").items() if name.startswith("fallback"))

    @property
    def scheduler_ns(self) -> float:
        """What the scheduler's thread paid for a feature: until it had a tensor with its hash."""
        paid = self.total("scheduler")
        return (paid["inputs_ns"] + paid["shm_open_ns"] + paid["shm_read_ns"]) / max(1, self.features)


def equal_texts(own: Run, brokered: Run) -> int:
    return sum(a.texts == b.texts for a, b in zip(own.answers, brokered.answers, strict=True))


def problems(own: Run, brokered: Run) -> list[str]:
    """What is not as it should be, in sentences."""
    found = []
    scheduler, tokenizer = brokered.total("scheduler"), brokered.total("tokenizer")
    different = len(own.answers) - equal_texts(own, brokered)
    if different:
        found.append(f"{different} answers differ from those of SGLang's own transport")
    if not tokenizer["features"] == scheduler["items"] == scheduler["takes"] == own.features:
        found.append(
            f"{own.features} features reached the scheduler in SGLang's own way; through the broker "
            f"{tokenizer['features']} were put and {scheduler['takes']} taken"
        )
    if brokered.fallbacks:
        found.append(f"{brokered.fallbacks} features went SGLang's own way although a broker was there")
    for name in ("misses", "errors", "hash_calls", "shm_open_calls", "shm_read_calls"):
        if scheduler[name]:
            found.append(f"the scheduler counted {scheduler[name]} {name} with the broker")
    for what in ("leases", "holds"):
        if brokered.after[what]:
            found.append(f"{brokered.after[what]} {what} are left in the broker after the engine's end")
    return found


def show(
    out: Console, requests: Sequence[Sequence[tuple[Sequence[str], str]]], own: Run, brokered: Run
) -> None:
    """The table."""
    seals, hits = (
        brokered.after["counters"].get(name, 0) - brokered.before["counters"].get(name, 0)
        for name in ("seals", "hits")
    )
    pictures = sum(len(urls) for group in requests for urls, _ in group)
    carried = brokered.total("tokenizer")["bytes"]
    made = table("", "~", ">SGLang's own transport", ">mmbroker")
    made.add_row("requests, pictures", *[f"{len(run.answers)}, {pictures}" for run in (own, brokered)])
    made.add_row("answers equal to SGLang's own", "", f"{equal_texts(own, brokered)} of {len(own.answers)}")
    made.add_row("features at the scheduler", str(own.features), str(brokered.features))
    made.add_row("their bytes", size(carried), size(carried))
    made.add_row("in the broker at the end, with encoder outputs", "", size(brokered.after["pool"]["used"]))
    made.add_row("written / found there already, likewise", "", f"{seals} / {hits}")
    made.add_row("sent SGLang's own way", str(own.features), str(brokered.fallbacks))
    made.add_row(
        "hashed by the scheduler", *[str(run.total("scheduler")["hash_calls"]) for run in (own, brokered)]
    )
    made.add_row(
        "scheduler thread, per feature", *[f"{run.scheduler_ns / 1000:,.0f} us" for run in (own, brokered)]
    )
    made.add_row(
        "a request, mean",
        *[f"{1000 * sum(a.seconds for a in r.answers) / len(r.answers):.0f} ms" for r in (own, brokered)],
    )
    out.print()
    out.print(made)
    out.print()
