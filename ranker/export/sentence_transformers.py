"""The folder layout of sentence-transformers: a chain of modules, each with its configuration and weights, read and written without it."""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import normalizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedTokenizerFast

from ranker.data.template import Template
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.fit import check_config, check_tokens
from ranker.encoders.loading import without_pooler
from ranker.encoders.model_folder import check_model_folder, read_json, read_object
from ranker.errors import CheckpointError
from ranker.files import leads_out

log = logging.getLogger(__name__)

# Texts that show whether a tokenizer looks across the seam of prompt and text.
SEAMS = ("", "apple river", "a", "The", "7", "é", "水", "(x)", "'s", "-", ":", "//", "##a", " a", "  a", "\na", "\ta")
ACTIVATIONS: dict[str, type[nn.Module]] = {"identity": nn.Identity, "tanh": nn.Tanh}


def with_prompt(tokenizer: PreTrainedTokenizerFast, single: Template, prompt: str) -> Template:
    """The layout of texts with a prompt, tokenized as sentence-transformers does: prompt and text are one string.

    Where a tokenizer treats both alike apart and together (WordPiece after a blank), the prompt's tokens are special
    tokens of the layout and token stores hold texts alone. Others look across the seam: byte-level BPE and
    SentencePiece join the blank to the next word. Then what follows the prompt's last special token is the layout's
    prefix, and token stores hold prefix and text.

    Args:
        tokenizer: The encoder's.
        single: The layout of a text without a prompt.
        prompt: May be empty.
    """
    if not prompt:
        return single

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]

    together = [ids(prompt + text) for text in SEAMS]
    if together == [ids(prompt) + ids(text) for text in SEAMS] and _splits_at_end(tokenizer, prompt):
        return single.with_prompt(ids(prompt))
    specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    end = max((prompt.rfind(token) + len(token) for token in specials if token in prompt), default=0)
    special, prefix = prompt[:end], prompt[end:]
    if together != [ids(special) + ids(prefix + text) for text in SEAMS]:
        log.warning(
            "prompt %r: the tokenizer treats texts after it in another way than by themselves; scores may differ from those of "
            "sentence-transformers",
            prompt,
        )
    columns = zip(*(ids(prefix + text) for text in SEAMS), strict=False)  # as long as the shortest
    return single.with_prompt(
        ids(special), prefix, sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    )


def _splits_at_end(tokenizer: PreTrainedTokenizerFast, prompt: str) -> bool:
    """Whether a piece of text that the model of the tokenizer sees ends with the prompt, whatever the vocabulary makes of it."""
    backend: Any = tokenizer.backend_tokenizer

    def pieces(text: str) -> list[str]:
        normal = backend.normalizer.normalize_str(text) if backend.normalizer is not None else text
        return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normal)]

    return backend.pre_tokenizer is not None and all(
        pieces(prompt + text) == pieces(prompt) + pieces(text) for text in SEAMS
    )


def is_layout(folder: Path) -> bool:
    """Whether a folder has this layout."""
    return (folder / "modules.json").is_file()


def write_json(path: Path, content: Any) -> None:
    """Write JSON; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Module:
    """One entry of modules.json: the class's last name, and the folder of its configuration and weights."""

    kind: str
    folder: Path

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return read_object(self.folder / "config.json")


def read_modules(folder: Path) -> dict[str, list[Module]]:
    """The chain of modules of each side: `{"query": [...], "document": [...]}`; equal lists where both sides share all.

    Raises:
        CheckpointError: modules.json is missing or starts with something that is neither a Transformer nor a Router.
    """
    if not is_layout(folder):
        raise CheckpointError(
            f"{folder}: expected modules.json of sentence-transformers' layout, got a folder without it"
        )
    try:
        return _sides(folder, read_json(folder / "modules.json"))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}: expected modules.json to list modules with path and type, got {error!r}"
        ) from error


def _sides(folder: Path, entries: Any) -> dict[str, list[Module]]:
    chain = [Module(entry["type"].rpartition(".")[2], _inside(folder, entry["path"])) for entry in entries]
    first, rest = chain[0], chain[1:]
    if first.kind == "Transformer":
        return {"query": chain, "document": chain}
    if first.kind not in ("Router", "Asym"):
        raise CheckpointError(f"{folder}: expected a Transformer or a Router as first module, got {first.kind}")
    router = read_object(first.folder / "router_config.json")
    if sorted(router.get("structure", {})) != ["document", "query"]:
        raise CheckpointError(
            f"{folder}: expected a router with the routes query and document, got {sorted(router.get('structure', {}))}"
        )
    return {
        route: [Module(router["types"][name].rpartition(".")[2], _inside(first.folder, name)) for name in names] + rest
        for route, names in router["structure"].items()
    }


