"""The prompt of a cross-encoder, in `prompt.json` beside the weights; formats of other programs have no template."""

from __future__ import annotations

import logging
from pathlib import Path

from ranker.encoders.encoder import Encoder
from ranker.encoders.model_folder import read_object
from ranker.export._modules import write_json

log = logging.getLogger(__name__)

FILE = "prompt.json"


def write_prompt(folder: Path, prompt: str | None) -> None:
    """Write a prompt, in which the instruction is filled in, and `{query}` and `{doc}` are not; None writes nothing."""
    if prompt is not None:
        write_json(folder / FILE, {"prompt": prompt})


def read_prompt(folder: Path) -> str | None:
    """Return the prompt in a folder; None if it has none."""
    prompt = read_object(folder / FILE).get("prompt")
    return None if prompt is None else str(prompt)


def trained_prompt(encoder: Encoder, wanted: str | None) -> str | None:
    """Return the prompt for a scorer: the configured one, else that of the training of its weights.

    A warning is logged if the prompt differs from that of the training.

    Args:
        encoder: The encoder; the folder of its weights, or of an added adapter, may have a prompt.
        wanted: The configured prompt; None: the configuration has none.
    """
    source = encoder.adapter or encoder.source
    stored = None if source is None else read_prompt(Path(source))
    if stored is not None and wanted not in (None, stored):
        log.warning("model.prompt: %s was trained with another prompt, %r; it gets %r", source, stored, wanted)
    return stored if wanted is None else wanted
