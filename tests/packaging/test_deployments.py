"""What `deploy/` has: units, an image, a compose file, a pod.

Each is valid, says only what our programs understand, and its broker really starts. systemd and docker check theirs
where they are installed, and the rules of their formats everywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from configparser import ConfigParser
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmbroker.adapters.sglang import flags
from mmbroker.adapters.sglang import settings as engine_settings
from mmbroker.cli import main
from mmbroker.config import MIB, Settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
#: What a template's instance is in these tests.
INSTANCE = "0"


@dataclass
class Program:
    """Something that is started: its words, its variables, the memory it may have, and where this is said."""

    where: str
    words: list[str]
    environ: dict[str, str] = field(default_factory=dict)
    memory: int | None = None

    @property
    def is_broker(self) -> bool:
        return self.words[0].rsplit("/", 1)[-1] == "mmbroker"


# --- reading them ---------------------------------------------------------------------------------------------------


class Unit(ConfigParser):
    """A unit of systemd: keys keep their case, and a comment is a whole line."""

    def __init__(self, path: Path) -> None:
        super().__init__(interpolation=None, comment_prefixes=("#", ";"), strict=True)
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.read_string(path.read_text().replace("%i", INSTANCE))


def of_unit(path: Path) -> Program:
    service = Unit(path)["Service"]
    environ = dict(pair.split("=", 1) for pair in service.get("Environment", "").split())
    return Program(path.name, shlex.split(service["ExecStart"]), environ)


def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def of_compose() -> Iterator[Program]:
    for name, service in compose()["services"].items():
        words = service["command"]
        if service["image"] == "mmbroker":
            words = ["mmbroker", *words]
            yield Program(f"compose: {name}'s health", service["healthcheck"]["test"][1:])
        yield Program(f"compose: {name}", words, service["environment"], size(service.get("mem_limit")))


def pod() -> Any:
    return yaml.safe_load((DEPLOY / "kubernetes.yaml").read_text())


def of_pod() -> Iterator[Program]:
    spec = pod()["spec"]
    for container in [*spec["initContainers"], *spec["containers"]]:
        name, environ = container["name"], {one["name"]: one["value"] for one in container["env"]}
        words = container.get("command") or ["mmbroker", *container["args"]]
        yield Program(f"pod: {name}", words, environ, size(container["resources"]["limits"].get("memory")))
        for probe in ("startupProbe", "readinessProbe"):
            if "exec" in container.get(probe, {}):
                yield Program(f"pod: {name}'s {probe}", container[probe]["exec"]["command"])


#: Instructions of the image, in order; continued lines are one.
INSTRUCTIONS = [
    (line.split(None, 1)[0], line.split(None, 1)[1])
    for line in re.sub(r"\\\n", "", (DEPLOY / "Dockerfile").read_text()).splitlines()
    if line and not line.startswith("#")
]


def of_image() -> Iterator[Program]:
    entry = json.loads(dict(INSTRUCTIONS)["ENTRYPOINT"])
    environ = dict(pair.split("=", 1) for pair in dict(INSTRUCTIONS)["ENV"].split())
    yield Program("image", [*entry, *json.loads(dict(INSTRUCTIONS)["CMD"])], environ)
    yield Program("image's health", json.loads(dict(INSTRUCTIONS)["HEALTHCHECK"].removeprefix("CMD ")))


def size(text: str | None) -> int | None:
    """A number of bytes, as compose and Kubernetes write it."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)(g|Gi)", text)
    assert found is not None, text
    return int(found[1]) << 30


PROGRAMS = [*map(of_unit, UNITS), *of_compose(), *of_pod(), *of_image()]
BROKERS = [p for p in PROGRAMS if p.is_broker and "start" in p.words]
ENGINES = [p for p in PROGRAMS if not p.is_broker]


def named(programs: list[Program]) -> Any:
    return pytest.mark.parametrize("program", programs, ids=[p.where for p in programs])


# --- what they start ------------------------------------------------------------------------------------------------


def test_there_are_programs() -> None:
    assert len(BROKERS) == 5 and len(ENGINES) == 5 and len(PROGRAMS) == 14


