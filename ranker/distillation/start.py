"""Initialize a student with a teacher's weights, and check that student and teacher can be compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from ranker.errors import ConfigError
from ranker.export._cut import layer_of

_LAYER = re.compile(r"\.(\d+)\.")
ENCODER = "encoder.model."


def start_from_layers(student: nn.Module, teacher: nn.Module, layers: Sequence[int]) -> int:
    """Copy a teacher's weights into a student where names and shapes agree (DistilBERT, arXiv:1910.01108, section 3).

    Args:
        student: Scorer whose weights are replaced in place.
        teacher: Scorer of the same family.
        layers: The teacher's layer for each layer of the student, from 1.

    Returns:
        Number of copied values.
    """
    weights, copied = teacher.state_dict(), 0
    total = len(layers)
    for name, tensor in student.state_dict().items():
        layer = layer_of(name.removeprefix(ENCODER), total) if name.startswith(ENCODER) else None
        source = name if layer is None else _LAYER.sub(f".{layers[layer] - 1}.", name, count=1)
        if source in weights and weights[source].shape == tensor.shape:
            tensor.copy_(weights[source])
            copied += tensor.numel()
    return copied


def check_fit(student: Any, teacher: Any, attention: bool) -> None:
    """Check that student and teacher read the same tokens, and that their layers can be compared.

    Args:
        student: The student's scorer.
        teacher: The teacher's scorer.
        attention: Whether attention distributions are compared.

    Raises:
        ConfigError: Student and teacher can't be compared.
    """
    for name, scorer in {"teacher": teacher, "student": student}.items():
        if scorer.reads != "pairs" or not hasattr(scorer, "read") or getattr(scorer, "reads_lists", False):
            raise ConfigError(
                f"distill.teacher: expected a cross-encoder as {name} that scores each doc alone (model=monobert), got "
                f"{type(scorer).__name__}"
            )
    if student.encoder.tokenizer.get_vocab() != teacher.encoder.tokenizer.get_vocab():
        raise ConfigError(
            "distill.teacher: expected a teacher with the student's vocabulary, got another; ranker label trains a "
            "student on scores of any model"
        )
    if student.pair_layout() != teacher.pair_layout():
        raise ConfigError(
            "distill.teacher: expected a teacher with the student's prompt, got another; set model.prompt"
        )
    if not attention:
        return
    for name, scorer in {"teacher": teacher, "student": student}.items():
        if scorer.encoder.ragged:
            raise ConfigError(
                f"distill.attention: expected 0, or a {name} on the padded path, the only one that returns attention, "
                "got one without padding; set encoder.ragged=false"
            )
    heads = [scorer.encoder.config.get_text_config().num_attention_heads for scorer in (student, teacher)]
    if heads[0] != heads[1]:
        raise ConfigError(
            f"distill.attention: expected as many heads as in the teacher, {heads[1]}, got {heads[0]}; set "
            "distill.attention=0"
        )
