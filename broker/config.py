"""Settings of the broker: flags, then ``MMBROKER_*`` variables, then a TOML file, then defaults. Resolved once.

Every setting has one name, written ``--host-mib`` as a flag, ``MMBROKER_HOST_MIB`` as a variable and ``host_mib`` in
the file; so have the state machine's `Limits`, by their own names. Unknown names in the file are refused. Unknown
variables are not: orchestrators set some with this prefix for a service of this name, and clients have their own.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from mmbroker.proto.errors import BrokerError

from . import instance
from .arena import memory
from .events import Limits
from .web import address

MIB: Final = 1 << 20
#: A default host arena is a quarter of the available memory, and at most so many MiB.
MOST_HOST_MIB: Final = 16 << 10
#: Limits that are set in MiB instead: ``host_bytes`` by ``host_mib``.
_IN_BYTES: Final = tuple(field.name for field in fields(Limits) if field.name.endswith("_bytes"))
_LIMITS: Final = tuple(
    field.name for field in fields(Limits) if field.name not in _IN_BYTES and field.name != "device"
)


class ConfigError(BrokerError):
    """A setting makes no sense. The message names it, where it came from, and what it may be."""


class _Own(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings that are no limits of the state machine. Sizes in MiB, times in seconds."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")] = ""
    gpu: str = ""
    host_mib: Annotated[int, Meta(ge=1)] = 0
    segment_mib: Annotated[int, Meta(ge=1)] = Limits().segment_bytes // MIB
    device_mib: Annotated[int, Meta(ge=1)] = Limits().device_bytes // MIB
    device_reserve_mib: Annotated[int, Meta(ge=0)] = 0
    device_headroom_mib: Annotated[int, Meta(ge=0)] = 2048
    session_mib: Annotated[int, Meta(ge=0)] = 0
    client_budget_mib: Annotated[int, Meta(ge=0)] = 0
    engine_mib: Annotated[int, Meta(ge=0)] = 0
    namespace_mib: Annotated[int, Meta(ge=0)] = 0
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    http: str = ""  # where the page listens; empty: nowhere
    allow_uid: frozenset[Annotated[int, Meta(ge=0, lt=(1 << 32) - 1)]] = frozenset()


class Settings(_Own, frozen=True, kw_only=True):
    """Everything a broker can be told. `path` is the instance directory."""

    path: Path
    limits: Limits

    @staticmethod
    def resolve(
        flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ, file: Path | str | None = None
    ) -> Settings:
        """Settings from flags (None or (): not given), variables, and a file. Raises `ConfigError`."""
        given = {name: value for name, value in flags.items() if value not in (None, ())}
        own, limits = _Own(), Limits()
        for source, values in (
            ("the settings file", _from_file(file)),
            ("the environment", _from_environ(environ)),
            ("the command line", given),
        ):
            for name, value in values.items():
                own, limits = _with(own, limits, source, name, value)
        if not own.host_mib:
            own = msgspec.structs.replace(own, host_mib=_default_host_mib())
        device = _find_gpu(own.gpu) if own.gpu else ""
        if not own.name:
            own = msgspec.structs.replace(own, name=device.lower() or "cpu")
        if own.device_reserve_mib > own.device_mib:
            raise ConfigError(
                f"device_reserve_mib ({own.device_reserve_mib}) is more than device_mib ({own.device_mib}): "
                "the reserve is part of the device arena"
            )
        sizes = {name: getattr(own, name.removesuffix("_bytes") + "_mib") * MIB for name in _IN_BYTES}
        return Settings(
            **msgspec.structs.asdict(own),
            path=instance.root(environ) / own.name,
            limits=replace(limits, device=device, **sizes),
        )


def _with(own: _Own, limits: Limits, source: str, name: str, value: object) -> tuple[_Own, Limits]:
    """The settings with one of them changed."""
    try:
        if name in _LIMITS:
            limits = msgspec.convert({**asdict(limits), name: value}, Limits, strict=False)
            _check(name, getattr(limits, name))
        elif name not in _Own.__struct_fields__:
            raise ConfigError(f"there is no setting {name} (in {source}): see `mmbroker start --help`")
        else:
            if name == "http" and value:
                address.parse(str(value))
            own = msgspec.convert({**msgspec.to_builtins(own), name: value}, _Own, strict=False)
    except ValueError as error:  # msgspec.ValidationError is one
        # msgspec writes "Expected `int` - at `$.host_mib`".
        problem = str(error).partition(" - at ")[0]
        raise ConfigError(f"{name} in {source}: {problem[:1].lower()}{problem[1:]}, not {value!r}") from None
    return own, limits


def _check(name: str, value: float) -> None:
    least = 1 if getattr(Limits(), name) and isinstance(value, int) else 0
    if not least <= value < math.inf:
        raise msgspec.ValidationError(f"Expected a number >= {least}")
    if name == "watermark" and value >= 1:
        raise msgspec.ValidationError("Expected a share < 1")


def _from_file(file: Path | str | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        with open(file, "rb") as stream:
            return tomllib.load(stream)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"the settings file {file} cannot be read: {reason}") from None


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    """Variables that are settings; lists are written with commas."""
    values: dict[str, Any] = {}
    for name in (*_Own.__struct_fields__, *_LIMITS):
        if text := environ.get(f"MMBROKER_{name.upper()}", ""):
            values[name] = [part.strip() for part in text.split(",")] if name == "allow_uid" else text
    return values


def _find_gpu(name: str) -> str:
    """The UUID of the GPU that is meant."""
    from . import cuda

    try:
        return cuda.find_device(name, cuda.open_driver()).uuid
    except BrokerError as error:
        raise ConfigError(f"--gpu {name}: {error}; without --gpu the broker has a host arena only") from None


def _default_host_mib() -> int:
    free, limit = memory.headroom()
    mib = min(free // 4 // MIB, MOST_HOST_MIB)
    if mib < 1:
        raise ConfigError(
            f"{limit} leaves {free} bytes, too few for a host arena: free memory, or raise that limit"
        )
    return mib
