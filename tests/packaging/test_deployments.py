"""What `deploy/` has: units, an image, a compose file, a pod; and for a fleet a second compose file, and manifests.

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
from mmbroker.tier.store import LIBRARIES
from tests.tier import mooncake

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
#: What a template's instance is in these tests, and what their reader puts in.
INSTANCE = "0"
CHOSEN = {"PORT": "30000", "MODEL": "model", "ADDRESS": "10.0.0.1", "MASTER": "10.0.0.1:50051"}


@dataclass
class Program:
    """Something that is started: its words, its variables, the memory it may have, and where this is said."""

    where: str
    words: list[str]
    environ: dict[str, str] = field(default_factory=dict)
    memory: int | None = None

    @property
    def name(self) -> str:
        return self.words[0].rsplit("/", 1)[-1]

    @property
    def is_ours(self) -> bool:
        return self.name == "mmbroker"

    @property
    def chosen(self) -> list[str]:
        """Its words after the first, with what the reader puts in."""
        return [re.sub(r"\$[{(](\w+)[^})]*[})]", lambda m: CHOSEN[m[1]], word) for word in self.words[1:]]


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


def compose(name: str = "compose") -> Any:
    return yaml.safe_load((DEPLOY / f"{name}.yaml").read_text())


def of_compose(file: str) -> Iterator[Program]:
    for name, service in compose(file)["services"].items():
        words = [*service.get("entrypoint", []), *service["command"]]
        if service["image"].startswith("mmbroker") and "entrypoint" not in service:
            words = ["mmbroker", *words]
        if "healthcheck" in service:
            yield Program(f"{file}: {name}'s health", service["healthcheck"]["test"][1:])
        yield Program(f"{file}: {name}", words, service["environment"], size(service.get("mem_limit")))


def manifests(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / f"{name}.yaml").read_text()))


def pods(file: str) -> Iterator[tuple[str, Any]]:
    """What is said of pods, by the name of the object that says so."""
    for told in manifests(file):
        if told["kind"] == "Pod":
            yield told["metadata"]["name"], told["spec"]
        elif told["kind"] == "Deployment":
            yield told["metadata"]["name"], told["spec"]["template"]["spec"]


def of_pods(file: str) -> Iterator[Program]:
    for _, spec in pods(file):
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            name = f"{file}: {container['name']}"
            environ = {one["name"]: one["value"] for one in container["env"] if "value" in one}
            words = container.get("command") or ["mmbroker", *container["args"]]
            yield Program(name, words, environ, size(container["resources"]["limits"].get("memory")))
            for probe in ("startupProbe", "readinessProbe"):
                if "exec" in container.get(probe, {}):
                    yield Program(f"{name}'s {probe}", container[probe]["exec"]["command"])


#: Instructions of the image, in order; continued lines are one.
INSTRUCTIONS = [
    (line.split(None, 1)[0], line.split(None, 1)[1])
    for line in re.sub(r"\\\n", "", (DEPLOY / "Dockerfile").read_text()).splitlines()
    if line and not line.startswith("#")
]
#: What starts in a container of it: a stage is built alone.
STAGES = ["build", "sglang", "tier", "broker"]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The image's instructions by stage."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, rest in INSTRUCTIONS:
        if name == "FROM":
            found[rest.split(" AS ")[1]] = []
        elif found:
            found[list(found)[-1]].append((name, rest))
    return found


def of_image() -> Iterator[Program]:
    for stage in ("tier", "broker"):
        told = dict(stages()[stage])
        environ = dict(pair.split("=", 1) for pair in told["ENV"].split())
        yield Program(f"image: {stage}", [*json.loads(told["ENTRYPOINT"]), *json.loads(told["CMD"])], environ)
        if "HEALTHCHECK" in told:
            yield Program(f"image: {stage}'s health", json.loads(told["HEALTHCHECK"].removeprefix("CMD ")))


def size(text: str | None) -> int | None:
    """A number of bytes, as compose and Kubernetes write it."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)(g|Gi)", text)
    assert found is not None, text
    return int(found[1]) << 30


COMPOSED, MANIFESTS = ("compose", "compose-tier"), ("kubernetes", "kubernetes-tier")
PROGRAMS = [
    *map(of_unit, UNITS),
    *(program for file in COMPOSED for program in of_compose(file)),
    *(program for file in MANIFESTS for program in of_pods(file)),
    *of_image(),
]
BROKERS = [p for p in PROGRAMS if p.is_ours and "start" in p.words]
MOVERS = [p for p in PROGRAMS if p.is_ours and "tier" in p.words]
MASTERS = [p for p in PROGRAMS if p.name == "mooncake_master"]
ENGINES = [p for p in PROGRAMS if not p.is_ours and p not in MASTERS]


def named(programs: list[Program]) -> Any:
    return pytest.mark.parametrize("program", programs, ids=[p.where for p in programs])


# --- what they start ------------------------------------------------------------------------------------------------


def test_there_are_programs() -> None:
    assert [len(kind) for kind in (BROKERS, ENGINES, MOVERS, MASTERS)] == [6, 6, 4, 3]
    assert len(PROGRAMS) == 24


