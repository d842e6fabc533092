"""What makes two encoders the same, by the real vLLM's configurations: prints, as JSON, what it found.

MODEL (a directory that may be written) on the command line.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm.engine.arg_utils import EngineArgs

    from mmbroker.adapters.vllm import identity, seams, settings
    from mmbroker.adapters.weights import WEIGHTS_BY
    from tests.vllm import kit

    model = Path(sys.argv[1])

    def config(**more: Any) -> Any:
        transfer = kit.transfer(None)
        return EngineArgs(
            **{**kit.arguments(), "model": str(model), "ec_transfer_config": transfer, **more}
        ).create_engine_config()

    def told(asked: Any, device: str = "cpu") -> str:
        try:
            return identity.of_encoder(asked, device).hex()
        except identity.NotTold as error:
            return f"not told: {error}"

    found: dict[str, Any] = {"plain": told(config()), "again": told(config())}
    found["device"] = told(config(), "another GPU")
    found["dtype"] = told(config(dtype="bfloat16"))
    found["pixels"] = told(config(mm_processor_kwargs={"min_pixels": 6272}))
    found["ranks"] = told(config(tensor_parallel_size=2))
    found["dummy"] = told(config(load_format="dummy"))
    quantized = config()
    quantized.model_config.quantization = "fp8"
    found["quantized"] = told(quantized)
    lora = config()
    lora.lora_config = type("Lora", (), {"enable_tower_connector_lora": True})()
    found["lora"] = told(lora)
    found["extension"] = told(config(worker_extension_cls="somebody.Extension"))
    elsewhere = config()
    elsewhere.model_config.model = "nobody/nothing"
    found["absent"] = told(elsewhere)
    same_cache = config(mm_processor_cache_gb=1, limit_mm_per_prompt={"image": 2, "video": 0})
    found["cache sizes"] = told(same_cache)

    def by_content() -> str:
        os.environ[WEIGHTS_BY] = "content"
        try:
            return told(config())
        finally:
            del os.environ[WEIGHTS_BY]

    # A copy of the weights in the place of the file: as on another machine.
    weights = model / "model.safetensors"
    os.environ["XDG_CACHE_HOME"] = str(model.parent / "cache")
    found["content"] = [by_content()]
    shutil.copy2(weights, model / "copy")
    os.replace(model / "copy", weights)
    found["copied"] = told(config())
    found["content"].append(by_content())

    # Another model under the same name: the same bytes but one, and the same time of change for all that one can set.
    stat = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    found["other weights"] = told(config())
    found["content"].append(by_content())
    shutil.copy(model / "preprocessor_config.json", model / "kept.txt")
    options = json.loads((model / "preprocessor_config.json").read_text())
    before = told(config())
    (model / "preprocessor_config.json").write_text(json.dumps({**options, "image_mean": [0.5, 0.5, 0.5]}))
    found["other processor"] = [before, told(config())]
    shutil.copy(model / "kept.txt", model / "preprocessor_config.json")

    keys = identity.Identity(lambda: identity.of_encoder(config(), "cpu"), False, logging.warning)
    found["keys"] = [
        keys.key(name) is not None for name in ("ab" * 32, "ab" * 64, "cat.png", "renderer0-mm-1-image-0")
    ]
    trusting = identity.Identity(lambda: identity.of_encoder(config(), "cpu"), True, logging.warning)
    found["uuids"] = trusting.key("cat.png") is not None

    found["connector"] = connector(config)
    found["items"] = taken_apart()
    found["broken"] = broken(config)
    found["reload"] = reloaded(seams)
    found["unknown"] = unknown(config, settings, seams)
    json.dump(found, answers)
    answers.close()
    os._exit(0)


def connector(config: Any) -> dict[str, str]:
    """How vLLM finds it, and what it says where it cannot."""
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    from tests.vllm import kit

    found: dict[str, str] = {}
    transfer = kit.transfer(None)
    asked = config()
    found["class"] = ECConnectorFactory.get_connector_class(asked.ec_transfer_config).__module__
    del transfer["ec_connector_module_path"]
    for name, extra in {"path": transfer, "option": {**kit.transfer(None, brokr="x")}}.items():
        try:
            asked = config(ec_transfer_config=extra)
            from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

            ECConnectorFactory.create_connector(asked, ECConnectorRole.SCHEDULER)
        except ValueError as error:
            found[name] = str(error)
    return found


def broken(config: Any) -> list[Any]:
    """What vLLM's scheduler sees of errors in our half: nothing."""
    from types import SimpleNamespace

    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

    from mmbroker.adapters.vllm.connector import Loaded, MMBrokerConnector

    def breaks(*args: Any) -> Any:
        raise RuntimeError("a test has ordered so")

    one = MMBrokerConnector(config(), ECConnectorRole.SCHEDULER)
    half: Any = one.scheduler
    half.loaded = half.request_finished = half.forgotten = breaks
    request = SimpleNamespace(
        request_id="r", mm_features=[]
    )  # of no use to anyone: nobody has a last picture
    seen = [one.ensure_cache_available(request, 0), sorted(one.take_unavailable_requests())]
    one.update_connector_output(SimpleNamespace(ec_connector_worker_meta=Loaded(["ab" * 32])))
    one.forgotten()
    seen.append(one.request_finished(request))
    one.shutdown()
    return seen


