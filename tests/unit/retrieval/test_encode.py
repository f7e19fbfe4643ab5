"""Vectors on disk: their ids, shards, resumed encoding, and folders that are refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers.normalizers import BertNormalizer

from ranker.errors import CheckpointError, DataError
from ranker.retrieval.encode import Device, describe, encode_docs, encode_queries, scorer_hash
from ranker.retrieval.vector_folder import claim
from ranker.retrieval.vector_store import VectorStore


@pytest.fixture
def encode(small, data_of, tmp_path):
    def run(scorer, name, shard_docs=25, dtype="float32", worlds=((0, 1),), max_tokens=500, **changed):
        collator = data_of(scorer).collator(small)
        description = replace(
            describe(scorer, collator.docs, small.docs.fingerprint, 64, dtype, "32-true", shard_docs), **changed
        )
        claim(tmp_path / name, description)
        done = [
            encode_docs(
                scorer, collator, tmp_path / name, description, Device(rank=rank, world=world, max_tokens=max_tokens)
            )
            for rank, world in worlds
        ]
        return tmp_path / name, done, collator

    return run


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".lock" not in path.name
    }


@pytest.mark.parametrize("kind", ["dpr", "colbert"])
def test_pc62_every_id_has_the_vectors_of_its_own_text_once(encode, scorers, small, kind):
    scorer = scorers(kind)
    folder, done, collator = encode(scorer, "vectors")
    encoded = VectorStore(folder)
    assert done == [60]
    assert [doc_id.decode() for doc_id in encoded.doc_ids] == [doc.doc_id for doc in small.docs]
    for row in range(0, 60, 7):
        with torch.no_grad():
            alone = scorer.encode_docs(collator.doc_batch(np.array([row])))
        got = encoded.take(np.array([row]))
        torch.testing.assert_close(got.values, alone.values, rtol=0, atol=1e-5)
        assert (got.counts is None) == (kind == "dpr")
    whole = np.concatenate(list(encoded.chunks(7)))
    assert len(whole) == encoded.num_vectors == encoded.counts.sum()
    np.testing.assert_array_equal(encoded.take(np.arange(60)).values, whole)


def test_pc62_two_processes_write_the_bytes_of_one(encode, scorers):
    alone, _, _ = encode(scorers(), "alone")
    both, done, _ = encode(scorers(), "both", worlds=((0, 2), (1, 2)))
    assert done == [35, 25]  # shards 0 and 2, shard 1
    assert files(alone) == files(both)


def test_more_processes_than_shards(encode, scorers):
    _, done, _ = encode(scorers(), "many", worlds=((0, 5), (1, 5), (2, 5), (3, 5), (4, 5)))
    assert done == [25, 25, 10, 0, 0]


@pytest.mark.parametrize("kind", ["dpr", "colbert"])
def test_an_interrupted_encoding_resumes_and_gives_the_same_bytes(encode, scorers, kind):
    folder, _, _ = encode(scorers(kind), "whole")
    expected = files(folder)
    broken, _, _ = encode(scorers(kind), "broken")
    shutil.rmtree(broken / "shard-00001")
    shutil.rmtree(broken / "shard-00002")
    (broken / ".7.shard-00001.partial").mkdir()  # killed while it wrote this one
    (broken / ".7.shard-00001.partial" / "vectors.bin").write_bytes(b"half")
    with pytest.raises(DataError, match="expected 3 shards, shard-00001, shard-00002 missing; encode again"):
        VectorStore(broken)
    _, done, _ = encode(scorers(kind), "broken")
    assert done == [35]
    assert files(broken) == expected
    assert not list(broken.glob("*.partial"))


def test_half_precision_takes_half_the_room_and_rounds(encode, scorers):
    whole, half = (VectorStore(encode(scorers(), dtype, dtype=dtype)[0]) for dtype in ("float32", "float16"))
    assert half.num_bytes * 2 == whole.num_bytes
    np.testing.assert_allclose(np.concatenate(list(half.chunks())), np.concatenate(list(whole.chunks())), atol=1e-3)


def test_vectors_of_other_weights_tokenizer_or_pooling_are_refused(encode, scorers):
    encode(scorers(), "vectors")
    other = scorers()
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1
    cased = scorers()
    cased.encoder.tokenizer.backend_tokenizer.normalizer = BertNormalizer(lowercase=False)
    for scorer in (other, cased, scorers(pooling="cls"), scorers(query_prompt="query: "), scorers(projection=32)):
        said = "was computed with other weights, tokenizer or pooling: scorer: expected"
        with pytest.raises(CheckpointError, match=said):
            encode(scorer, "vectors")
    with pytest.raises(CheckpointError, match=r"is for another similarity|was computed with other"):
        encode(scorers(similarity="dot"), "vectors")
    with pytest.raises(CheckpointError, match="holds other docs"):
        encode(scorers(), "vectors", docs="other")
    with pytest.raises(CheckpointError, match=r"expected vectors of the same settings, got \{'dtype': 'float32'\}"):
        encode(scorers(), "vectors", dtype="float16")


def test_the_hash_of_a_scorer_is_that_of_its_copy_on_disk(scorers, tmp_path):
    for kind in ("dpr", "colbert"):
        scorer = scorers(kind)
        scorer.save(tmp_path / kind, 66, 18)
        back = type(scorer).load(tmp_path / kind)
        again = type(scorer).load(tmp_path / kind)
        assert scorer_hash(back) == scorer_hash(again) == scorer_hash(scorer)


def test_a_vector_that_is_not_finite_names_its_doc_and_leaves_no_shard(encode, scorers, tmp_path, small):
    scorer = scorers(similarity="dot")
    inner = scorer.encode_docs

    def poisoned(batch):
        vectors = inner(batch)
        vectors.values[batch.cu_seqlens.diff().argmax(), 0] = torch.nan
        return vectors

    scorer.encode_docs = poisoned
    with pytest.raises(DataError, match=r"expected finite vectors, got NaN or infinity for doc 'd\d+' in float32"):
        encode(scorer, "poisoned")
    assert not list((tmp_path / "poisoned").glob("shard-0000?"))
    scorer.encode_docs = lambda batch: replace(inner(batch), values=inner(batch).values * 1e6)
    with pytest.raises(DataError, match=r"in float16; look at the checkpoint, or set encode.dtype=float32"):
        encode(scorer, "large", dtype="float16")


def test_no_query_gives_no_vector(scorers, data_of, small):
    for kind, counts in (("dpr", None), ("colbert", [])):
        scorer = scorers(kind)
        found = encode_queries(scorer, data_of(scorer).collator(small), np.array([], dtype=np.int64), Device())
        assert found.values.shape == (0, scorer.dim)
        assert (None if found.counts is None else found.counts.tolist()) == counts


def test_a_query_whose_vector_is_not_finite_is_named(scorers, data_of, small):
    for kind in ("dpr", "colbert"):
        scorer = scorers(kind, projection=8)
        with torch.no_grad():
            scorer.projection[0].weight.fill_(torch.nan)
        with pytest.raises(DataError, match="for query 'q3'"):
            encode_queries(scorer, data_of(scorer).collator(small), np.array([3, 1]), Device())


def test_a_damaged_shard_is_named(encode, scorers):
    folder, _, _ = encode(scorers(), "vectors")
    with (folder / "shard-00001" / "vectors.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(
        DataError,
        match=r"shard-00001/vectors.bin: expected 3200 bytes, got 3201; the file is damaged; "
        r"delete .*shard-00001, it is built anew",
    ):
        VectorStore(folder)
    (folder / "encoded.json").write_text("{")
    with pytest.raises(DataError, match=r"expected a folder of vectors with a readable encoded.json"):
        VectorStore(folder)


def test_the_description_says_what_is_there(encode, scorers):
    folder, _, _ = encode(scorers("colbert"), "vectors")
    stored = json.loads((folder / "encoded.json").read_text())
    assert (stored["similarity"], stored["dim"], stored["several"], stored["num_docs"], stored["shard_docs"]) == (
        "cosine",
        8,
        True,
        60,
        25,
    )
