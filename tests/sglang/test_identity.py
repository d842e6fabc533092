"""Whether two engines have the same encoder: what must make a difference, and what must not."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmbroker.adapters.sglang import identity
from mmbroker.adapters.sglang.settings import SHARE_OUTPUTS
from mmbroker.adapters.weights import WEIGHTS_BY
from mmbroker.proto.keys import Kind

pytestmark = pytest.mark.sglang

QWEN = "Qwen2_5_VLForConditionalGeneration"
DIGEST = bytes(range(32))


def item(modality: str = "IMAGE", **beside: Any) -> Any:
    data = {"image_grid_thw": torch.tensor([[1, 2, 4]]), **beside}
    return SimpleNamespace(modality=SimpleNamespace(name=modality), model_specific_data=data)


class Config:
    """A model's configuration, as far as it is looked at."""

    def __init__(self, architecture: str = QWEN, **fields: Any) -> None:
        self.architectures = [architecture]
        self.fields = fields

    def to_json_string(self, use_diff: bool) -> str:
        return f'{{"_name_or_path": "{self.fields.get("path")}", "depth": {self.fields.get("depth", 2)}}}'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(100))
    (directory / "config.json").write_text("{}")
    return directory


def engine(
    model: Path, config: Config | None = None, name: str = "engine", variables: Any = (), **changed: Any
) -> identity.Encoder:
    """The encoder of an engine that was just started."""
    args = {
        "model_path": str(model),
        "load_format": "auto",
        "revision": None,
        "dtype": "auto",
        "tp_size": 1,
        "port": 30000,
        **changed,
    }
    environ = {"HOME": "/root", **dict(variables)}
    identity.note_weights(SimpleNamespace(**args), environ)
    manager = SimpleNamespace(
        server_args=SimpleNamespace(**args), model_config=SimpleNamespace(hf_config=config or Config())
    )
    return identity.Encoder(manager, name, environ)


def test_equal_engines_have_equal_keys(model: Path) -> None:
    one, other = engine(model, name="a"), engine(model, name="b")
    key = one.key(item(), DIGEST)
    assert key is not None and key.kind is Kind.DERIVED
    assert key == one.key(item(), DIGEST) == other.key(item(), DIGEST)


