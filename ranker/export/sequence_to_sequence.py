"""Sequence-to-sequence models as rerankers: transformers' `ForConditionalGeneration` of T5's families.

`mono_t5.json` beside the weights holds the words, `prompt.json` the prompt. The score is the difference of two words'
logits, or the logit of one word, at the decoder's first step over the filled prompt, which is tokenized as one text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM

from ranker.encoders.decoder_step import DecoderStep, whole_config
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.loading import load_encoder
from ranker.encoders.model_folder import read_object
from ranker.errors import CheckpointError
from ranker.export._module_weights import write_tokenizer
from ranker.export._modules import write_json
from ranker.export._prompt import read_prompt, write_prompt

SCORER = "ranker.models.mono_t5.MonoT5"
OWN_FILE = "mono_t5.json"
WHOLE = ("T5", "MT5", "UMT5", "LongT5")  # before `ForConditionalGeneration`


def recognises(folder: Path) -> bool:
    """Whether a folder is a whole sequence-to-sequence model of T5's families, such as monoT5's."""
    names = read_object(folder / "config.json").get("architectures")
    return isinstance(names, list) and names in [[f"{name}ForConditionalGeneration"] for name in WHOLE]


def write(
    folder: Path, encoder: Encoder, head: DecoderStep, max_tokens: int, prompt: str, words: tuple[str, str | None]
) -> None:
    """Write the weights, the tokenizer, the prompt and the words.

    Args:
        folder: Where to write.
        encoder: The encoder.
        head: The decoder and the output matrix.
        max_tokens: Longest row; stored with the tokenizer.
        prompt: The template, with its instruction.
        words: The words for a relevant doc and for a doc that is not relevant.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = whole_config(encoder)
    config.dtype = encoder.model.dtype
    with torch.device("meta"):
        whole = AutoModelForSeq2SeqLM.from_config(config)
    state = dict(encoder.model.state_dict()) | head.output_state()
    if not head.tied:  # otherwise the library would leave the output matrix out
        whole.lm_head.weight = torch.nn.Parameter(torch.empty_like(whole.lm_head.weight))
    dtype = encoder.model.dtype
    whole.save_pretrained(folder, state_dict={name: value.to(dtype).contiguous() for name, value in state.items()})
    if not head.tied:  # older versions of transformers read this key; newer ones compare the weights
        path = folder / "config.json"
        write_json(path, read_object(path) | {"tie_word_embeddings": False})
    write_tokenizer(folder, encoder, max_tokens)
    write_prompt(folder, prompt)
    write_json(folder / OWN_FILE, {"true_word": words[0], "false_word": words[1]})


def read(folder: Path, execution: Execution) -> tuple[Encoder, dict[str, Any]]:
    """Read a folder that `write` or transformers wrote.

    Returns:
        The encoder, and the other arguments of `MonoT5`; for a folder of transformers, only those that it states.

    Raises:
        CheckpointError: The folder lacks a word or the prompt, or has another key.
    """
    stored = read_object(folder / OWN_FILE)
    if stored and (sorted(stored) != ["false_word", "true_word"] or read_prompt(folder) is None):
        raise CheckpointError(
            f"{folder}: expected {OWN_FILE} with true_word and false_word, and a prompt; got {', '.join(stored)}"
        )
    return load_encoder(str(folder), **vars(execution)), stored
