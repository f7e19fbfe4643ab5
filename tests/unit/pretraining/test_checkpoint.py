"""A pretrained encoder is no ranker: `checkpoint=` of such a run says where it belongs."""

import pytest

from ranker.checkpoint import load_scorer
from ranker.encoders.loading import load_encoder
from ranker.errors import CheckpointError
from ranker.models.dpr import DPR
from ranker.pretraining.objectives.mlm import MLM

STORED = "name: mlm\nobjective: {_target_: ranker.pretraining.objectives.mlm.MLM}\n"


@pytest.mark.parametrize("part", ["", "model"])
def test_a_masked_language_model_does_not_become_a_sparse_ranker(part, tmp_path):
    MLM().model(load_encoder("tiny")).save(tmp_path / "model", max_tokens=64)
    assert type(load_scorer(tmp_path / "model")).__name__ == "SPLADE"  # of another program it may be one
    (tmp_path / "config.yaml").write_text(STORED)
    with pytest.raises(CheckpointError, match=r"got a run of ranker pretrain .* encoder\.name="):
        load_scorer(tmp_path / part)


def test_a_pretrained_bi_encoder_ranks_as_it_is(tmp_path):
    DPR(load_encoder("tiny")).save(tmp_path / "model", max_tokens=64)
    (tmp_path / "config.yaml").write_text(STORED)
    assert isinstance(load_scorer(tmp_path / "model"), DPR)


def test_a_strange_configuration_beside_a_model_is_left_alone(tmp_path):
    DPR(load_encoder("tiny")).save(tmp_path / "model", max_tokens=64)
    (tmp_path / "config.yaml").write_text("- not ours\n")
    assert isinstance(load_scorer(tmp_path / "model"), DPR)
