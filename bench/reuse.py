"""Whether a picture is ever taken for another one that is nearly the same: many through the adapter, each checked.

    python bench/reuse.py [--pictures N] [--json FILE]

SGLang's own processors, as servers make them whose settings are nearly the same: bounds that are off by one, other ways
to resize, other versions of a library, another revision of a model. Each setting has two, as two engines of one model
do. Pictures that are nearly the same (their bytes, their pixels, their palettes, what they say about being turned) are
asked of both, each with options that are nearly the same, several at once, in an order drawn at random. All go by their
derived keys through one real broker. What comes back is compared, bit for bit, with what the very processor that was
asked makes of the picture by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import copy
import hashlib
import json
import logging
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

if not __package__:  # run as a script: the package is this directory
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import mmbroker
from bench import machine
from bench.alike import OPTIONS, Server, album, servers
from bench.preprocessors import Engine, Output, engine
from bench.processes import Workshop
from mmbroker.adapters.sglang import holding, joining, settings
from mmbroker.adapters.sglang.asking import Asking
from mmbroker.demo.engine import CPU_ENVIRONMENT
from mmbroker.proto.reference import is_reference

ENGINE: Final = "engine"
AT_ONCE: Final = 8
SEED: Final = 0
#: A request's wait for the broker, in seconds.
WAIT: Final = 30.0


# --- the check ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    server: int
    picture: str
    options: int

    def media(self, album: Mapping[str, bytes]) -> Any:
        from sglang.srt.utils import ImageData

        url = "data:image/png;base64," + base64.b64encode(album[self.picture]).decode()
        return ImageData(url=url, **copy.deepcopy(OPTIONS[self.options]))


def cases(count: int, draw: random.Random, kinds: int, names: Sequence[str]) -> list[tuple[Case, int]]:
    """Cases of which no two are the same, each for both engines of its settings, in any order."""
    numbers = draw.sample(range(kinds * len(names) * len(OPTIONS)), count // 2)
    found = []
    for number in numbers:
        rest, options = divmod(number, len(OPTIONS))
        server, name = divmod(rest, len(names))
        found += [(Case(server, names[name], options), engine) for engine in (0, 1)]
    draw.shuffle(found)
    return found


class Ledger:
    """What was asked for by which key, and what is the right answer to it."""

    def __init__(self) -> None:
        self.counts = Counter(pictures=0, through_broker=0, refused=0)
        self.wrong: list[str] = []
        self._outputs: dict[bytes, set[bytes]] = {}
        self._asked: dict[bytes, set[tuple[str, str, str]]] = {}

    def note(self, asked: tuple[str, str, str], key: bytes, right: bytes, got: bytes, shared: bool) -> None:
        self.counts["pictures"] += 1
        self.counts["through_broker" if shared else "refused"] += 1
        self._outputs.setdefault(key, set()).add(right)
        self._asked.setdefault(key, set()).add(asked)
        if got != right:
            self.wrong.append(f"{asked}: another one's")
        elif len(self._outputs[key]) > 1:
            self.wrong.append(f"{asked}: a key of two outputs")

    def told(self) -> dict[str, Any]:
        outputs = {output for found in self._outputs.values() for output in found}
        return {
            **self.counts,
            "keys": len(self._outputs),
            "outputs": len(outputs),
            "asked": len({asked for found in self._asked.values() for asked in found}),
            "wrong": len(self.wrong),
            "first_wrong": self.wrong[:5],
        }


async def check(engine: Engine, case: Case, server: Server, media: Any, table: Any, ledger: Ledger) -> None:
    """One picture, by way of the broker and without it."""
    key = await engine.key(media)
    with holding.Turn(None, WAIT, True):
        got, shared = await _output(engine.shared, media, table)
    right, _ = await _output(engine.alone, media, table)
    ledger.note((server.name, case.picture, str(OPTIONS[case.options])), key, right, got, shared)


async def _output(make: Callable[[Any], Awaitable[Output]], media: Any, table: Any) -> tuple[bytes, bool]:
    """A hash of all that reaches the model, or of the reason why nothing does; whether its feature was shared."""
    try:
        made = await make(media)
    except Exception as error:  # SGLang refuses some: then it does so in the same words
        return hashlib.sha256(f"{type(error)} {error}".encode()).digest(), False
    h = hashlib.sha256(f"{made.said} {sorted(made.beside)}".encode())
    for name in sorted(made.beside):
        _add(h, made.beside[name])
    if not is_reference(made.feature):
        _add(h, made.feature)
        return h.digest(), False
    with table.take(made.feature) as use:
        _add(h, use.tensor)
    return h.digest(), True


def _add(h: Any, tensor: Any) -> None:
    h.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())


@contextmanager
def joined(path: str) -> Iterator[tuple[Asking, Any]]:
    """A tokenizer's way to the broker, and a rank's table."""
    joining_ = joining.Joining(settings.Settings(True, path, WAIT, ENGINE), "tokenizer")
    with ExitStack() as stack:
        stack.callback(joining_.close)
        if not joining_.joined.wait(WAIT):
            raise RuntimeError(f"the broker at {path} could not be joined")
        rank = stack.enter_context(mmbroker.connect(path, name="rank"))
        yield Asking(joining_, ENGINE), rank.attach(engine=ENGINE)


async def run(
    path: str, count: int, kinds: Sequence[Server], say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """So many pictures of servers of these kinds, through the broker at `path`; what was found: `wrong` has to be 0."""
    draw, shown, ledger = random.Random(SEED), album(), Ledger()
    todo = cases(count, draw, len(kinds), list(shown))
    engines: dict[tuple[int, int], Engine] = {}
    with joined(path) as (asking, table), ExitStack() as stack:
        for case, number in todo:
            if (case.server, number) not in engines:
                engines[case.server, number] = engine(kinds[case.server], asking)
                stack.callback(engines[case.server, number].close)
        say(
            f"{len(engines)} processors of {len(kinds)} settings, {len(shown)} pictures, {len(OPTIONS)} options"
        )
        for begin in range(0, len(todo), AT_ONCE):
            await asyncio.gather(
                *(
                    check(
                        engines[case.server, number],
                        case,
                        kinds[case.server],
                        case.media(shown),
                        table,
                        ledger,
                    )
                    for case, number in todo[begin : begin + AT_ONCE]
                )
            )
            if begin % 1000 < AT_ONCE:
                say(f"{begin} of {len(todo)}")
    return {
        "settings": len(kinds),
        "encoded_pictures": len(shown),
        "options": len(OPTIONS),
        **ledger.told(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pictures", type=int, default=10_000, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to this file, too")
    options = parser.parse_args()
    os.environ.update(CPU_ENVIRONMENT)
    warnings.simplefilter("ignore")  # SGLang says much of what a machine without a GPU lacks
    logging.getLogger("sglang").setLevel(logging.ERROR)
    start = time.monotonic()
    found: dict[str, Any] = {
        "date": machine.date(),
        "machine": machine.describe(),
        "versions": machine.versions(),
    }
    with Workshop() as shop, shop.broker(host_mib=1024) as broker:
        found |= asyncio.run(
            run(
                broker.path,
                options.pictures,
                servers(),
                lambda text: print(text, file=sys.stderr, flush=True),
            )
        )
        found["found_again"] = found["through_broker"] - broker.counters()["seals"]
    found["seconds"] = round(time.monotonic() - start, 1)
    print(json.dumps(found, indent=1))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + os.linesep)
    sys.exit(1 if found["wrong"] else 0)


if __name__ == "__main__":
    main()