@named([p for p in PROGRAMS if p.is_broker])
def test_a_brokers_commands_and_settings_are_ones(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    verb, *arguments = program.words[1:]
    context = main.commands[verb].make_context(verb, arguments)
    if verb != "start":
        return
    given = {k: v for k, v in context.params.items() if k not in ("cpu", "gpu", "config")}
    settings = Settings.resolve(given, program.environ)
    assert str(settings.path).startswith("/run/mmbroker/"), "else its clients do not find it"
    known = {f"MMBROKER_{name.upper()}" for name in Settings.__struct_fields__} | {"MMBROKER_DIR"}
    assert program.environ.keys() <= known
    if program.memory is not None:
        assert program.memory >= (settings.host_mib + 512) * MIB, "features are charged to the broker"


@named(BROKERS)
def test_a_broker_starts_so(program: Program, broker_root: Path) -> None:
    """With its own words and variables, no home, and a directory above where everybody may write, as in a container.

    Without a GPU and a fixed port, of which this machine may have none free.
    """
    broker_root.chmod(0o777)
    words = list(program.words[1:])
    for option in ("--gpu", "--http"):
        if option in words:
            at = words.index(option)
            words[at : at + 2] = ["--http", "127.0.0.1:0"] if option == "--http" else ["--cpu"]
    environ = {**program.environ, "MMBROKER_DIR": str(broker_root), "PATH": os.environ["PATH"]}
    running = subprocess.Popen(
        [Path(sys.executable).with_name("mmbroker"), *words],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with running:
        assert running.stdout is not None
        try:
            assert "mmbroker is ready" in running.stdout.readline()
        finally:
            running.terminate()
        assert running.wait(30) == 0


@pytest.mark.sglang
def test_engines_flags_and_variables_are_ones() -> None:
    """Ours by our own parser, SGLang's by SGLang's."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add(ServerArgs.add_cli_args, parser)
    ours = {
        value for name, value in vars(engine_settings).items() if name.isupper() and isinstance(value, str)
    }
    for program in ENGINES:
        assert program.words[1:3] == ["-m", "sglang.launch_server"], program
        words = [re.sub(r"\$\{PORT\}", "30000", word) for word in program.words[3:]]
        found, unknown = parser.parse_known_args(words)
        assert unknown == [] and found.mm_transport == "broker", program
        asked = {name for name in program.environ if name.startswith("MMBROKER_")}
        assert asked <= ours | {"MMBROKER_DIR"}, program


def test_engines_of_one_machine_have_names_of_their_own() -> None:
    for source in ("compose", "pod"):
        names = [p.environ["MMBROKER_ENGINE"] for p in ENGINES if p.where.startswith(source)]
        assert len(names) == 2 == len(set(names))


# --- systemd --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", UNITS, ids=[path.name for path in UNITS])
def test_a_unit_is_valid(path: Path, tmp_path: Path) -> None:
    """By systemd itself where it is; its programs need not be on this machine."""
    unit = Unit(path)
    assert unit.sections() == ["Unit", "Service", "Install"] and unit["Install"]["WantedBy"]
    assert {"User", "ExecStart", "Restart", "TimeoutStopSec"} <= unit["Service"].keys()
    environ = of_unit(path).environ
    if "RuntimeDirectory" in unit["Service"]:
        assert environ["MMBROKER_DIR"] == "/run/" + unit["Service"]["RuntimeDirectory"]
    if shutil.which("systemd-analyze"):
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", path.read_text(), flags=re.MULTILINE)
        copy = tmp_path / path.name.replace("@", "@" + INSTANCE)
        copy.write_text(text.replace("User=inference", "User=root"))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60
        )
        said = [line for line in done.stderr.splitlines() if str(copy.name) in line]
        assert said == [], said


def test_brokers_of_one_machine_do_not_share_what_systemd_removes() -> None:
    """A runtime directory goes with its unit, also from under another."""
    mine = {path.name: Unit(path)["Service"].get("RuntimeDirectory") for path in UNITS}
    assert mine == {
        "mmbroker.service": "mmbroker",
        "mmbroker@.service": "mmbroker/0",
        "sglang@.service": None,
    }


# --- the image ------------------------------------------------------------------------------------------------------

#: Of Dockerfiles, those that are used.
KNOWN = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "VOLUME", "USER", "STOPSIGNAL", "HEALTHCHECK"} | {
    *("ENTRYPOINT", "CMD"),
}


def test_the_image_is_made_of_what_there_is() -> None:
    stages: list[str] = []
    for name, rest in INSTRUCTIONS:
        assert name in KNOWN, name
        match name:
            case "FROM":
                found = re.fullmatch(r"(\S+) AS (\w+)", rest)
                assert found is not None, rest
                stages.append(found[2])
            case "COPY":
                *sources, _ = rest.split()
                assert all((ROOT / source).exists() for source in sources), rest
            case "RUN":
                for stage in re.findall(r"from=(\w+)", rest):
                    assert stage in stages[:-1], rest
            case "ENTRYPOINT" | "CMD":
                assert isinstance(json.loads(rest), list)
    assert stages == ["build", "sglang", "broker"], "the last one is what is built by default"
    assert "COPY . " not in (DEPLOY / "Dockerfile").read_text(), (
        "environments of gigabytes lie beside the sources"
    )


def test_the_image_has_all_that_the_wheel_is_made_of() -> None:
    from tests.packaging.test_wheel import SOURCES

    copied = {source for name, rest in INSTRUCTIONS if name == "COPY" for source in rest.split()[:-1]}
    assert copied == SOURCES


# --- compose --------------------------------------------------------------------------------------------------------

SERVICE_KEYS = {
    "image",
    "build",
    "user",
    "command",
    "environment",
    "volumes",
    "mem_limit",
    "stop_grace_period",
} | {
    *("restart", "healthcheck", "depends_on", "ports"),
}


def test_the_compose_file_is_valid() -> None:
    """By compose itself where it is."""
    told = compose()
    assert told.keys() == {"name", "x-engine", "services", "volumes"}
    assert not {"pid", "ipc", "network_mode", "privileged"} & {
        k for s in told["services"].values() for k in s
    }
    for service in told["services"].values():
        assert service.keys() <= SERVICE_KEYS
        assert service["user"] == "1000:1000", "a broker is for one user"
        assert "broker:/run/mmbroker" in service["volumes"]
        assert service["environment"]["MMBROKER_DIR"] == "/run/mmbroker"
        assert {volume.split(":")[0] for volume in service["volumes"]} <= told["volumes"].keys()
        assert set(service.get("depends_on", {})) <= told["services"].keys()
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        if "build" in service:
            build = service["build"]
            assert (DEPLOY / build["context"] / build["dockerfile"]).exists()
    if (
        shutil.which("docker")
        and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    ):
        command = ["docker", "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
        done = subprocess.run(
            command, env={**os.environ, "MODEL": "m"}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr


# --- Kubernetes -----------------------------------------------------------------------------------------------------

#: Fields of the API that are used, by the kind of object: misspelled ones are otherwise ignored by a cluster.
FIELDS: Mapping[str, set[str]] = {
    "pod": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"securityContext", "terminationGracePeriodSeconds", "volumes", "initContainers", "containers"},
    "container": {"name", "image", "restartPolicy", "args", "command", "env", "volumeMounts", "resources"}
    | {"startupProbe", "readinessProbe", "securityContext", "ports"},
    "probe": {"exec", "httpGet", "periodSeconds", "failureThreshold", "timeoutSeconds"},
}


def test_the_pod_is_valid() -> None:
    told = pod()
    assert told.keys() == FIELDS["pod"] and (told["apiVersion"], told["kind"]) == ("v1", "Pod")
    spec = told["spec"]
    assert spec.keys() <= FIELDS["spec"], "no namespace of the host, and none shared"
    volumes = {volume["name"]: volume.keys() - {"name"} for volume in spec["volumes"]}
    assert volumes == {"broker": {"emptyDir"}, "models": {"emptyDir"}}
    (broker,) = spec["initContainers"]
    assert broker["restartPolicy"] == "Always", "else the pod waits for its end"
    names = [container["name"] for container in [broker, *spec["containers"]]]
    assert len(set(names)) == len(names) == 3
    for container in [broker, *spec["containers"]]:
        assert container.keys() <= FIELDS["container"], container["name"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["broker"] == "/run/mmbroker" and mounts.keys() <= volumes.keys()
        assert {"name": "MMBROKER_DIR", "value": "/run/mmbroker"} in container["env"]
        for probe in ("startupProbe", "readinessProbe"):
            assert container.get(probe, {}).keys() <= FIELDS["probe"]
    assert spec["securityContext"]["runAsUser"] == 1000, "the same user for all: a broker is for one"
    assert not any("securityContext" in container for container in spec["containers"])
    ports = [container["ports"][0]["containerPort"] for container in spec["containers"]]
    assert ports == [container["readinessProbe"]["httpGet"]["port"] for container in spec["containers"]]
    assert [str(port) for port in ports] == [container["command"][-1] for container in spec["containers"]]
