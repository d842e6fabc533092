"""A program that uses `sglang.Engine`: prints, as JSON, what it answers to pictures in three forms.

Run as a process of its own: MODEL on the command line, everything else from the environment.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    import sglang
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry
    from transformers import AutoProcessor

    from mmbroker.demo import pictures

    engine = sglang.Engine(
        model_path=sys.argv[1],
        device="cpu",
        attention_backend="torch_native",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        grammar_backend="none",
        max_total_tokens=8192,
        context_length=4096,
        mem_fraction_static=0.1,
        sleep_on_idle=True,
        log_level="info",
    )
    prompt = "<|vision_start|><|image_pad|><|vision_end|>What is in this picture?"
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    picture = pictures.generated(3, 280, 196)

    def answer(**request: Any) -> list[str]:
        answers = engine.generate(sampling_params=sampling, **request)
        return [one["text"] for one in (answers if isinstance(answers, list) else [answers])]

    processor = AutoProcessor.from_pretrained(sys.argv[1])
    done = processor(images=[picture], text=[prompt], return_tensors="pt")
    ids = done["input_ids"][0].tolist()
    torch.manual_seed(0)
    embedding = torch.randn(ids.count(processor.image_token_id), 64, dtype=torch.bfloat16)
    grid = {"image_grid_thw": done["image_grid_thw"]}
    results = {
        "picture": answer(prompt=prompt, image_data=[picture]),
        "batch": answer(prompt=[prompt, prompt], image_data=[[picture], [pictures.generated(4, 140, 140)]]),
        "processed": answer(input_ids=ids, image_data=[{**done, "format": "processor_output"}]),
        "embedded": answer(
            input_ids=ids, image_data=[{"feature": embedding, "format": "precomputed_embedding", **grid}]
        ),
        "hooks": sorted(HookRegistry._patched),
        "transport": engine.server_args.mm_feature_transport,
    }
    engine.shutdown()
    with open(os.environ["RESULTS"], "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
