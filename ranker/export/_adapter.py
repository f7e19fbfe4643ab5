"""Folders of adapters: peft's two files, all other trained weights, and the prompt.

`adapter_config.json` and `adapter_model.safetensors` are those of peft, so `PeftModel.from_pretrained` puts them on the
base. `trained.safetensors` holds the other trained weights, such as a linear head. The base is not in the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ranker.encoders.adapters import ADAPTER_FILE, adapter_state, load_adapter
from ranker.encoders.encoder import Encoder
from ranker.encoders.lora_base import base_fingerprint
from ranker.encoders.lora_layers import has_adapter
from ranker.encoders.model_folder import ADAPTER, read_object
from ranker.errors import CheckpointError
from ranker.export._module_weights import write_tokenizer
from ranker.export._modules import write_json
from ranker.export._prompt import write_prompt

TRAINED, BASE = "trained.safetensors", "base.json"


def has_adapters(scorer: Any) -> bool:
    """Whether a scorer's encoder has adapters."""
    return any(has_adapter(module) for module in scorer.modules())


def is_own(folder: Path) -> bool:
    """Whether `write` wrote a folder."""
    return (folder / ADAPTER).is_file() and (folder / BASE).is_file()


def write(folder: Path, scorer: Any, base: str, max_tokens: int) -> None:
    """Write a scorer's adapter, other trained weights, tokenizer and prompt.

    Args:
        folder: Where to write.
        scorer: The scorer.
        base: Folder or hub id of the base, for peft.
        max_tokens: Longest row; stored with the tokenizer.
    """
    encoder: Encoder = scorer.encoder
    # a language model's states are those of `ForCausalLM` without its first module
    language_model = getattr(scorer, "decoder_only", False)
    prefix = f"{encoder.model.base_model_prefix}." if language_model else ""
    state = {f"base_model.model.{prefix}{name}": value for name, value in adapter_state(encoder.model).items()}
    save_file(_on_cpu(state), folder / ADAPTER_FILE, metadata={"format": "pt"})
    config: Any = encoder.model.peft_config["default"]
    content = config.to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
    content["target_modules"] = sorted(config.target_modules)
    content["task_type"] = "CAUSAL_LM" if language_model else "FEATURE_EXTRACTION"
    write_json(folder / ADAPTER, content)
    write_json(folder / BASE, {"fingerprint": base_fingerprint(encoder)})
    others = _others(scorer)
    if others:
        save_file(_on_cpu(others), folder / TRAINED)
    write_tokenizer(folder, encoder, max_tokens)
    write_prompt(folder, getattr(scorer, "prompt", None))


def read(folder: Path, scorer: Any) -> None:
    """Load a folder that `write` wrote into a scorer that was built on the base of the training.

    Raises:
        CheckpointError: The scorer has another base, or the weights do not fit.
    """
    check_base(folder, scorer.encoder)
    load_adapter(scorer.encoder.model, folder)
    expected = _others(scorer)
    stored = load_file(folder / TRAINED) if (folder / TRAINED).is_file() else {}
    if {name: value.shape for name, value in stored.items()} != {name: value.shape for name, value in expected.items()}:
        raise CheckpointError(f"{folder / TRAINED}: expected {', '.join(expected) or 'none'}, got {', '.join(stored)}")
    with torch.no_grad():
        for name, value in stored.items():
            expected[name].copy_(value)


def check_base(folder: Path, encoder: nn.Module) -> None:
    """Check that an encoder has the weights of an adapter's base.

    Raises:
        CheckpointError: It has other weights.
    """
    stored = read_object(folder / BASE).get("fingerprint")
    if stored not in (None, base_fingerprint(encoder)):
        base = str(read_object(folder / ADAPTER).get("base_model_name_or_path"))[:200]
        raise CheckpointError(
            f"{folder}: expected the base that the adapter was trained on, {base!r}, got other weights; name the "
            "folder of that base in ranker.yaml"
        )


def _others(scorer: Any) -> dict[str, Tensor]:
    """Return the trained weights of a scorer that are not the adapter of its `encoder`."""
    inside = {id(weight) for weight in scorer.encoder.model.parameters()}
    return {
        name: weight for name, weight in scorer.named_parameters() if weight.requires_grad and id(weight) not in inside
    }


def _on_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in state.items()}
