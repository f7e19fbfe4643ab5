"""Language models as rerankers: transformers' `ForCausalLM`, or `ForSequenceClassification` with a linear head.

`lm_reranker.json` beside the weights holds the head and the words, `prompt.json` the prompt. The score is the
difference of two words' logits at the last token of the filled prompt, which is tokenized as one text.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ranker.encoders.adapters import adapter_weights
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.loading import load_encoder
from ranker.encoders.model_folder import ADAPTER, read_object
from ranker.encoders.native_head import has_native_head, padding_token_id
from ranker.encoders.word_head import WordHead, one_layer
from ranker.errors import CheckpointError
from ranker.export._module_weights import linear_of, write_tokenizer
from ranker.export._modules import write_json
from ranker.export._prompt import read_prompt, write_prompt
from ranker.export._sequence_classification import describe, is_classifier

SCORER = "ranker.models.lm_reranker.LMReranker"
OWN_FILE = "lm_reranker.json"


def recognises(folder: Path) -> bool:
    """Whether a folder is a language model with the words of a reranker, or a LoRA adapter of peft."""
    return (folder / OWN_FILE).is_file() or (folder / ADAPTER).is_file()


def stored_head(encoder: Encoder) -> nn.Linear | None:
    """Return the trained linear head beside an encoder's weights or adapter; None if there is none with one label."""
    if encoder.adapter is not None:
        stored = adapter_weights(encoder.model, Path(encoder.adapter))
        found = [value for name, value in stored.items() if ".lora_" not in name and value.shape == (1, encoder.dim)]
        return linear_of(found[0], None) if len(found) == 1 else None
    if encoder.source is None or not is_classifier(encoder.config) or encoder.config.num_labels != 1:
        return None
    whole = one_layer(encoder, copy.deepcopy(encoder.config), AutoModelForSequenceClassification)
    _, head = _head_of(whole)
    return head


def _head_of(whole: Any) -> tuple[str, nn.Linear]:
    """Return the linear layer outside of a classifier's encoder, and its name.

    Raises:
        CheckpointError: The classifier's head is something else.
    """
    inside = set(whole.base_model.modules())
    parts = [
        (name, part)
        for name, part in whole.named_modules()
        if part not in inside and next(part.children(), None) is None
    ]
    linear = [(name, part) for name, part in parts if isinstance(part, nn.Linear)]
    if len(linear) != 1 or any(
        next(part.parameters(), None) is not None for _, part in parts if not isinstance(part, nn.Linear)
    ):
        raise CheckpointError(
            f"model.head: expected a family whose classifier is a linear layer, got {whole.config.model_type}"
        )
    return linear[0]


def write(
    folder: Path, encoder: Encoder, head: WordHead | nn.Linear, max_tokens: int, prompt: str, words: tuple[str, str]
) -> None:
    """Write the weights, the tokenizer and the prompt.

    Args:
        folder: Where to write.
        encoder: The encoder.
        head: Its head.
        max_tokens: Longest row; stored with the tokenizer.
        prompt: The template, with its instruction.
        words: The words for a relevant doc and for a doc that is not relevant.

    Raises:
        CheckpointError: The head is linear, and transformers has no classifier of the family.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(head, WordHead):
        write_weights(folder, encoder, AutoModelForCausalLM, head.output_state())
    else:
        write_classifier(folder, encoder, head.weight)
    write_tokenizer(folder, encoder, max_tokens)
    write_prompt(folder, prompt)
    kind = "yes_no" if isinstance(head, WordHead) else "linear"
    write_json(folder / OWN_FILE, {"head": kind, "yes_word": words[0], "no_word": words[1]})


def write_classifier(folder: Path, encoder: Encoder, weight: Tensor) -> None:
    """Write a sequence classification model with one label.

    Args:
        folder: Where to write.
        encoder: The encoder.
        weight: The head [1, dim]; for two words, the difference of their rows of the output matrix.

    Raises:
        CheckpointError: transformers has no such model of the family.
    """
    if not has_native_head(encoder.config):
        raise CheckpointError(
            f"model.head: expected yes_no, since transformers has no sequence classification model of "
            f"{encoder.config.model_type}; got linear"
        )
    write_weights(folder, encoder, AutoModelForSequenceClassification, {"": weight})


def write_weights(folder: Path, encoder: Encoder, auto_class: Any, head: dict[str, Tensor]) -> None:
    """Write config.json and the weights of an encoder and a head as a model of transformers.

    Args:
        folder: Where to write.
        encoder: The encoder.
        auto_class: `AutoModelForCausalLM` or `AutoModelForSequenceClassification`.
        head: Weights outside of the encoder, by name; for a classifier, its only such weight, with an empty name.
    """
    config = copy.deepcopy(encoder.config)
    config._attn_implementation = None
    config.architectures = None
    config.dtype = encoder.model.dtype
    if auto_class is AutoModelForSequenceClassification:
        describe(config, 1)
        config.get_text_config().pad_token_id = padding_token_id(encoder)
    with torch.device("meta"):
        whole = auto_class.from_config(config)
    state = {f"{whole.base_model_prefix}.{name}": value for name, value in encoder.model.state_dict().items()}
    for name, value in head.items():
        state[name or f"{_head_of(whole)[0]}.weight"] = value.detach().to(encoder.model.dtype)
    whole.save_pretrained(folder, state_dict={name: value.contiguous() for name, value in state.items()})


def read(folder: Path, execution: Execution) -> tuple[Encoder, dict[str, Any]]:
    """Read a folder that `write` wrote, or the folder of a LoRA adapter, which is added to its base.

    Returns:
        The encoder, and the other arguments of `LMReranker`.

    Raises:
        CheckpointError: The folder has no prompt.
    """
    stored = read_object(folder / OWN_FILE)
    if not stored and (folder / ADAPTER).is_file():
        classifier = read_object(folder / ADAPTER).get("task_type") == "SEQ_CLS"
        return load_encoder(str(folder), **vars(execution)), {"head": "linear" if classifier else "yes_no"}
    if sorted(stored) != ["head", "no_word", "yes_word"] or read_prompt(folder) is None:
        raise CheckpointError(
            f"{folder}: expected {OWN_FILE} with head, no_word and yes_word, and a prompt; got {', '.join(stored)}"
        )
    return load_encoder(str(folder), **vars(execution)), stored
