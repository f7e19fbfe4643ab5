"""A trained model, evaluated by the installed mteb on a task that this file defines."""

import numpy as np
import pytest
import torch

from ranker import Reranker
from ranker.encoders.loading import load_encoder
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT

mteb = pytest.importorskip("mteb", reason="needs the extra mteb")
pytrec_eval = pytest.importorskip("pytrec_eval")

QUERIES = {"q1": "the river", "q2": "apples in the autumn"}
DOCS = {
    "d1": "a river runs to the sea",
    "d2": "apples are picked",
    "d3": "the sea",
    "d4": "cold nights and short days in autumn",
}
QRELS = {"q1": {"d1": 1, "d3": 1}, "q2": {"d2": 1, "d4": 1}}
TOP_RANKED = {"q1": ["d3", "d2", "d1"], "q2": ["d1", "d2", "d3", "d4"]}


def task(task_type):
    """A task of mteb over these texts: `Retrieval` or `Reranking`."""
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    class Offline(AbsTaskRetrieval):
        metadata = TaskMetadata(
            type=task_type, name=f"Offline{task_type}", main_score="ndcg_at_10", description="", reference=None,
            dataset={"path": "none", "revision": "1"}, category="t2t", eval_splits=["test"], eval_langs=["eng-Latn"],
            date=None, dialect=None, domains=None, task_subtypes=None, license=None, annotations_creators=None,
            modalities=["text"], sample_creation=None, bibtex_citation="",
        )  # fmt: skip

        def load_data(self, *arguments, **options):
            split = {
                "queries": Dataset.from_list([{"id": key, "text": text} for key, text in QUERIES.items()]),
                "corpus": Dataset.from_list([{"id": key, "text": text, "title": ""} for key, text in DOCS.items()]),
                "relevant_docs": QRELS,
                "top_ranked": TOP_RANKED if task_type == "Reranking" else None,
            }
            self.dataset, self.data_loaded = {"default": {"test": split}}, True

    return Offline()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {}
    for model in (MonoBERT, DPR, ColBERT):
        folder = folders[model.__name__] = tmp_path_factory.mktemp(model.__name__)
        torch.manual_seed(0)
        prompts = {"query_prompt": "search: "} if model is DPR else {}
        scorer = model(load_encoder("tiny"), **prompts)
        for parameter in scorer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        scorer.save(folder, max_tokens=64)
    return folders


def ndcg(run):
    """Mean nDCG@10 by trec_eval."""
    values = pytrec_eval.RelevanceEvaluator(QRELS, {"ndcg_cut_10"}).evaluate(run)
    return np.mean([value["ndcg_cut_10"] for value in values.values()])


@pytest.mark.parametrize(
    ("model", "task_type"),
    [("MonoBERT", "Reranking"), ("ColBERT", "Reranking"), ("DPR", "Reranking"), ("DPR", "Retrieval")],
)
def test_mteb_measures_the_rankings_of_python(folders, model, task_type):
    from ranker.integrations.mteb import MtebCrossEncoder, MtebEncoder, load

    loaded = load(folders[model], accelerator="cpu", precision="32-true")
    assert isinstance(loaded, MtebEncoder if model == "DPR" else MtebCrossEncoder)
    result = mteb.evaluate(loaded, task(task_type), cache=None, show_progress_bar=False, co2_tracker=False)
    (scores,) = result.task_results[0].scores["test"]
    reranker = Reranker.load(folders[model], accelerator="cpu", precision="32-true")
    run = {
        query_id: {doc.doc_id: doc.score for doc in reranker.rank(query, {i: DOCS[i] for i in ids})}
        for query_id, query in QUERIES.items()
        for ids in [TOP_RANKED[query_id] if task_type == "Reranking" else DOCS]
    }
    assert scores["ndcg_at_10"] == pytest.approx(ndcg(run), abs=1e-4)
    assert ndcg(run) < 1  # another order would have another value


def test_the_revision_changes_with_the_weights(folders, tmp_path):
    from ranker.integrations.mteb import load

    torch.manual_seed(1)
    MonoBERT(load_encoder("tiny")).save(tmp_path / "model", max_tokens=64)
    options = {"name": "we/ours", "accelerator": "cpu"}
    metas = [load(path, **options).mteb_model_meta for path in (folders["MonoBERT"], tmp_path / "model")]
    assert [meta.name for meta in metas] == ["we/ours"] * 2 and metas[0].revision != metas[1].revision


def test_vectors_are_those_of_sentence_transformers(folders):
    from mteb.types import PromptType

    from ranker.integrations.mteb import load

    sentence_transformers = pytest.importorskip("sentence_transformers")
    theirs = sentence_transformers.SentenceTransformer(str(folders["DPR"]), device="cpu")
    ours = load(folders["DPR"], accelerator="cpu", precision="32-true")
    texts = [*DOCS.values(), ""]
    batches = [{"text": texts[:3]}, {"text": texts[3:]}]
    for prompt_type, encode in ((PromptType.query, theirs.encode_query), (PromptType.document, theirs.encode_document)):
        vectors = ours.encode(batches, prompt_type=prompt_type)
        np.testing.assert_allclose(vectors, encode(texts), atol=1e-5)
        np.testing.assert_allclose(ours.similarity(vectors, vectors), vectors @ vectors.T, atol=1e-6)
        np.testing.assert_allclose(ours.similarity_pairwise(vectors, vectors), np.ones(len(texts)), atol=1e-5)
