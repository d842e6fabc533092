"""The flags, and what follows from them.

They are read into the environment, because SGLang's argument record has no place for them and every process of the
engine inherits that. `sglang.Engine(...)` has no command line: there ``MMBROKER_TRANSPORT=broker`` is the switch.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
from collections.abc import Callable
from typing import Any, Final

from . import settings

logger = logging.getLogger(__name__)

#: What SGLang's HTTP workers import without us.
SGLANGS_APP: Final = "sglang.srt.entrypoints.http_server:app"
#: SGLang's HTTP workers import this instead of SGLang's own app: they never load plugins by themselves.
HTTP_APP: Final = "mmbroker.adapters.sglang.http_app:app"
_SGLANG_HTTP_APP: Final = "SGLANG_HTTP_SERVER_APP_PATH"
#: Where `http_app` finds the app that was to be served.
SERVED_APP: Final = "MMBROKER_SERVED_APP"


def offer() -> None:
    """What the plugin does when it is loaded: the flags, and the hooks if this engine was asked to use them already."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.server_args.ServerArgs.add_cli_args", add, HookType.AROUND)
    HookRegistry.register("sglang.srt.server_args.ServerArgs.from_cli_args", take, HookType.AROUND)
    asked = settings.read()
    if asked.broker or asked.measure is not None:
        switch_on(asked, main=multiprocessing.parent_process() is None)


def add(original: Callable[[argparse.ArgumentParser], None], parser: argparse.ArgumentParser) -> None:
    """AROUND `ServerArgs.add_cli_args`."""
    original(parser)
    group = parser.add_argument_group("mmbroker")
    group.add_argument(
        "--mm-transport",
        choices=["sglang", "broker"],
        help="What carries multimodal features to the schedulers: SGLang's own transport, or a broker.",
    )
    group.add_argument(
        "--mm-broker",
        metavar="PATH",
        help="The broker's instance directory; without it, the only broker of this user that is running.",
    )
    group.add_argument(
        "--mm-broker-wait",
        metavar="SECONDS",
        type=float,
        help=f"How long a request waits for room in a full broker (default {settings.DEFAULT_WAIT:g}).",
    )
    group.add_argument(
        "--mm-broker-share-outputs",
        action=argparse.BooleanOptionalAction,
        help="Keep what the model's encoder makes of a picture, for the next time that it comes, and for other engines "
        "of the same model and settings (default: yes).",
    )
    group.add_argument(
        "--mm-broker-preprocess",
        choices=settings.PLACES,
        help="Where the tokenizer's workers make features: where SGLang would (engine), or on the CPU, without a CUDA "
        "context; for pictures, best with several workers (--tokenizer-worker-num).",
    )


def take(original: Callable[[Any, argparse.Namespace], Any], cls: Any, args: argparse.Namespace) -> Any:
    """AROUND the classmethod `ServerArgs.from_cli_args`."""
    for name, variable in (
        ("mm_transport", settings.TRANSPORT),
        ("mm_broker", settings.PATH),
        ("mm_broker_wait", settings.WAIT),
        ("mm_broker_share_outputs", settings.SHARE_OUTPUTS),
        ("mm_broker_preprocess", settings.PREPROCESS),
    ):
        value = getattr(args, name, None)
        if value is not None:
            os.environ[variable] = os.path.abspath(value) if name == "mm_broker" else str(value)
    asked = settings.read()
    if asked.broker or asked.measure is not None:
        switch_on(asked, main=True)
    return original(cls, args)


def switch_on(asked: settings.Settings, main: bool) -> None:
    """Hook this process, and see that those it starts are hooked."""
    from . import seams

    if seams.version() is None:
        if main:
            stand_aside(seams.unknown())
        return
    if main:
        os.environ[settings.ENGINE] = settings.name_engine()
        if os.environ.get(_SGLANG_HTTP_APP) != HTTP_APP:
            os.environ[SERVED_APP] = os.environ.get(_SGLANG_HTTP_APP, "")
            os.environ[_SGLANG_HTTP_APP] = HTTP_APP
    seams.install(broker=asked.broker, measured=asked.measure is not None, main=main)


def stands_aside(args: Any) -> str | None:
    """Why the plugin cannot serve an engine with these arguments, if so. Raises `ValueError` for a conflict."""
    from . import seams

    if float(os.environ.get("SGLANG_MM_BUFFER_SIZE_MB") or 0) > 0:
        raise ValueError(
            "SGLANG_MM_BUFFER_SIZE_MB moves every feature through a buffer of its own before it is hashed, and "
            "--mm-transport broker leaves nothing to hash: unset one of the two"
        )
    transport = getattr(args, "mm_feature_transport", None)
    if settings.read().on_cpu and transport not in (None, "cpu"):
        raise ValueError(
            f"--mm-feature-transport {transport} is for features that are made on the GPU, and "
            "--mm-broker-preprocess cpu makes them on the CPU: leave one of the two out"
        )
    several = (getattr(args, "tokenizer_worker_num", 1) or 1) > 1
    if several and getattr(args, "enable_http2", False) and not seams.current().http2_workers:
        return "this SGLang starts its HTTP/2 workers without plugins"
    if getattr(args, "use_ray", False):
        return "with --use-ray no plugin runs in the engine's processes"
    if getattr(args, "smg_grpc_mode", False) or getattr(args, "grpc_mode", False):
        return "in gRPC mode another program tokenizes"
    if (getattr(args, "nnodes", 1) or 1) > 1:
        return "a broker serves one node, and this engine has several"
    if getattr(args, "encoder_only", False):
        return "an encoder-only server has no scheduler to carry features to"
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in settings.YES:
        return "the Rust server tokenizes without plugins"
    return None


def stand_aside(why: str) -> None:
    """Say so, and serve with SGLang's own transport, here and in every process that starts from now on."""
    logger.warning("mmbroker stands aside: %s. SGLang's own transport serves.", why)
    os.environ[settings.TRANSPORT] = "sglang"