@named([p for p in PROGRAMS if p.is_ours and "--help" not in p.words])
def test_our_commands_and_settings_are_ones(program: Program) -> None:
    verb, *arguments = program.chosen
    context = main.commands[verb].make_context(verb, arguments)
    if verb == "tier":
        known = {f"MMBROKER_TIER_{name.upper()}" for name in context.params} | {"MMBROKER_DIR"}
        assert program.environ.keys() <= known
        if program.memory is not None:
            assert program.memory >= (context.params["store_mib"] + 512) * MIB, (
                "what it lends is charged to it"
            )
    if verb != "start":
        return
    given = {k: v for k, v in context.params.items() if k not in ("cpu", "gpu", "config")}
    settings = Settings.resolve(given, program.environ)
    assert str(settings.path).startswith("/run/mmbroker/"), "else its clients do not find it"
    known = {f"MMBROKER_{name.upper()}" for name in Settings.__struct_fields__} | {"MMBROKER_DIR"}
    assert program.environ.keys() <= known
    if program.memory is not None:
        assert program.memory >= (settings.host_mib + 512) * MIB, "features are charged to the broker"


@named(MASTERS)
def test_a_master_listens_where_it_is_told(program: Program) -> None:
    """Its flags are ones, by itself where it is; without an address it would listen on every one."""
    told = dict(word.removeprefix("--").partition("=")[::2] for word in program.chosen)
    assert told["rpc_address"] == CHOSEN["ADDRESS"] and told["metrics_host"] == "127.0.0.1"
    port = CHOSEN["MASTER"].rpartition(":")[2]
    assert told["rpc_port"] == port and ".".join("0000") not in told.values()
    if mooncake.installed():
        asked = [mooncake.master_program(), "--help"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
        assert told.keys() <= set(re.findall(r"^\s+-(\w+) \(", done.stdout, re.MULTILINE))


def test_what_the_stores_library_needs_is_installed_everywhere() -> None:
    for place in (DEPLOY / "Dockerfile", ROOT / "docs" / "tier.md", ROOT / ".ci" / "run"):
        missing = set(LIBRARIES.split()) - set(re.split(r'[\s"]+', place.read_text()))
        assert not missing, f"{place}: {missing}"


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
        found, unknown = parser.parse_known_args(program.chosen[2:])
        assert unknown == [] and found.mm_transport == "broker", program
        asked = {name for name in program.environ if name.startswith("MMBROKER_")}
        assert asked <= ours | {"MMBROKER_DIR"}, program


def test_engines_of_one_machine_have_names_of_their_own() -> None:
    for source in ("compose", "kubernetes"):
        names = [p.environ["MMBROKER_ENGINE"] for p in ENGINES if p.where.startswith(f"{source}:")]
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
        for one in UNITS:  # they may name each other
            text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", one.read_text(), flags=re.MULTILINE)
            copy = tmp_path / one.name.replace("@", "@" + INSTANCE)
            copy.write_text(text.replace("User=inference", "User=root"))
        copy = tmp_path / path.name.replace("@", "@" + INSTANCE)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60
        )
        said = [line for line in done.stderr.splitlines() if str(copy.name) in line]
        assert said == [], said


