"""Facts about families of encoders that the rest of the package asks for."""

from __future__ import annotations

from transformers import PretrainedConfig

# Families whose modules have BERT's names: embeddings.*, encoder.layer.*.attention.self.query ...
RAGGED_FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "electra")
# Families that count positions from pad_token_id + 1, so that 514 positions serve 512 tokens
SHIFTED_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer")


def position_shift(config: PretrainedConfig) -> int:
    """First position id of a sequence."""
    return (config.pad_token_id or 0) + 1 if config.model_type in SHIFTED_POSITIONS else 0


def max_positions(config: PretrainedConfig) -> int:
    """Longest sequence that a model of this configuration takes (PC-43: RoBERTa's 514 positions serve 512 tokens)."""
    return getattr(config, "max_position_embeddings", 10**6) - position_shift(config)
