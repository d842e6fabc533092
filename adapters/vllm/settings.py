"""What the operator asked for: the ``ec_connector_extra_config`` of vLLM's ``--ec-transfer-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

CONNECTOR: Final = "MMBrokerConnector"
MODULE: Final = "mmbroker.adapters.vllm"
#: Versions of vLLM that the adapter was tested with.
VERSIONS: Final = ("0.33.0",)


_NUMBER: Final = (int | float, "a number")
#: What values may be, and how to say it; all others are true or false.
_KINDS: Final[Mapping[str, tuple[Any, str]]] = {
    "broker": (str | None, "the path of a directory"),
    "wait": _NUMBER,
    "save_mib": _NUMBER,
    "replicas": (int, "a number"),
}


@dataclass(frozen=True)
class Settings:
    """`broker`: the instance directory, None: find it. `wait`: how long a request that has its pixels waits for the
    broker's answer, in seconds. `save_mib`: most encoder outputs that wait to be saved, in MiB. `processors`: keep
    what processors put out, too. `uuids`: identities that clients give name content, as hashes do. `replicas`: how
    many the engine has; the general plugin fills it in, because a replica forgets that it is not alone."""

    broker: str | None = None
    wait: float = 0.25
    save_mib: float = 256.0
    processors: bool = True
    uuids: bool = False
    replicas: int = 1


def read(extra: Mapping[str, Any]) -> Settings:
    """Raises `ValueError` with one sentence that names what makes no sense."""
    known = {field.name: field for field in fields(Settings)}
    for name, value in extra.items():
        if name not in known:
            raise ValueError(f"ec_connector_extra_config has {name!r}; mmbroker knows {', '.join(known)}")
        kind, words = _KINDS.get(name, (bool, "true or false"))
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise ValueError(f"ec_connector_extra_config: {name} is {words}, not {value!r}")
    settings = Settings(**extra)
    if not 0 <= settings.wait <= 60:
        raise ValueError(f"ec_connector_extra_config: wait is 0 to 60 seconds, not {settings.wait:g}")
    if settings.save_mib < 0:
        raise ValueError(f"ec_connector_extra_config: save_mib is 0 or more, not {settings.save_mib:g}")
    return settings


def asked(vllm_config: Any) -> Settings | None:
    """The settings of an engine that uses our connector; None for all others."""
    transfer = getattr(vllm_config, "ec_transfer_config", None)
    if transfer is None or transfer.ec_connector != CONNECTOR or transfer.ec_connector_module_path != MODULE:
        return None
    return read(transfer.ec_connector_extra_config)


def unknown_version() -> str | None:
    """Why this version of vLLM cannot be served, if so."""
    from importlib.metadata import version

    found = version("vllm")
    if found in VERSIONS:
        return None
    return f"this is vLLM {found}, and the adapter was tested with {', '.join(VERSIONS)}"


def engine_name(vllm_config: Any) -> str:
    """The same in all processes of one engine, and no other's: vLLM draws it when it reads its configuration."""
    return f"vllm-{str(vllm_config.ec_transfer_config.engine_id)[:13]}"


def replica_name(vllm_config: Any) -> str:
    """Each replica of an engine has a scheduler of its own, and is an engine of its own to the broker."""
    index = vllm_config.parallel_config.data_parallel_index
    return engine_name(vllm_config) + (f"-dp{index}" if index else "")
