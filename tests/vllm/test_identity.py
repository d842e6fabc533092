"""What is shared, and what never is, by the real vLLM's own configurations."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from mmbroker.adapters.vllm import settings

from . import kit


@pytest.fixture(scope="module")
def found() -> Any:
    with kit.scratch() as directory:
        probe = kit.Probe(directory)
        shutil.copytree(kit.model(), directory / "model")
        done = subprocess.run(
            [sys.executable, "-m", "tests.vllm.identity_program", str(directory / "model")],
            env=kit.environment(directory, probe),
            capture_output=True,
            text=True,
            timeout=kit.PATIENCE,
        )
        assert done.stdout, done.stderr[-4000:]
        return json.loads(done.stdout)


@pytest.mark.vllm
def test_equal_engines_share(found: Any) -> None:
    assert len(found["plain"]) == 64
    assert found["plain"] == found["again"] == found["cache sizes"]


@pytest.mark.vllm
@pytest.mark.parametrize(
    "what", ["device", "dtype", "pixels", "ranks", "quantized", "copied", "other weights"]
)
def test_engines_that_differ_do_not(found: Any, what: str) -> None:
    assert len(found[what]) == 64 and found[what] != found["plain"]


@pytest.mark.vllm
def test_by_content_a_copy_is_the_same_model_and_another_is_not(found: Any) -> None:
    here, copied, other = found["content"]
    assert len(here) == len(other) == 64
    assert here == copied and here not in (other, found["plain"])


@pytest.mark.vllm
def test_another_processor_is_another_key(found: Any) -> None:
    before, after = found["other processor"]
    assert before != after


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("dummy", "random"),
        ("lora", "LoRA"),
        ("extension", "somebody.Extension"),
        ("absent", "nobody/nothing are not on this machine"),
    ],
)
def test_what_cannot_be_told_is_not_shared(found: Any, what: str, why: str) -> None:
    assert found[what].startswith("not told: ") and why in found[what]


@pytest.mark.vllm
def test_only_hashes_of_content_are_identities(found: Any) -> None:
    assert found["keys"] == [True, True, False, False]
    assert found["uuids"], "unless the operator says that clients' names are"


@pytest.mark.vllm
def test_the_connector_is_found_by_its_module_path(found: Any) -> None:
    assert found["connector"]["class"] == "mmbroker.adapters.vllm.connector"
    assert "MMBrokerConnector" in found["connector"]["path"]
    assert "'brokr'" in found["connector"]["option"] and "broker, wait" in found["connector"]["option"]


@pytest.mark.vllm
def test_items_are_taken_apart_and_put_together(found: Any) -> None:
    assert [what for what, right in found["items"].items() if not right] == []


@pytest.mark.vllm
def test_an_error_of_ours_costs_one_request(found: Any) -> None:
    assert found["broken"] == [False, ["r"], [False, None]]


@pytest.mark.vllm
def test_weights_are_not_replaced_while_the_engine_runs(found: Any) -> None:
    assert "start it without the connector" in found["reload"]


@pytest.mark.vllm
def test_an_unknown_version_is_refused_by_name(found: Any) -> None:
    assert len(found["unknown"]["said"]) == 1 and "vLLM 0.33.0" in found["unknown"]["said"][0]
    assert not (found["unknown"]["hooked"] or found["unknown"]["serves"] or found["unknown"]["waits"])


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"broker": 3}, "broker is the path of a directory"),
        ({"wait": "long"}, "wait is a number"),
        ({"wait": True}, "wait is a number"),
        ({"wait": 61}, "0 to 60 seconds"),
        ({"save_mib": -1}, "save_mib is 0 or more"),
        ({"uuids": 1}, "uuids is true or false"),
        ({"speed": 1}, "'speed'"),
    ],
)
def test_settings_that_make_no_sense_are_named(extra: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match="ec_connector_extra_config") as caught:
        settings.read(extra)
    assert word in str(caught.value) and "\n" not in str(caught.value)
