"""The folder that `ranker sizes` keeps for a pair of layers and size states its text lengths and its training."""

import json

import pytest
from omegaconf import OmegaConf

from ranker.checkpoint import load_scorer
from ranker.commands.sizes import save_smaller
from ranker.data.scorer_inputs import TextLimits
from ranker.encoders.loading import load_encoder
from ranker.files.checksums import SUMS, verify_folder
from ranker.models.dpr import DPR

TRAINED = {
    "model": {"_target_": "ranker.models.dpr.DPR", "matryoshka_layers": [1], "matryoshka_dims": [8, 16]},
    "encoder": {"_target_": "ranker.encoders.loading.load_encoder", "name": "tiny"},
    "max_query_tokens": 30,
    "max_doc_tokens": 90,
}


@pytest.mark.parametrize("trained", [TRAINED, {}])
def test_the_kept_model_reads_texts_of_the_same_lengths(tmp_path, trained):
    scorer, folder = DPR(load_encoder("tiny"), doc_prompt="a b "), tmp_path / "model"
    save_smaller(folder, scorer, (1, 16), OmegaConf.create(trained), TextLimits(30, 90))
    assert (folder / SUMS).is_file()
    verify_folder(folder)
    lengths = json.loads((folder / "sentence_bert_config.json").read_text())
    # [CLS] and [SEP] beside the text; "a" and "b" are two tokens before a doc
    assert (lengths["query_length"], lengths["document_length"]) == (32, 94)
    small = load_scorer(folder)
    assert small.text_limits == (30, 90) and small.dim == 16 and small.encoder.num_layers == 1
    assert (folder / "ranker.yaml").is_file() == bool(trained)
    if trained:
        described = OmegaConf.load(folder / "ranker.yaml")
        changed = {"matryoshka_layers": None, "matryoshka_dims": [8], "projection": 16}
        assert described.model == {**TRAINED["model"], **changed}
        assert (described.max_query_tokens, described.max_doc_tokens) == (30, 90)
