"""Pooling modules of sentence-transformers folders."""

from __future__ import annotations

from typing import Any

from ranker.errors import CheckpointError
from ranker.export._modules import StoredModule

# pooling -> the name in sentence-transformers (value of `pooling_mode`, since 5.7), and the older key
POOLING_NAMES = {
    "cls": ("cls", "pooling_mode_cls_token"),
    "mean": ("mean", "pooling_mode_mean_tokens"),
    "max": ("max", "pooling_mode_max_tokens"),
    "last": ("lasttoken", "pooling_mode_lasttoken"),
    "weightedmean": ("weightedmean", "pooling_mode_weightedmean_tokens"),
}


def pooling_config(dim: int, pooling: str, pools_prompt: bool = True) -> dict[str, Any]:
    """Return the configuration of a Pooling module.

    Args:
        dim: Size of a state.
        pooling: A key of `POOLING_NAMES`.
        pools_prompt: Whether the tokens of a prompt are pooled with those of the text.
    """
    modes = {key: name == pooling for name, (_, key) in POOLING_NAMES.items()}
    return {"word_embedding_dimension": dim, **modes, "include_prompt": pools_prompt}


def read_pooling(module: StoredModule) -> str:
    """Return the pooling of a configuration, in sentence-transformers' older or newer form; `mean` if it names none.

    Raises:
        CheckpointError: It names an unknown pooling, or several, which sentence-transformers concatenates.
    """
    config = module.config
    if "pooling_mode" in config:
        chosen = config["pooling_mode"] if isinstance(config["pooling_mode"], list) else [config["pooling_mode"]]
    else:
        chosen = [key for key, on in config.items() if key.startswith("pooling_mode_") and on] or ["mean"]
    names = [pooling for pooling, known in POOLING_NAMES.items() if chosen and chosen[0] in known]
    if len(chosen) != 1 or not names:
        raise CheckpointError(f"{module.folder}: expected one of {', '.join(POOLING_NAMES)} as pooling, got {chosen}")
    return names[0]
