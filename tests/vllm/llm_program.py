"""`vllm.LLM` in a process of its own: takes its arguments, and then requests, as lines of JSON; answers likewise.

A request is a list of prompts, each a list of seeds of pictures or, where a seed is a pair, of a picture's identity and
its grid alone. The answer is, for each, its tokens and how likely they were; None for one that failed.
To ``"forget"``, vLLM forgets what it has encoded and prefilled.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


def picture(seed: int) -> Any:
    from PIL import Image

    side = 112 + 28 * (seed % 3)
    return Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(side * side * 3))


def prompt(seeds: list[Any]) -> dict[str, Any]:
    import torch

    text = f"<|im_start|>user\n{PICTURE * len(seeds)}Describe the image<|im_end|>\n<|im_start|>assistant\n"
    if any(isinstance(seed, list) for seed in seeds):
        names, grids = zip(*seeds, strict=True)
        return {
            "prompt": text,
            "multi_modal_data": {"image": {"image_grid_thw": torch.tensor(grids)}},
            "multi_modal_uuids": {"image": list(names)},
        }
    return {"prompt": text, **({"multi_modal_data": {"image": [picture(s) for s in seeds]}} if seeds else {})}


def answer(output: Any) -> Any:
    if output.finish_reason == "error":
        return None
    return [list(output.token_ids), round(output.cumulative_logprob, 4)]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    from vllm import LLM, SamplingParams

    sampling = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=0)
    llm = LLM(**json.loads(sys.stdin.readline()))
    answers.write('"ready"\n')
    for line in sys.stdin:
        asked = json.loads(line)
        if asked == "forget":
            llm.llm_engine.reset_encoder_cache()
            answers.write(json.dumps(llm.reset_prefix_cache()) + "\n")
            continue
        outputs = llm.generate([prompt(seeds) for seeds in asked], sampling, use_tqdm=False)
        told = [o.outputs[0] for o in outputs]
        answers.write(json.dumps([answer(one) for one in told]) + "\n")


if __name__ == "__main__":
    main()