@pytest.mark.parametrize(
    "change",
    [
        {"port": 1, "nccl_port": 2, "dist_init_addr": "x:1", "tokenizer_ipc_name": "ipc://x", "host": "::"},
        {"random_seed": 5, "mem_fraction_static": 0.5, "chunked_prefill_size": 32, "max_total_tokens": 9},
        {"log_level": "debug", "enable_metrics": True, "served_model_name": "x", "tokenizer_worker_num": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_has_nothing_to_do_with_an_encoder_makes_no_difference(
    model: Path, change: dict[str, Any]
) -> None:
    plain = engine(model, **dict.fromkeys(change))
    assert engine(model, **change).key(item(), DIGEST) == plain.key(item(), DIGEST)


def by_content(cache: Path) -> dict[str, str]:
    return {WEIGHTS_BY: "content", "XDG_CACHE_HOME": str(cache)}


def test_by_content_a_copy_is_the_same_model(model: Path, tmp_path: Path) -> None:
    """As on another machine, and for whoever reads it anew; but not the same key as by its files."""
    copy = shutil.copytree(model, tmp_path / "copy")
    keys = [
        engine(one, variables=by_content(tmp_path / cache)).key(item(), DIGEST)
        for one, cache in ((model, "here"), (copy, "here"), (copy, "there"))
    ]
    assert keys[0] is not None and keys[0] == keys[1] == keys[2]
    assert engine(model).key(item(), DIGEST) not in (keys[0], engine(copy).key(item(), DIGEST))


@pytest.mark.parametrize("place", [11, 109])
def test_by_content_one_byte_makes_another_model(model: Path, tmp_path: Path, place: int) -> None:
    """The same name, length, header and age: nothing else would tell."""
    first = engine(model, variables=by_content(tmp_path)).key(item(), DIGEST)
    file = model / "model.safetensors"
    is_, data = file.stat(), bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(is_.st_atime_ns, is_.st_mtime_ns))
    assert file.stat().st_mtime_ns == is_.st_mtime_ns
    second = engine(model, variables=by_content(tmp_path)).key(item(), DIGEST)
    assert None not in (first, second) and first != second


def test_by_content_machines_that_round_differently_share_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine(model, variables=by_content(tmp_path)).key(item(), DIGEST)
    monkeypatch.setattr(identity, "kinds", lambda: ["another processor"])
    assert engine(model, variables=by_content(tmp_path)).key(item(), DIGEST) not in (None, first)


def test_by_content_files_that_change_while_they_are_loaded_are_seen(model: Path, tmp_path: Path) -> None:
    started = engine(model, variables=by_content(tmp_path))
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(99) + b"x")
    assert started.key(item(), DIGEST) is None


def test_a_models_name_makes_no_difference(model: Path, tmp_path: Path) -> None:
    """Its files do, and they are the same by another way."""
    link = tmp_path / "link"
    link.symlink_to(model)
    here, there = Config(path=model), Config(path=link)
    assert engine(link, there).key(item(), DIGEST) == engine(model, here).key(item(), DIGEST)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float32"},
        {"quantization": "fp8"},
        {"tp_size": 2},
        {"mm_attention_backend": "fa3"},
        {"attention_backend": "triton"},
        {"device": "cuda"},
        {"json_model_override_args": '{"depth": 3}'},
        {"mm_enable_dp_encoder": True},
        {"an_argument_that_is_not_known_yet": 1},
        {"variables": {"SGLANG_VIT_ENABLE_CUDA_GRAPH": "1"}},
        {"config": Config(depth=3)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_may_shape_an_output_makes_a_difference(model: Path, change: dict[str, Any]) -> None:
    assert engine(model, **change).key(item(), DIGEST) != engine(model).key(item(), DIGEST)


def test_other_versions_make_a_difference(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = engine(model).key(item(), DIGEST)
    monkeypatch.setattr(identity, "versions", lambda *names: dict.fromkeys(names, "0"))
    assert engine(model).key(item(), DIGEST) != key


def rewritten(model: Path) -> None:
    """Other bytes, as many, with the same header and age: in another file."""
    weights = model / "model.safetensors"
    was = weights.stat()
    data = weights.read_bytes()
    (model / "new").write_bytes(data[:-1] + b"1")
    os.utime(model / "new", ns=(was.st_atime_ns, was.st_mtime_ns))
    os.rename(model / "new", weights)


def touched(model: Path) -> None:
    was = (model / "model.safetensors").stat()
    os.utime(model / "model.safetensors", ns=(was.st_atime_ns, was.st_mtime_ns + 1))


def longer(model: Path) -> None:
    with open(model / "model.safetensors", "ab") as file:
        file.write(b"1")


def one_more(model: Path) -> None:
    (model / "more.safetensors").write_bytes(bytes(16))


def code(model: Path) -> None:
    (model / "modeling.py").write_text("")


CHANGES = [rewritten, touched, longer, one_more, code]


@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_make_a_difference(model: Path, change: Callable[[Path], None]) -> None:
    before = engine(model).key(item(), DIGEST)
    change(model)
    assert engine(model).key(item(), DIGEST) not in (before, None)


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_changed_while_they_were_loaded_are_not_known(
    model: Path, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    encoder = engine(model)
    change(model)
    with caplog.at_level(logging.INFO):
        assert encoder.key(item(), DIGEST) is None
        assert encoder.key(item(), DIGEST) is None
    (said,) = caplog.records
    assert "are not what they were" in said.message
    assert said.levelno == logging.INFO


def test_weights_that_came_after_the_start_are_not_known(model: Path) -> None:
    """As when a model is downloaded: from the next start on they are."""
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").unlink()
    encoder = engine(model)
    (model / "model.safetensors").write_bytes(weights)
    assert encoder.key(item(), DIGEST) is None


def test_random_weights_are_each_engines_own(model: Path) -> None:
    keys = {engine(model, name=name, load_format="dummy").key(item(), DIGEST) for name in "ab"}
    assert len(keys) == 2 and None not in keys


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"config": Config("AnotherModel")}, "AnotherModel"),
        ({"enable_lora": True}, "LoRA"),
        ({"model": Path("/no/such/model")}, "/no/such/model"),
        ({"load_format": "remote_instance"}, "--load-format remote_instance"),
        ({"load_format": "a.loader.of.somebodys.own"}, "--load-format a.loader"),
    ],
)
def test_what_is_not_known_is_not_shared(
    model: Path, change: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has asked for it is warned; otherwise it is only said."""
    for asked, level in ((None, logging.INFO), ("1", logging.WARNING)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            variables = [(SHARE_OUTPUTS, asked)] if asked else []
            made = engine(**{"model": model, "variables": variables, **change})
            assert not made.unknown
            assert made.key(item(), DIGEST) is None
            assert made.unknown, "nobody asks again"
        assert why in caplog.text and caplog.records[-1].levelno == level


def test_every_way_to_load_is_known_or_not(model: Path) -> None:
    """By its name, and as SGLang has it."""
    from sglang.srt.configs.load_config import LoadFormat

    for way in LoadFormat:
        known = way.value in identity.LOADS or way is LoadFormat.DUMMY
        for given in (way, way.value):
            made = engine(model, load_format=given)
            assert (made.key(item(), DIGEST) is not None) is known and made.unknown is not known
    assert {way.value for way in LoadFormat} >= identity.LOADS


def test_an_items_own_data_make_a_difference(model: Path) -> None:
    encoder = engine(model)
    keys = [
        encoder.key(item(), DIGEST),
        encoder.key(item(), DIGEST[::-1]),
        encoder.key(item("VIDEO"), DIGEST),
        encoder.key(item(image_grid_thw=torch.tensor([[1, 4, 2]])), DIGEST),
        encoder.key(item(image_grid_thw=torch.tensor([[1, 2, 4]], dtype=torch.int32)), DIGEST),
        encoder.key(item(second_per_grid_ts=[0.5]), DIGEST),
    ]
    assert len(set(keys)) == len(keys) and None not in keys


@pytest.mark.parametrize(
    "value", [object(), torch.zeros(1 << 20), torch.zeros(2, device="meta")], ids=["object", "large", "meta"]
)
def test_an_item_with_data_of_no_plain_form_is_not_shared(model: Path, value: Any) -> None:
    assert engine(model).key(item(more=value), DIGEST) is None