def _inside(folder: Path, name: str) -> Path:
    """A module's folder, which a file names; it can't lie elsewhere."""
    if leads_out(name):
        raise CheckpointError(f"{folder}: expected the paths of its modules to stay inside it, got {name!r}")
    return folder / name


def read_encoder(folder: Path, execution: Execution) -> tuple[Encoder, dict[str, Any]]:
    """The transformer of a folder, without a pooler, and its sentence-transformers configuration."""
    check_model_folder(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    check_config(config, str(folder))
    model, info = AutoModel.from_pretrained(
        folder,
        config=config,
        output_loading_info=True,
        dtype=torch.float32,
        trust_remote_code=False,
        **without_pooler(config),
    )
    if info["missing_keys"]:
        raise CheckpointError(
            f"{folder}: expected all weights of the encoder, {', '.join(sorted(info['missing_keys']))} are missing"
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    settings = read_object(folder / "sentence_bert_config.json")
    if settings.get("do_lower_case"):
        _lower_case(tokenizer)
    encoder = Encoder(model, tokenizer, execution)
    check_tokens(encoder)
    return encoder, settings


def _lower_case(tokenizer: PreTrainedTokenizerFast) -> None:
    """Let the tokenizer lower its texts first, unless it does already."""
    backend: Any = tokenizer.backend_tokenizer
    own = backend.normalizer
    if own is None or own.normalize_str("A") != "a":
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([own] if own is not None else [])])


def text_limit(encoder: Encoder, config: dict[str, Any], key: str, template: Template) -> int:
    """Longest text of a side without special tokens: the side's own length, else `max_seq_length`, else the tokenizer's."""
    longest = (
        template.max_tokens or config.get(key) or config.get("max_seq_length") or encoder.tokenizer.model_max_length
    )
    return max(1, min(int(longest), encoder.max_tokens) - template.num_added)


def write_encoder(folder: Path, encoder: Encoder, max_tokens: int, extra: dict[str, Any]) -> None:
    """Write the transformer, its tokenizer and its sentence-transformers configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder.model.save_pretrained(folder)
    tokenizer = copy.deepcopy(encoder.tokenizer)
    tokenizer.model_max_length = max_tokens
    tokenizer.save_pretrained(folder)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False, **extra})


def read_dense(module: Module) -> tuple[nn.Linear, str]:
    """A Dense module's linear layer and its activation's name in `ACTIVATIONS`.

    Raises:
        CheckpointError: A residual, an unknown activation, or no weights.
    """
    config = module.config
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2].lower()
    if activation not in ACTIVATIONS or config.get("use_residual"):
        raise CheckpointError(
            f"{module.folder}: expected a Dense with activation Identity or Tanh and no residual, got {config}"
        )
    path = module.folder / "model.safetensors"
    if path.is_file():
        state = load_file(path)
    elif (module.folder / "pytorch_model.bin").is_file():
        state = torch.load(module.folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    else:
        raise CheckpointError(f"{module.folder}: expected model.safetensors or pytorch_model.bin, got neither")
    return linear_of(state["linear.weight"], state.get("linear.bias")), activation


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with these weights."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear


def write_dense(folder: Path, linear: nn.Linear, activation: str, extra: dict[str, Any] | None = None) -> None:
    """Write a Dense module."""
    names = {"identity": "torch.nn.modules.linear.Identity", "tanh": "torch.nn.modules.activation.Tanh"}
    write_json(folder / "config.json", {
        "in_features": linear.in_features, "out_features": linear.out_features, "bias": linear.bias is not None,
        "activation_function": names[activation], **(extra or {}),
    })  # fmt: skip
    save_file(
        {f"linear.{name}": value.detach().contiguous().cpu() for name, value in linear.named_parameters()},
        folder / "model.safetensors",
    )


def write_modules(
    folder: Path, modules: list[tuple[str, str]], prompts: dict[str, str], kind: str, similarity: str
) -> None:
    """Write modules.json from (path, dotted class) and config_sentence_transformers.json."""
    write_json(
        folder / "modules.json",
        [{"idx": i, "name": str(i), "path": path, "type": name} for i, (path, name) in enumerate(modules)],
    )
    write_json(
        folder / "config_sentence_transformers.json",
        {"model_type": kind, "prompts": prompts, "default_prompt_name": None, "similarity_fn_name": similarity},
    )
