"""Rerankers over all families: scores that depend on the pair alone, and exports that other programs score alike."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

from ranker.data.collection import Collection, Doc, MemoryDocs, Splits
from ranker.data.datamodule import RankData
from ranker.data.options import BatchOptions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.encoders.loading import load_encoder
from ranker.errors import CheckpointError, ConfigError
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT
from ranker.release.programs import program_of
from ranker.release.usage import model_use
from ranker.training.soundness import check_scores
from tests.zoo.outcomes import ONE_BY_ONE, OUTCOMES, REFUSED, TRAINED
from tests.zoo.rows import SAME_QUERY, encode, largest_difference, rank_batch
from tests.zoo.texts import DOCS, QUERIES

pytest.importorskip("sentence_transformers")
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer


def monobert(encoder) -> MonoBERT:
    """A reranker whose head is far from its small random start, as after training."""
    torch.manual_seed(0)
    scorer = MonoBERT(encoder).eval()
    with torch.no_grad():
        for name, weight in scorer.named_parameters():
            if not name.startswith("encoder."):
                weight.mul_(10) if weight.ndim > 1 else weight.add_(0.3)
    return scorer


def scores_of(scorer: MonoBERT, pairs) -> torch.Tensor:
    with torch.no_grad():
        return scorer(rank_batch(encode(scorer.encoder.tokenizer, pairs)))[0]


def batch_size(family: str) -> int:
    """The other program's batch size: 1 if its scores depend on the padding of a batch."""
    return 1 if family in ONE_BY_ONE else 4


class Saved(NamedTuple):
    scorer: MonoBERT
    scores: torch.Tensor
    folder: object


@pytest.fixture(scope="module")
def saved(encoder, tmp_path_factory) -> Callable[[str], Saved]:
    """A family's reranker, its scores of one query's docs and the folder that it was saved to."""
    root, done = tmp_path_factory.mktemp("saved"), {}

    def get(family: str) -> Saved:
        if family not in done:
            scorer = monobert(encoder(family))
            done[family] = Saved(scorer, scores_of(scorer, SAME_QUERY), root / family)
            scorer.save(root / family, 160)
        return done[family]

    return get


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_rank_is_refused_in_one_line(family, checkpoint):
    with pytest.raises((CheckpointError, ConfigError)) as refused:
        monobert(load_encoder(str(folder := checkpoint(family))))
    message = str(refused.value)
    assert message.startswith(f"{folder}: {REFUSED[family]}") and "\n" not in message and len(message) < 400


@pytest.mark.parametrize("family", TRAINED)
class TestScores:
    def test_a_score_depends_on_its_pair_alone(self, family, saved, record_property):
        scorer, together, _ = saved(family)
        apart = torch.cat([scores_of(scorer, [pair]) for pair in SAME_QUERY])
        spread = float(together.std())
        assert spread > 1e-3  # the head's weights were made larger; 1e-6 would be noise
        worst = largest_difference(apart, together)
        record_property("worst", worst)
        assert worst <= min(1e-5, 1e-4 * spread)

    def test_a_saved_model_scores_alike_to_the_bit(self, family, saved):
        _, scores, folder = saved(family)
        assert scores_of(MonoBERT.load(folder).eval(), SAME_QUERY).equal(scores)

    def test_a_cross_encoder_scores_the_saved_model_alike(self, family, saved, record_property):
        _, scores, folder = saved(family)
        assert (folder / "modules.json").is_file() != OUTCOMES[family].own_export
        model = CrossEncoder(str(folder), device="cpu", activation_fn=torch.nn.Identity())
        theirs = torch.from_numpy(model.predict(SAME_QUERY[:-1], batch_size=batch_size(family)))
        worst = largest_difference(theirs, scores[:-1])
        record_property("worst", worst)
        assert worst <= 1e-4