def reloaded(seams: Any) -> str:
    """What it says to whoever would replace weights while the engine runs."""
    from vllm.v1.worker.gpu_worker import Worker

    seams.keep_weights()
    try:
        Worker.reload_weights(object(), weights_path="elsewhere")
    except RuntimeError as error:
        return str(error)
    return ""


def taken_apart() -> dict[str, bool]:
    """Items of several kinds of fields, there and back; prompt updates of several kinds."""
    import torch
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem
    from vllm.multimodal.processing.processor import (
        PromptIndexTargets,
        PromptUpdateDetails,
        ResolvedPromptUpdate,
        UpdateMode,
    )

    from mmbroker.adapters.vllm import items
    from mmbroker.proto.reference import Reference

    pixels, grid = torch.rand(64, 1176), torch.tensor([[1, 8, 8]])
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        "scale": MultiModalFieldConfig.shared("image", 1),
    }
    values = {"pixel_values": pixels, "image_grid_thw": grid, "scale": torch.tensor(2.0)}
    item = MultiModalKwargsItem({name: fields[name].build_elems(name, values[name])[0] for name in values})

    def update(target: Any, mask: bool) -> Any:
        full = [7, 8, 8, 8, 9]
        content = PromptUpdateDetails.select_token_id(full, 8) if mask else PromptUpdateDetails(full)
        return ResolvedPromptUpdate("image", 0, UpdateMode.REPLACE, target, content)

    plain = [update([5], False), update([5, 6], True)]
    taken = items.apart(item, plain)
    assert taken is not None
    head = items.read_head(taken.head)
    back = items.updates_of(head, "image")
    reference = Reference(bytes(16), 1, 2, 3, bytes(32), "float32", (64, 1176), pixels.nbytes)

    class Use:
        tensors = taken.tensors

        def __enter__(self) -> Use:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    class Table:
        def take(self, ref: Any) -> Use:
            assert Reference.from_wire(ref) == reference
            return Use()

    whole = items.whole(items.referring(head, reference), Table())  # type: ignore[arg-type]
    bare = items.bare(head, frozenset({"image_grid_thw"}))
    return {
        "same fields": whole == item,
        "only pixels travel": [t.nbytes for t in taken.tensors] == [pixels.nbytes] and len(taken.head) < 4096,
        "same updates": [(u.target, u.content.full) for u in back]
        == [(u.target, u.content.full) for u in plain],
        "same mask": torch.equal(
            back[1].content.is_embed(back[1].content.full), torch.tensor([False, True, True, True, False])
        ),
        "bare": bare is not None and dict(bare) == {"image_grid_thw": item["image_grid_thw"]},
        "nothing to go by": items.bare(head, frozenset()) is None,
        "large metadata": items.bare(head, frozenset({"pixel_values"})) is None,
        "code in a target": items.apart(item, [update(PromptIndexTargets.start(), False)]) is None,
    }


def unknown(config: Any, settings: Any, seams: Any) -> dict[str, Any]:
    """The same on a version that nobody has tested."""
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
    from vllm.renderers import base

    from mmbroker.adapters.vllm import connector

    said: list[str] = []
    connector.logger.warning = lambda text, *rest: said.append(text % rest)  # type: ignore[method-assign]
    settings.VERSIONS = ("9.9.9",)
    asked = config()
    halves = [connector.MMBrokerConnector(asked, role) for role in ECConnectorRole]
    before = base.processor_cache_from_config
    base.processor_cache_from_config = original = before.__wrapped__
    seams.install()
    return {
        "said": said,
        "hooked": base.processor_cache_from_config is not original,
        "serves": any(half.scheduler or half.worker for half in halves),
        "waits": not halves[0].ensure_cache_available(None, 0) or halves[0].has_cache_item("ab" * 32),
    }


if __name__ == "__main__":
    main()
