"""What a GPU may be called, and what is said about a name that is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmbroker.cuda.devices import Device, NoSuchDevice, find, visible

GPUS = [
    Device(f"GPU-{start}-0000-4000-8000-000000000000", index, f"Chip {index}", 1 << 30)
    for index, start in enumerate(("aaaa1111", "aaaa2222", "bbbb3333", "12345678"))
]
PART = Device("MIG-cccc4444-0000-4000-8000-000000000000", 4, "Chip 4 MIG 1g.18gb", 1 << 30)


def refusal(name: str, seen: list[Device], existing: list[Device] = GPUS, text: str | None = None) -> str:
    with pytest.raises(NoSuchDevice) as refused:
        find(name, seen, existing, text)
    message = str(refused.value)
    assert "\n" not in message and ". " not in message, "one sentence"
    return message


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("0", 0),
        ("3", 3),
        (" 2 ", 2),
        ("GPU-bbbb3333-0000-4000-8000-000000000000", 2),
        ("gpu-BBBB", 2),
        ("bbbb", 2),
        ("GPU-aaaa2", 1),
        ("GPU-1", 3),
    ],
)
def test_names(name: str, index: int) -> None:
    assert find(name, GPUS) is GPUS[index]


def test_an_index_counts_what_this_process_sees() -> None:
    seen, stopped = visible("2,0", GPUS)
    assert stopped is None and [device.index for device in seen] == [0, 1]
    assert find("0", seen, GPUS, "2,0").uuid == GPUS[2].uuid
    assert find("1", seen, GPUS, "2,0").uuid == GPUS[0].uuid
    assert find("GPU-bbbb", seen, GPUS, "2,0").index == 0


def test_refusals_name_what_exists() -> None:
    for name in ("4", "GPU-dddd", "", "GPU-", "-1", "cuda:0", "0,1", "all"):
        message = refusal(name, GPUS)
        assert all(device.uuid in message and device.name in message for device in GPUS), message
    message = refusal("aaaa", GPUS)
    assert GPUS[0].uuid in message and GPUS[1].uuid in message and GPUS[2].uuid not in message


def test_a_hidden_gpu_is_said_to_be_hidden() -> None:
    seen, _ = visible("1", GPUS)
    message = refusal("GPU-bbbb", seen, GPUS, "1")
    assert GPUS[2].uuid in message and "hidden" in message and "CUDA_VISIBLE_DEVICES=1 shows" in message


def test_nothing_is_shown() -> None:
    message = refusal("0", [], GPUS, "")
    assert "CUDA_VISIBLE_DEVICES=(empty)" in message and all(device.uuid in message for device in GPUS)
    assert "finds no GPU" in refusal("0", [], [])


def test_an_entry_that_cuda_stops_at_is_named() -> None:
    seen, stopped = visible("1,9,0", GPUS)
    assert [device.uuid for device in seen] == [GPUS[1].uuid] and stopped == "9"
    message = refusal("1", seen, GPUS, "1,9,0")
    assert "'9'" in message and GPUS[1].uuid in message and GPUS[0].uuid not in message


def test_parts_of_gpus_are_refused_by_name() -> None:
    existing = [*GPUS, PART]
    for name in ("MIG-cccc4444", "4", PART.uuid, "mig-anything"):
        assert "MIG" in refusal(name, existing, existing) and "whole GPUs" in refusal(
            name, existing, existing
        )


@pytest.mark.parametrize(
    ("text", "shown", "stopped"),
    [
        (None, [0, 1, 2, 3], None),
        ("", [], None),
        (" ", [], None),
        ("3,2,1,0", [3, 2, 1, 0], None),
        (" 1 , GPU-bbbb ", [1, 2], None),
        ("GPU-aaaa", [], "GPU-aaaa"),
        ("0,0", [0], "0"),
        ("0,-1,1", [0], "-1"),
        ("2,MIG-1,1", [2], "MIG-1"),
        ("0,,1", [0], ""),
        ("NoDevFiles", [], "NoDevFiles"),
    ],
)
def test_visible_devices(text: str | None, shown: list[int], stopped: str | None) -> None:
    seen, at = visible(text, GPUS)
    assert [device.uuid for device in seen] == [GPUS[index].uuid for index in shown]
    assert [device.index for device in seen] == list(range(len(shown)))
    assert at == stopped


@given(st.permutations(range(4)), st.text(alphabet="0123456789abcdefGPU-,: ", max_size=12))
def test_any_text_finds_one_gpu_or_is_refused(order: list[int], name: str) -> None:
    seen, _ = visible(",".join(map(str, order)), GPUS)
    try:
        found = find(name, seen, GPUS, None)
    except NoSuchDevice:
        return
    assert found in seen
    if name.strip().isdecimal():
        assert found.uuid == GPUS[order[int(name)]].uuid
    else:
        assert found.uuid.lower().removeprefix("gpu-").startswith(name.strip().lower().removeprefix("gpu-"))
