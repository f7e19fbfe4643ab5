"""Make a tiny random checkpoint of a family in the hub's format: `make("t5", folder)`. Seeded, offline, fast."""

import inspect
import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.zoo.families import FAMILIES, SIZES, Recipe
from tests.zoo.vocabularies import VOCABULARIES, tokenizer_json


def make(family: str, folder: Path) -> Path:
    """Write config.json, the weights and the tokenizer's files of a family; return the folder.

    Args:
        family: Key of `FAMILIES`.
        folder: The folder to write to.
    """
    recipe = FAMILIES[family]
    ids = _write_tokenizer(recipe, folder)
    config_class = getattr(transformers, recipe.config)
    known = inspect.signature(config_class).parameters
    options = {key: value for key, value in (SIZES | ids | recipe.options).items() if key in known}
    options |= {key: value | ids for key, value in options.items() if key in ("encoder", "decoder")}
    torch.manual_seed(0)
    model = getattr(transformers, recipe.weights)(config_class(**options))
    _spread(model)
    model.eval().save_pretrained(folder)
    return folder


def _write_tokenizer(recipe: Recipe, folder: Path) -> dict[str, int | None]:
    """Write the tokenizer's files; return the vocabulary's size and the ids of special tokens for the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer_config.json"
    name = recipe.tokenizer + ("Fast" if recipe.tokenizer.startswith("PreTrained") else "")
    stored = {"tokenizer_class": name, "model_input_names": list(recipe.inputs)}
    if not recipe.vocabulary:  # a tokenizer of characters has no vocabulary
        path.write_text(json.dumps(stored), encoding="utf-8")
        return {}
    roles = VOCABULARIES[recipe.vocabulary].roles
    backend = Tokenizer.from_str(tokenizer_json(recipe.vocabulary))
    names = {f"{role}_token": token for role, token in roles.items()}
    PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=160, **names).save_pretrained(folder)
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | stored), encoding="utf-8")
    tokenizer = getattr(transformers, name).from_pretrained(folder)  # some classes add tokens of their own
    ids = {f"{role}_token_id": backend.token_to_id(token) for role, token in roles.items()}
    size = -(-len(tokenizer) // 8) * 8  # tables of hub checkpoints have more rows than tokens
    return {"vocab_size": size, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None} | ids


def _spread(model: torch.nn.Module) -> None:
    """Make states depend on all weights and on the text, as in a trained model.

    Newly initialized matrices of 64 columns change a state only a little, and new biases and norms are constants, so a
    test would not notice if one of them were ignored.
    """
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.1)