def test_brokers_of_one_machine_do_not_share_what_systemd_removes() -> None:
    """A runtime directory goes with its unit, also from under another."""
    mine = {path.name: Unit(path)["Service"].get("RuntimeDirectory") for path in UNITS}
    assert mine == {
        "mooncake-master.service": None,
        "mmbroker-tier.service": None,
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
    seen: list[str] = []
    for name, rest in INSTRUCTIONS:
        assert name in KNOWN, name
        match name:
            case "FROM":
                found = re.fullmatch(r"(\S+) AS (\w+)", rest)
                assert found is not None, rest
                seen.append(found[2])
            case "COPY":
                *sources, _ = rest.split()
                assert all((ROOT / source).exists() for source in sources), rest
            case "RUN":
                for stage in re.findall(r"from=(\w+)", rest):
                    assert stage in seen[:-1], rest
            case "ENTRYPOINT" | "CMD":
                assert isinstance(json.loads(rest), list)
    assert seen == STAGES, "the last one is what is built by default"
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


def test_what_a_fleet_adds_to_it_is_valid() -> None:
    """By compose itself where it is. Only the mover and the master are on the machine's own network."""
    told = compose("compose-tier")
    assert told.keys() == {"name", "x-tier", "services"} and told["name"] == compose()["name"]
    assert told["services"].keys() == {"master", "mover"}
    for service in told["services"].values():
        assert service.keys() <= SERVICE_KEYS | {"network_mode", "profiles", "entrypoint"}
        assert service["user"] == "1000:1000" and service["network_mode"] == "host"
    mover = told["services"]["mover"]
    assert mover["volumes"] == ["broker:/run/mmbroker"] and mover["depends_on"].keys() == {"broker"}
    assert mover["build"]["target"] in STAGES
    if (
        shutil.which("docker")
        and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    ):
        files = [word for file in COMPOSED for word in ("-f", str(DEPLOY / f"{file}.yaml"))]
        done = subprocess.run(
            ["docker", "compose", *files, "--profile", "master", "config", "--quiet"],
            env={**os.environ, **CHOSEN},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr


# --- Kubernetes -----------------------------------------------------------------------------------------------------

#: Fields of the API that are used, by the kind of object: misspelled ones are otherwise ignored by a cluster.
FIELDS: Mapping[str, set[str]] = {
    "object": {"apiVersion", "kind", "metadata", "spec"},
    "Service": {"clusterIP", "selector", "ports"},
    "Deployment": {"replicas", "strategy", "selector", "template"},
    "NetworkPolicy": {"podSelector", "policyTypes", "ingress"},
    "Pod": {"securityContext", "terminationGracePeriodSeconds", "volumes", "initContainers", "containers"},
    "container": {"name", "image", "restartPolicy", "args", "command", "env", "volumeMounts", "resources"}
    | {"startupProbe", "readinessProbe", "securityContext", "ports"},
    "probe": {"exec", "httpGet", "tcpSocket", "periodSeconds", "failureThreshold", "timeoutSeconds"},
}
VERSIONS = {
    "Pod": "v1",
    "Service": "v1",
    "Deployment": "apps/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
}


@pytest.mark.parametrize("file", MANIFESTS)
def test_manifests_say_what_the_api_knows(file: str) -> None:
    for told in manifests(file):
        assert told.keys() == FIELDS["object"] and told["apiVersion"] == VERSIONS[told["kind"]]
        assert told["spec"].keys() <= FIELDS[told["kind"]], told["metadata"]["name"]
    for name, spec in pods(file):
        assert spec.keys() <= FIELDS["Pod"], f"{name}: no namespace of the host, and none shared"
        assert spec["securityContext"]["runAsUser"] == 1000, "the same user for all: a broker is for one"
        sidecars = spec.get("initContainers", [])
        assert all(one["restartPolicy"] == "Always" for one in sidecars), "else the pod waits for its end"
        names = [container["name"] for container in [*sidecars, *spec["containers"]]]
        assert len(set(names)) == len(names)
        for container in [*sidecars, *spec["containers"]]:
            assert container.keys() <= FIELDS["container"], container["name"]
            for probe in ("startupProbe", "readinessProbe"):
                assert container.get(probe, {}).keys() <= FIELDS["probe"]
            asked = re.findall(r"\$\((\w+)\)", str(container.get("args", container.get("command"))))
            assert set(asked) <= {one["name"] for one in container["env"]}, "else it is said as it is"


@pytest.mark.parametrize("file", MANIFESTS)
def test_engines_and_their_broker_meet_in_one_directory(file: str) -> None:
    (spec,) = (spec for name, spec in pods(file) if name == "sglang")
    volumes = {volume["name"]: volume.keys() - {"name"} for volume in spec["volumes"]}
    assert volumes == {"broker": {"emptyDir"}, "models": {"emptyDir"}}
    for container in [*spec["initContainers"], *spec["containers"]]:
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["broker"] == "/run/mmbroker" and mounts.keys() <= volumes.keys()
        assert {"name": "MMBROKER_DIR", "value": "/run/mmbroker"} in container["env"]
    assert spec["initContainers"][0]["name"] == "broker", "before whoever connects to it"
    assert not any("securityContext" in container for container in spec["containers"])
    ports = [container["ports"][0]["containerPort"] for container in spec["containers"]]
    assert ports == [container["readinessProbe"]["httpGet"]["port"] for container in spec["containers"]]
    assert [str(port) for port in ports] == [container["command"][-1] for container in spec["containers"]]


def test_a_fleets_members_find_each_other_and_nobody_else_finds_them() -> None:
    told = {(one["kind"], one["metadata"]["name"]): one["spec"] for one in manifests("kubernetes-tier")}
    service = told["Service", "mooncake-master"]
    for (kind, name), spec in told.items():
        if kind == "Deployment":
            labels = spec["template"]["metadata"]["labels"]
            assert spec["selector"]["matchLabels"].items() <= labels.items()
            assert labels["app"] == name
            policy = told["NetworkPolicy", "mmbroker-tier"]
            assert policy["podSelector"]["matchLabels"].items() <= labels.items(), "it is protected"
    assert service["selector"] == {"app": "mooncake-master"}
    (master,) = told["Deployment", "mooncake-master"]["template"]["spec"]["containers"]
    port = service["ports"][0]["port"]
    assert port == master["ports"][0]["containerPort"] == master["readinessProbe"]["tcpSocket"]["port"]
    assert f"--rpc_port={port}" in master["command"]
    (mover,) = (p for p in MOVERS if p.where.startswith("kubernetes-tier"))
    assert f"mooncake-master:{port}" in mover.words
    members, public = told["NetworkPolicy", "mmbroker-tier"]["ingress"]
    assert members == {"from": [{"podSelector": {"matchLabels": {"tier": "mmbroker"}}}]}
    (engine,) = (p for p in ENGINES if p.where.startswith("kubernetes-tier"))
    assert [str(one["port"]) for one in public["ports"]] == [engine.words[-1]]
