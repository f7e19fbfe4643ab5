"""Choose the prompts and instructions for a source's texts: the model's, those of a set of a mix, or each query's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ranker.config.sets import PROMPT_KEYS
from ranker.data.collection import Splits
from ranker.data.instructions import Instructed, opened
from ranker.data.scorer_inputs import ScorerInputs
from ranker.errors import ConfigError
from ranker.models.interface import Scorer
from ranker.passages.windowed import scorer_of_windows


def has_instructions(splits: Splits) -> bool:
    """Return whether each query of a source has its own instruction.

    Args:
        splits: The loaded splits of the source.
    """
    return any(
        part is not None and part.instructions is not None
        for part in (splits.train, splits.val, *splits.tests.values())
    )


def inputs_of(scorer: Scorer, node: Any, model: Any, by_query: bool = False) -> ScorerInputs:
    """Return the scorer's inputs for a source's texts, with the prompts that apply to them.

    Args:
        scorer: The scorer.
        node: The source's node; its prompts and instruction replace the model's. None: there is no node.
        model: The `model` node of the training, whose templates still contain `{instruction}`; may be empty.
        by_query: Whether each query of the source has its own instruction.

    Raises:
        ConfigError: The model has no such prompt; or there is an instruction, but no prompt contains `{instruction}`.
    """
    inputs = ScorerInputs.of(scorer)
    own = {key: node[key] for key in PROMPT_KEYS if node is not None and node.get(key) is not None}
    if not own and not by_query:
        return inputs
    given: dict[str, Any] = {key: own.get(key, (model or {}).get(key)) for key in PROMPT_KEYS}
    if by_query and own.get("instruction") is not None:
        raise ConfigError(
            "instruction: expected null for a set whose queries have instructions of their own, got "
            f"{own['instruction']!r}"
        )
    pairs, inner = scorer.reads == "pairs", scorer_of_windows(scorer)
    prompted: Any = getattr(inner, "prompted_layout" if pairs else "prompted_layouts", None)
    wrong = [key for key in own if key in (("query_prompt", "doc_prompt") if pairs else ("prompt",))]
    if prompted is None or wrong:
        raise ConfigError(
            f"{', '.join(wrong or own or ['instruction'])}: expected null for {type(inner).__name__}, which has no "
            "such prompt"
        )
    if not model and not (own.keys() & {"prompt", "query_prompt"}):
        raise ConfigError(
            "checkpoint: expected a run folder, whose configuration has the prompt with {instruction}, because "
            "queries or sets have their own instructions; got a model without a configuration"
        )
    between = None
    if by_query:
        key = "prompt" if pairs else "query_prompt"
        given[key] = prompted.__self__.default_prompt if given[key] is None and pairs else given[key]
        given[key], between = opened(given[key], key)
        given["instruction"] = ""
    if pairs:
        layout = prompted(given["prompt"], given["instruction"], (model or {}).get("chat", "auto"))
        inputs = replace(inputs, pair=layout)
    else:
        queries, docs = (given[key] or "" for key in ("query_prompt", "doc_prompt"))
        inputs = replace(inputs, layouts=prompted(queries, docs, given["instruction"] or ""))
    return inputs if between is None else replace(inputs, instructed=Instructed(between))
