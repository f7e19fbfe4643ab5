"""PC2-12: for which pairs an exported cross-encoder gives the same scores in other programs."""

import logging

import numpy as np
import pytest
import torch

from ranker.data.collate import Collator
from ranker.data.collection import Candidates, Collection, Doc, MemoryDocs
from ranker.data.judged_groups import JudgedGroups
from ranker.data.pair_cuts import cut_otherwise, warn_of_other_cuts
from ranker.data.sampling import GroupOptions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.step_plan import StepPlan
from ranker.data.token_store import build_token_store
from ranker.data.training_steps import TrainSteps
from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_tokenizer
from ranker.models.monobert import MonoBERT

LENGTHS = [1, 2, 6, 7, 8, 9, 10, 13, 14, 15, 20, 29, 40]
WORDS = "ab cd ef gh ij kl mn op qr st"


def texts(prefix: str) -> dict[str, str]:
    """A text of each length, in words of one token."""
    return {f"{prefix}{length}": " ".join((WORDS.split() * 4)[:length]) for length in LENGTHS}


def collator_of(folder, pair: int, query: int, doc: int) -> Collator:
    stores = [
        build_token_store(
            iter(texts(name).items()), folder / f"{name}{pair}-{limit}", tiny_tokenizer(), limit, fingerprint=name
        )
        for name, limit in (("q", query), ("d", doc))
    ]
    return Collator.of(ScorerInputs(tiny_tokenizer(), "pairs", 512), *stores, TextLimits(query, doc, pair))


def grid() -> tuple[np.ndarray, np.ndarray]:
    rows = np.arange(len(LENGTHS))
    return np.repeat(rows, len(rows)), np.tile(rows, len(rows))


def ours(collator, queries, docs):
    made = collator.collate(queries, docs[:, None], np.zeros((len(docs), 1)), np.arange(len(docs)), 1.0).pairs
    return [part.tolist() for part in made.tokens.split(made.cu_seqlens.diff().tolist())]


@pytest.mark.parametrize(
    ("pair", "query", "doc"), [(20, 50, 50), (19, 50, 50), (20, 10, 50), (32, 50, 12), (32, 8, 12), (20, 9, 18)]
)
def test_pc2_12_the_promise_is_for_pairs_that_longest_first_cuts_alike(tmp_path, pair, query, doc):
    collator = collator_of(tmp_path, pair, query, doc)
    queries, docs = grid()
    other = cut_otherwise(collator, queries, docs)
    theirs = tiny_tokenizer()(
        [list(texts("q").values())[row] for row in queries], [list(texts("d").values())[row] for row in docs],
        truncation="longest_first", max_length=pair,
    )["input_ids"]  # fmt: skip
    mine = ours(collator, queries, docs)
    assert 0 < other.sum() < len(other)
    for number, (one, two) in enumerate(zip(mine, theirs, strict=True)):
        if not other[number]:
            assert one == two, (queries[number], docs[number])
        # of texts that fill their stores it is not known how long they are
        elif LENGTHS[queries[number]] < query and LENGTHS[docs[number]] < doc:
            assert one != two, (queries[number], docs[number])


def test_pc2_12_scores_of_sentence_transformers_are_equal_within_the_promise(tmp_path):
    cross = pytest.importorskip("sentence_transformers").CrossEncoder
    torch.manual_seed(0)
    scorer = MonoBERT(load_encoder("tiny")).eval()
    torch.nn.init.normal_(scorer.head.weight, std=1.0)
    scorer.save(tmp_path / "model", max_tokens=32)
    collator = collator_of(tmp_path, 32, 20, 50)
    queries, docs = grid()
    other = cut_otherwise(collator, queries, docs)
    with torch.no_grad():
        mine = scorer(collator.collate(queries, docs[:, None], np.zeros((len(docs), 1)), np.arange(len(docs)), 1.0))[
            :, 0
        ].numpy()
    pairs = [
        (list(texts("q").values())[query], list(texts("d").values())[doc])
        for query, doc in zip(queries, docs, strict=True)
    ]
    theirs = cross(str(tmp_path / "model"), device="cpu").predict(pairs)
    difference = np.abs(mine - theirs)
    assert 0 < other.sum() < len(other) and difference[~other].max() < 1e-5 < difference[other].max()


def test_pc2_12_training_pairs_outside_of_the_promise_are_counted(tmp_path, caplog):
    qrels = {"q15": {"d9": 1}, "q6": {"d9": 1}}
    run = Candidates.from_lists([(query_id, ["d9", "d29", "d2"], [3.0, 2.0, 1.0]) for query_id in qrels])
    collection = Collection("t", MemoryDocs(Doc(*item) for item in texts("d").items()), texts("q"), qrels, run)

    def warned(pair: int) -> str:
        caplog.clear()
        collator = collator_of(tmp_path, pair, 30, 50)
        sampler = JudgedGroups(collection, collator.queries, collator.docs, GroupOptions(num_docs=4))
        with caplog.at_level(logging.WARNING):
            warn_of_other_cuts(TrainSteps(StepPlan(len(sampler), 2, 1000), sampler, collator, 0, 1))
        return caplog.text

    # room for 20 tokens: q15 with d9 and with d29 is too long, and 15 is more than 10; q6 is shorter
    assert "model/: 2 of 6 training pairs are truncated differently by sentence-transformers' CrossEncoder" in warned(
        23
    )
    assert warned(60) == ""
