"""The prompt of a cross-encoder, in `prompt.json` beside the weights; formats of other programs have no template."""

from __future__ import annotations

import logging
from pathlib import Path

from ranker.data.template import Template
from ranker.encoders.encoder import Encoder
from ranker.encoders.model_folder import read_object
from ranker.export._modules import SETTINGS, is_cross_encoder, write_json

log = logging.getLogger(__name__)

FILE = "prompt.json"
# texts whose ends may merge with the text around them
PAIRS = (("the river", "a sea"), ("7 a.", "(x) is 8?"), ("é-", "é's"), ("水", "水:"), ("a...", "- b"))


def write_prompt(folder: Path, prompt: str | None) -> None:
    """Write a prompt, in which the instruction is filled in, and `{query}` and `{doc}` are not; None writes nothing."""
    if prompt is not None:
        write_json(folder / FILE, {"prompt": prompt})


def read_prompt(folder: Path) -> str | None:
    """Return the prompt in a folder; None if it has none."""
    prompt = read_object(folder / FILE).get("prompt")
    return None if prompt is None else str(prompt)


def folder_prompt(folder: Path, encoder: Encoder) -> str | None:
    """Return the prompt of a cross-encoder's folder: that in `prompt.json`, or sentence-transformers' default prompt.

    A warning is logged if a default prompt can't become a template with the same rows, and is left out.

    Args:
        folder: The folder.
        encoder: The encoder of the folder.

    Returns:
        The template with `{query}` and `{doc}`; None if there is no prompt.
    """
    stored = read_prompt(folder)
    if stored is not None or not is_cross_encoder(folder):
        return stored
    settings = read_object(folder / SETTINGS)
    prefix = str((settings.get("prompts") or {}).get(settings.get("default_prompt_name")) or "")
    if not prefix:
        return None
    layout = Template.of(encoder.tokenizer, 2)
    between = "".join(encoder.tokenizer.convert_ids_to_tokens(list(layout.specials[1])))
    prompt = f"{prefix}{{query}}{between}{{doc}}"
    one_segment = not encoder.reads_segments or (not any(layout.segments) and not layout.special_segments)
    if one_segment and as_prefix(encoder, prompt) == prefix:
        return prompt
    log.warning(
        "%s: its default prompt, %r, is left out, because no template has the same tokens and segments; scores differ "
        "from those of sentence-transformers",
        folder,
        prefix,
    )
    return None


def as_prefix(encoder: Encoder, prompt: str) -> str | None:
    """Return the text that sentence-transformers must put before a query so that its rows equal those of a prompt.

    Its cross-encoders put a prompt before the query, and the tokenizer's special tokens between query and doc. So the
    prompt must have these tokens between the two, as in `Find: {query}[SEP]{doc}`, and nothing after the doc.

    Args:
        encoder: The encoder.
        prompt: The template, with `{query}` and `{doc}` open.

    Returns:
        The text before the query; None: its rows would differ.
    """
    first, field, _ = prompt.partition("{query}")
    if not field or "{doc}" in first:
        return None

    def ids(*texts: str) -> list[int]:
        tokens: list[int] = encoder.tokenizer(*texts)["input_ids"]
        return tokens

    for query, doc in PAIRS:
        if ids(prompt.replace("{query}", query).replace("{doc}", doc)) != ids(first + query, doc):
            return None
    return first


def trained_prompt(encoder: Encoder, wanted: str | None) -> str | None:
    """Return the prompt for a scorer: the configured one, else that of the training of its weights.

    A warning is logged if the prompt differs from that of the training.

    Args:
        encoder: The encoder; the folder of its weights, or of an added adapter, may have a prompt.
        wanted: The configured prompt; None: the configuration has none.
    """
    source = encoder.adapter or encoder.source
    stored = None if source is None else folder_prompt(Path(source), encoder)
    if stored is not None and wanted not in (None, stored):
        log.warning("model.prompt: %s was trained with another prompt, %r; it gets %r", source, stored, wanted)
    return stored if wanted is None else wanted