def similarities(scorer, cache) -> torch.Tensor:
    """Scores [queries, docs] through the token stores and collators of a search."""
    docs = MemoryDocs(Doc(f"d{i}", text) for i, text in enumerate(DOCS))
    collection = Collection("zoo", docs, {f"q{i}": text for i, text in enumerate(QUERIES)}, {})
    inputs, limits = ScorerInputs.of(scorer), TextLimits(*(scorer.text_limits or (40, 100)))
    collator = RankData(Splits(None, None, {}), inputs, BatchOptions(), limits, cache_dir=cache).collator(collection)
    with torch.no_grad():
        queries = scorer.eval().encode_queries(collator.query_batch(np.arange(len(QUERIES))))
        return scorer.score_block(queries, scorer.encode_docs(collator.doc_batch(np.arange(len(DOCS)))))


def compare(family, scorer, reads, folder) -> float:
    """Save a scorer, load it here and in the other program, and return the largest difference from the latter."""
    query, doc = scorer.layouts()
    ours = similarities(scorer, folder / "cache")
    assert ours.std() > 1e-3
    scorer.save(folder / "model", 100 + doc.num_added, 40 + query.num_added)
    assert similarities(type(scorer).load(folder / "model"), folder / "cache").equal(ours)
    model, size = reads(str(folder / "model"), device="cpu"), batch_size(family)
    queries, docs = model.encode_query(QUERIES, batch_size=size), model.encode_document(DOCS, batch_size=size)
    return largest_difference(model.similarity(queries, docs).cpu().float(), ours)


@pytest.mark.parametrize("family", TRAINED)
def test_a_sentence_transformer_compares_texts_alike(family, encoder, tmp_path, record_property):
    torch.manual_seed(0)
    scorer = DPR(encoder(family), temperature=1.0, query_prompt="query: ", doc_prompt="passage: ")
    worst = compare(family, scorer, SentenceTransformer, tmp_path)
    record_property("worst", worst)
    assert worst <= 1e-5


@pytest.mark.parametrize("family", [family for family in TRAINED if OUTCOMES[family].multi_vector])
def test_a_multi_vector_encoder_compares_texts_alike(family, encoder, tmp_path, record_property):
    """Queries are longer than all windows; the expansion has no key in EmbeddingGemma's window, and one in the others'.

    Gemma 2 and T5Gemma give a token without a key the mean of all columns in transformers, also of padding.
    """
    torch.manual_seed(0)
    scorer = ColBERT(encoder(family), projection=16, query_length=50, mask_punctuation=False)
    worst = compare(family, scorer, MultiVectorEncoder, tmp_path)
    record_property("worst", worst)
    assert worst <= 1e-5


def test_a_family_whose_table_cannot_be_extended_says_so(checkpoint):
    with pytest.raises(ConfigError, match="the embeddings of ibert models can't be extended"):
        ColBERT(load_encoder(str(checkpoint("ibert"))))


@pytest.mark.parametrize("family", ["convbert", "fnet"])
def test_another_program_scores_one_pair_at_a_time_where_padding_changes_scores(family, saved):
    """So `ranker export` compares them, and its README says so."""
    _, scores, folder = saved(family)
    ours = scores[:-1].numpy()
    np.testing.assert_allclose(program_of(folder, batch=1)(SAME_QUERY[:-1]), ours, rtol=0, atol=1e-5)
    assert np.abs(program_of(folder)(SAME_QUERY[:-1]) - ours).max() > 1e-4
    facts = {"folder_type": "classifier", "labels": 1, "prompt": False}
    assert ["batch_size=1" in "".join(model_use(facts | {"alone": alone})) for alone in (True, False)] == [True, False]


@pytest.mark.parametrize("family", ["xlnet", "gpt2", "roberta"])
def test_transformers_pads_where_the_tokenizer_says(family, saved):
    """XLNet's classifier reads the last column, so its rows are padded on the left."""
    _, scores, folder = saved(family)
    np.testing.assert_allclose(program_of(folder)(SAME_QUERY[:-1]), scores[:-1].numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("family", "reached"), [("convbert", True), ("mobilebert", True), ("bert", False)])
def test_filling_that_reaches_tokens_that_do_not_attend_to_it_is_named(family, reached, checkpoint, caplog):
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING):
        check_scores(ColBERT(load_encoder(str(checkpoint(family))), projection=16))
    assert ("filling of a query still changes" in caplog.text) == reached
