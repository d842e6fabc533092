"""A tiny Qwen2.5-VL with random weights, made on the spot: configuration, tokenizer, processor, weights. No download.

Run as a program (`python -m mmbroker.demo.model DIRECTORY`), because that loads transformers and torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from mmbroker.proto.errors import BrokerError

#: Part of the directory's name: a changed model must not be mistaken for the one that is there.
_EDITION: Final = 1

_SPECIAL: Final = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
_CORPUS: Final = (
    "You are a helpful assistant.",
    "system user assistant",
    "Describe the image in detail.",
    "What is in this picture? a cat and a dog",
)
_CHAT: Final = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PICTURES: Final = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "processor_class": "Qwen2_5_VLProcessor",
}


def tiny_model(head: int = 16) -> Path:
    """The model's directory in this environment; made by the first call, which takes some seconds.

    `head`: size of an attention head of its language model, a multiple of 16; engines differ in what they can run.
    """
    name = f"tiny-qwen2.5-vl-{_EDITION}" + (f"-{head}" if head != 16 else "")
    directory = Path(sys.prefix, "share", "mmbroker", name)
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=directory.parent))
        try:
            making = subprocess.run(
                [sys.executable, "-m", __name__, str(work), str(head)], capture_output=True, text=True
            )
            if making.returncode:
                raise BrokerError(f"the tiny model cannot be made:\n{making.stderr[-2000:]}")
            work.chmod(0o755)
            os.rename(work, directory)
        except OSError:
            if not directory.exists():  # else somebody else was quicker
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return directory


def make(directory: Path, head: int = 16, **vision: Any) -> None:
    """Write the model. `vision`: what its encoder shall have otherwise, as Qwen2.5-VL's configuration names it."""
    ids, vocabulary = _write_tokenizer(directory)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": "Qwen2_5_VLProcessor",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 32768,
            "additional_special_tokens": list(_SPECIAL[1:]),
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT,
        },
    )
    _write_json(directory / "chat_template.json", {"chat_template": _CHAT})
    (directory / "chat_template.jinja").write_text(_CHAT)
    _write_json(
        directory / "preprocessor_config.json", {**_PICTURES, "image_processor_type": "Qwen2VLImageProcessor"}
    )
    _write_json(
        directory / "video_preprocessor_config.json",
        {**_PICTURES, "video_processor_type": "Qwen2VLVideoProcessor"},
    )
    _write_weights(directory, ids, vocabulary, head, vision)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))


def _write_tokenizer(directory: Path) -> tuple[dict[str, int], int]:
    """The special tokens' ids, and the size of the vocabulary rounded up to 64."""
    import tokenizers

    lib: Any = tokenizers  # whose stubs say little
    tokenizer = lib.Tokenizer(lib.models.BPE())
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = lib.decoders.ByteLevel()
    alphabet = lib.pre_tokenizers.ByteLevel.alphabet()
    trainer = lib.trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS * 10, trainer)
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    return {token: tokenizer.token_to_id(token) for token in _SPECIAL}, -(
        -tokenizer.get_vocab_size() // 64
    ) * 64


def _write_weights(
    directory: Path, ids: dict[str, int], vocabulary: int, head: int, vision: dict[str, Any]
) -> None:
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": 4 * head,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "mrope_section": [head // 8, head * 3 // 16, head * 3 // 16],
            },
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "in_channels": 3,
            "out_hidden_size": 4 * head,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
            "hidden_act": "silu",
            **vision,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    model.save_pretrained(directory)


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
