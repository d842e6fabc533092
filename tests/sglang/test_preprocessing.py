"""Workers that make features on the CPU, whatever SGLang would do on a machine with a GPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmbroker.adapters.sglang import flags, hooks, preprocessing, seams, settings

from .test_plugin import parse, plain_environment, switched, take

__all__ = ["plain_environment", "switched"]

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(120)]

JPEG = b"\xff\xd8 a picture \xff\xd9"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither our variable nor OpenMP's is set, and torch has its threads afterwards."""
    for name in (settings.PREPROCESS, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def processor() -> Any:
    """SGLang's own base of all processors; not initialised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of what SGLang imports
        from sglang.srt.multimodal.processors import base_processor

    base = base_processor.BaseMultimodalProcessor
    # What is abstract in it is not asked here.
    kind = type("Processor", (base,), dict.fromkeys(base.__abstractmethods__, lambda self: None))
    made = object.__new__(kind)
    made.server_args = SimpleNamespace(tokenizer_worker_num=4)
    return made


def device(processor: Any) -> Any:
    """Where the hook says that pictures are to be shaped, if SGLang says: on the fourth GPU."""
    return hooks.processor_device(lambda processor, wrapped: "cuda:3", processor, SimpleNamespace())


def test_pictures_are_shaped_where_sglang_would_unless_asked(processor: Any) -> None:
    assert device(processor) == "cuda:3"
    setattr(processor, hooks._OURS, SimpleNamespace(on_cpu=False))
    assert device(processor) == "cuda:3"
    setattr(processor, hooks._OURS, SimpleNamespace(on_cpu=True))
    assert device(processor) == "cpu"


def test_the_hook_is_one_of_every_version() -> None:
    name = ("sglang.srt.multimodal.processors.base_processor", "BaseMultimodalProcessor")
    hook = seams._COMMON[name[0], f"{name[1]}._fast_image_processor_device"]
    assert hook is hooks.processor_device


def test_jpegs_are_decoded_on_the_cpu(processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.utils import common

    monkeypatch.setattr(common, "is_cuda", lambda: True)
    kind = type(processor)
    assert _on_gpu(common, kind)
    preprocessing.stay_on_cpu(SimpleNamespace(mm_processor=processor, server_args=processor.server_args))
    assert not _on_gpu(common, kind)
    assert _on_gpu(common, kind.__mro__[1])  # nobody else's


def _on_gpu(common: Any, kind: Any) -> bool:
    """Would SGLang's loader decode a JPEG there? Its name for the question differs between versions."""
    if hasattr(common, "is_jpeg_with_cuda"):
        return bool(common.is_jpeg_with_cuda(JPEG, kind.gpu_image_decode))
    return bool(kind.gpu_image_decode)


@pytest.mark.parametrize(("cores", "workers", "threads"), [(16, 4, 2), (16, 1, 8), (2, 8, 1), (16, None, 8)])
def test_each_worker_has_its_share_of_half_the_cores(
    cores: int, workers: int | None, threads: int, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    args = SimpleNamespace(tokenizer_worker_num=workers)
    preprocessing.stay_on_cpu(SimpleNamespace(mm_processor=processor, server_args=args))
    assert torch.get_num_threads() == threads


def test_who_has_said_how_many_threads_keeps_them(processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(3)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    preprocessing.stay_on_cpu(SimpleNamespace(mm_processor=processor, server_args=processor.server_args))
    assert torch.get_num_threads() == 3


def test_the_flag_reaches_every_process(switched: list[tuple[settings.Settings, bool]]) -> None:
    take(parse("--mm-transport", "broker", "--mm-broker-preprocess", "cpu"))
    assert [asked.on_cpu for asked, _ in switched] == [True]
    take(parse("--mm-transport", "broker", "--mm-broker-preprocess", "engine"))
    assert not settings.read().on_cpu


def test_a_place_that_does_not_exist_is_refused_by_name() -> None:
    os.environ[settings.PREPROCESS] = "gpu"
    with pytest.raises(ValueError, match="MMBROKER_PREPROCESS='gpu': it is 'engine' or 'cpu'"):
        settings.read()


def test_features_cannot_be_kept_on_the_gpu_and_made_on_the_cpu() -> None:
    os.environ[settings.PREPROCESS] = "cpu"
    with pytest.raises(ValueError, match="cuda_ipc is for features that are made on the GPU"):
        flags.stands_aside(SimpleNamespace(mm_feature_transport="cuda_ipc"))
    assert flags.stands_aside(SimpleNamespace(mm_feature_transport="cpu")) is None


@pytest.mark.parametrize(
    ("fields", "sleeps"),
    [
        ({}, True),
        ({"tp_size": 2, "dp_size": 2}, True),
        ({"pp_size": 2}, False),
        ({"attn_dp_size": 2}, False),
        ({"enable_dp_attention": True}, False),
        ({"language_only": True}, False),
        ({"disaggregation_mode": "decode"}, False),
        ({"use_ray": True}, False),
    ],
)
def test_an_idle_scheduler_sleeps_if_nobody_waits_for_its_turns(fields: dict[str, Any], sleeps: bool) -> None:
    """And if features go through a broker at all."""
    plain = {"mm_feature_transport": None, "pp_size": 1, "disaggregation_mode": "null", "model_path": "none"}
    for transport in ("broker", "sglang"):
        os.environ[settings.TRANSPORT] = transport
        args = SimpleNamespace(**{**plain, "sleep_on_idle": False, **fields})
        hooks.resolve(lambda args: None, args)
        assert args.sleep_on_idle is (sleeps and transport == "broker")
        os.environ.pop(settings.TRANSPORT, None)
