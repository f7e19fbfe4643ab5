"""The compressed late-interaction index: packing, centroids, brute force, killed builds, changes, bad input."""

import importlib.util
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ranker.data.collection import Collection, Doc, MemoryDocs
from ranker.errors import CheckpointError, ConfigError, DataError
from ranker.files.folders import write_folder
from ranker.interactions.maxsim import TextVectors
from ranker.retrieval import engines, pipeline
from ranker.retrieval.encode import Device
from ranker.retrieval.indexes.fast_plaid import FastPlaid
from ranker.retrieval.indexes.flat import Flat
from ranker.retrieval.indexes.plaid import Plaid
from ranker.retrieval.indexes.warp import Warp
from ranker.retrieval.late import build, index
from ranker.retrieval.late.arrays import Effort
from ranker.retrieval.late.centroids import Centroids, default_count, train
from ranker.retrieval.late.index import LateIndex
from ranker.retrieval.late.residuals import Buckets, fit
from ranker.retrieval.late.tensor_search import TensorSearch
from ranker.retrieval.pipeline import EncodeOptions
from ranker.retrieval.vector_engine import LateOptions
from ranker.retrieval.vector_folder import Description, claim, shard_folder
from ranker.retrieval.vector_store import ShardWriter, VectorStore

HAS_NUMBA = importlib.util.find_spec("numba") is not None
DIM = 12


def stored(folder, docs=400, shard_docs=150, seed=0):
    """A folder of docs with 1 to 30 token vectors each; vectors have norm 1 and lie around 40 centres."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(40, DIM))
    counts = rng.integers(1, 31, docs).astype(np.int32)
    values = centres[rng.integers(40, size=counts.sum())] + 0.3 * rng.normal(size=(counts.sum(), DIM))
    values = (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)
    description = Description(f"scorer {seed}", "docs", docs, "cosine", DIM, True, "float32", "32-true", 30, shard_docs)
    folder.mkdir(exist_ok=True)
    claim(folder, description)
    for number, first in enumerate(range(0, docs, shard_docs)):
        some = slice(first, min(first + shard_docs, docs))
        with write_folder(shard_folder(folder, number)) as part:
            ids = np.array([f"d{row}".encode() for row in range(some.start, some.stop)])
            writer = ShardWriter(part, description, first, ids, counts[some])
            writer.vectors[:] = values[counts[: some.start].sum() : counts[: some.stop].sum()]
            writer.finish()
    return VectorStore(folder)


def asked(count=8, tokens=20, seed=1):
    """Queries of unit vectors; each token has a near copy in the second half."""
    rng = np.random.default_rng(seed)
    half = rng.normal(size=(count, tokens // 2, DIM))
    values = np.concatenate([half, half + 0.02 * rng.normal(size=half.shape)], axis=1).reshape(-1, DIM)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    return TextVectors(torch.from_numpy(values.astype(np.float32)), torch.full((count,), tokens))


def brute_force(store, query):
    """MaxSim of a query with every doc, by plain loops over docs."""
    return np.array([(store.of_doc(row) @ query.T).max(0).sum() for row in range(store.num_docs)])


def exact(store, queries):
    return [brute_force(store, part.numpy()) for part in queries.values.split(queries.counts.tolist())]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("late") / "vectors")


def test_residuals_are_packed_as_computed_by_hand():
    four = Buckets(torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([-2.0, -0.5, 0.5, 2.0]))
    numbers = torch.tensor([[-5.0, -0.5, 0.5, 5.0, 5.0, 0.5], [0.0, 1.0, -1.0, -1.1, 0.2, -3.0]])
    # row 1: 00 01 10 11 | 11 10, filled with zeros; row 2: 10 11 01 00 | 10 00; a number on a bound goes up
    assert four.pack(numbers).tolist() == [[0b00011011, 0b11100000], [0b10110100, 0b10000000]]
    assert four.unpack(four.pack(numbers), 6).tolist() == [
        [-2.0, -0.5, 0.5, 2.0, 2.0, 0.5],
        [0.5, 2.0, -0.5, -2.0, 0.5, -2.0],
    ]
    sixteen = Buckets(torch.arange(15) - 6.5, torch.arange(16) - 7.0)
    assert sixteen.pack(torch.tensor([[-7.0, 8.0, 3.2]])).tolist() == [[0x0F, 0xA0]]


def test_buckets_have_the_least_squared_error():
    points = np.repeat(np.array([-3.0, -1.0, 0.0, 2.0], dtype=np.float32), [5, 4, 4, 5])
    found = fit(points, 2)
    assert found.weights.tolist() == [-3.0, -1.0, 0.0, 2.0] and found.cuts.tolist() == [-2.0, -0.5, 1.0]
    # the best 4 levels for a normal distribution have squared error 0.1175 (Max, 1960, table I)
    normal = np.random.default_rng(0).normal(size=400_000).astype(np.float32)
    four = fit(normal, 2)
    error = (four.unpack(four.pack(torch.from_numpy(normal[None])), len(normal))[0].numpy() - normal).var()
    assert four.weights.numpy() == pytest.approx([-1.51, -0.4528, 0.4528, 1.51], abs=0.02)
    assert error == pytest.approx(0.1175, abs=0.002)


def test_a_vector_gets_the_nearest_centroid_of_its_groups():
    values = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 5.0], [9.0, 9.0]])
    found = Centroids(values, torch.tensor([[0.5, 0.0], [4.0, 7.0]]), torch.tensor([0, 2, 4]))
    assert found.nearest(torch.tensor([[0.9, 0.1], [-1.0, 1.0], [1.0, 4.0], [8.0, 8.0]])).tolist() == [1, 0, 2, 3]
    rng = np.random.default_rng(0)
    sample = torch.from_numpy((rng.integers(0, 9, size=(900, 1)) * 10 + rng.normal(size=(900, 3))).astype(np.float32))
    made = train(sample, 30)
    assert len(made.values) == 30 and int(made.starts[-1]) == 30 and int(made.nearest(sample).max()) < 30
    assert (sample - made.values[made.nearest(sample)]).square().sum(
        1
    ).mean() < 2.0  # the three coordinates together have variance 3
    assert [default_count(count) for count in (1, 100, 40_000, 1_107_000)] == [1, 25, 2048, 16384]


@pytest.mark.parametrize("bits", [2, 4])
def test_compared_with_everything_it_is_brute_force(store, bits):
    queries = asked()
    found = Plaid(bits=bits, candidates=400, rescore=400).over(store).rank(queries, 10)
    for (rows, scores), truth in zip(found, exact(store, queries), strict=True):
        assert rows.tolist() == list(range(400))
        np.testing.assert_allclose(scores, truth, atol=1e-5)


def small_effort(monkeypatch):
    for name, value in (("LEAST_CANDIDATES", 1), ("LEAST_RESCORED", 1), ("LEAST_PROBES", 1)):
        monkeypatch.setattr(index, name, value)


@pytest.mark.parametrize("engine", ["numba", "torch", "numba without compilation"])
def test_it_finds_the_best_with_exact_scores(store, monkeypatch, engine):
    if engine != "torch" and not HAS_NUMBA:
        pytest.skip("needs numba")
    if engine == "torch":
        monkeypatch.setattr(index, "find_spec", lambda name: None)
    if engine == "numba without compilation":  # NUMBA_DISABLE_JIT=1
        monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    small_effort(monkeypatch)
    opened = Plaid(probes=12, candidates=12, rescore=3).over(store)
    assert (opened._cpu is None) == (engine != "numba")
    queries, hits = asked(), 0
    for (rows, scores), truth in zip(opened.rank(queries, 10), exact(store, queries), strict=True):
        assert len(rows) == len(set(rows.tolist())) == 30  # of 400 docs
        np.testing.assert_allclose(scores, truth[rows], atol=1e-5)
        hits += len(set(rows.tolist()) & set(np.argsort(-truth)[:10].tolist()))
    assert hits >= 72  # of 80


def test_candidates_of_the_tensors_are_those_of_a_plain_loop(store):
    folder = build.build(store, 2, None)
    opened = LateIndex(folder, None, Effort(6, 1, 1))
    search = TensorSearch(opened.arrays)
    query = asked(1).values
    near = search._near(query, Effort(6, 40, 1)).tolist()
    similarities = (opened.arrays.centroids.values @ query.T).numpy()
    lowest = np.sort(similarities, axis=0)[-6]
    probed = (similarities >= lowest).any(1)
    scores, first = {}, 0
    for row, end in enumerate(opened.arrays.ends.tolist()):
        codes = [code for code in opened.arrays.codes[first:end].tolist() if probed[code]]
        first = end
        if codes:
            scores[row] = np.maximum(similarities[codes].max(0), lowest).sum()
    assert sorted(near) == sorted(sorted(scores, key=scores.__getitem__)[-40:])
    rows = torch.tensor(near)
    decompressed = [(opened.vectors(row) @ query.numpy().T).max(0).sum() for row in near]
    both = TextVectors(query.repeat(2, 1), torch.tensor([len(query)] * 2))
    scores = search.decompressed(both, torch.ones_like(rows), rows)
    np.testing.assert_allclose(scores.numpy(), decompressed, atol=1e-4)


def test_without_stored_vectors_scores_are_those_of_decompressed_ones(store):
    opened = Plaid(bits=4, rescore=400, stored=False).over(store)
    queries = asked(2)
    for (rows, scores), truth in zip(opened.rank(queries, 10), exact(store, queries), strict=True):
        np.testing.assert_allclose(scores, truth[rows], atol=0.6)  # twenty tokens, each within 0.03
        assert not np.allclose(scores, truth[rows], atol=1e-4)
        assert np.corrcoef(scores, truth[rows])[0, 1] > 0.99


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("stage", ["codec", "shard"])
def test_a_killed_build_ends_with_the_same_bytes(tmp_path, monkeypatch, stage):
    whole = files_of(build.build(stored(tmp_path / "whole"), 2, 50))
    cut = stored(tmp_path / "cut")
    original, calls = build.write_codec if stage == "codec" else build.write_shard, []

    def dies(*arguments):
        calls.append(1)
        original(*arguments)
        if stage == "codec" or len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(build, f"write_{stage}", dies)
    with pytest.raises(KeyboardInterrupt):
        build.build(cut, 2, 50)
    monkeypatch.undo()
    again = files_of(build.build(cut, 2, 50))
    assert again == whole and len(whole) == 29


def test_docs_are_added_and_deleted(tmp_path):
    store = stored(tmp_path / "vectors")
    folder = build.build(store, 2, None)
    opened = LateIndex(folder, store, Effort(0, 400, 400))
    query = asked(1)
    values = torch.nn.functional.normalize(torch.cat([query.values, torch.randn(3, DIM)]), dim=1)
    opened.add(["new", "other"], TextVectors(values, torch.tensor([20, 3])))
    opened.delete(["d7", "other"])
    for found in (opened, LateIndex(folder, store, Effort(0, 400, 400))):
        assert found.num_docs == 400
        ((rows, scores),) = found.rank(query, 10)
        ranked = found.doc_ids[rows[np.argsort(-scores)]].tolist()
        assert ranked[0] == b"new" and scores.max() == pytest.approx(20.0, abs=1e-4)  # each token finds itself
        assert b"d7" not in ranked and b"other" not in ranked and len(ranked) == 400
    opened.add(["d7"], TextVectors(values[:2], torch.tensor([2])))
    assert opened.num_docs == 401
    for ids, message in ((["d8"], "got 'd8' again"), (["x", "x"], "got 'x' again")):
        with pytest.raises(DataError, match=message):
            opened.add(ids, TextVectors(values[: len(ids)], torch.ones(len(ids), dtype=torch.int64)))
    with pytest.raises(DataError, match="got NaN or infinity for doc 'y'"):
        opened.add(["x", "y"], TextVectors(torch.tensor([[1.0] * DIM, [torch.nan] * DIM]), torch.tensor([1, 1])))
    with pytest.raises(DataError, match="expected vectors of 12 of 1 docs, got vectors of 5 of 1"):
        opened.add(["x"], TextVectors(torch.zeros(1, 5), torch.tensor([1])))
    with pytest.raises(DataError, match="expected ids of docs of the index, got 'nowhere'"):
        opened.delete(["nowhere"])
    with pytest.raises(
        CheckpointError, match="expected the index of 400 docs, got one with 3 added and 2 deleted docs"
    ):
        Plaid().over(store)


def test_other_vectors_and_damaged_parts_are_refused(tmp_path):
    store = stored(tmp_path / "vectors")
    folder = build.build(store, 2, None)
    settings = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**settings, "vectors": "of other weights"}))
    with pytest.raises(CheckpointError, match=r"expected an index of .*got one of .*'of other weights'.*delete it"):
        Plaid().over(store)
    (folder / "index.json").write_text(json.dumps(settings))
    part = folder / "shard-00001" / "codes.bin"
    content = part.read_bytes()
    part.write_bytes(content[:-8])
    with pytest.raises(DataError, match=r"shard-00001.*codes.bin"):
        Plaid().over(store)
    part.write_bytes(content)
    (folder / "shard-00002").rename(tmp_path / "moved")
    with pytest.raises(DataError, match="shard-00002: expected a shard of the index, got none"):
        LateIndex(folder, store, Effort(0, 10, 2))
    Plaid().over(store)  # builds it again
    assert files_of(folder / "shard-00002") == files_of(tmp_path / "moved")


def test_vectors_that_are_not_finite_are_refused_with_their_doc(tmp_path):
    store = stored(tmp_path / "vectors")
    broken = np.array(store._vectors[1])
    broken[5] = np.nan
    store._vectors[1] = broken
    doc = np.searchsorted(store.ends, store._shard_ends[0] + 5, side="right")
    with pytest.raises(DataError, match=f"got NaN or infinity for doc 'd{doc}'"):
        Plaid().over(store)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Plaid(bits=3), "index.bits: expected 2 or 4, got 3"),
    (lambda: Plaid(centroids=0), "index.centroids: expected at least 1, got 0"),
    (lambda: Plaid(rescore=0), "index.rescore: expected at least 1, got 0"),
    (lambda: FastPlaid(rescore=-1), "index.rescore: expected at least 0, got -1"),
])  # fmt: skip
def test_wrong_options(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.fixture
def engine_of(small, scorers, data_of, tmp_path):
    """A search engine of a tiny ColBERT over a collection."""

    def make(kind=None, collection=small, scorer=None):
        scorer = scorer or scorers("colbert")
        data, where, sets = data_of(scorer, collection), Device(max_tokens=500), {"small": collection}
        options = EncodeOptions(tmp_path / "cache", shard_docs=25)
        folders = pipeline.encode_sets(scorer, data, sets, options, where, "32-true")
        return engines.vector_engines(scorer, data, sets, folders, kind, where, LateOptions())["small"]

    return make


def test_colbert_searches_with_it_by_default_and_dpr_cannot(engine_of, scorers, small):
    pytest.importorskip("faiss")
    ours, truth = engine_of(), engine_of(Flat())
    assert type(ours.index) is LateIndex
    ids = list(small.queries)
    assert {q: list(docs) for q, docs in ours.search(ids, 10).to_run().items()} == {
        q: list(docs) for q, docs in truth.search(ids, 10).to_run().items()
    }
    assert [len(ours.search(ids[:2], 1000)[q]) for q in ids[:2]] == [60, 60]
    assert len(ours.search([], 10)) == 0
    _, report = pipeline.search_set(ours, small, 10, 3)
    assert set(report["parts_ms"]) == {"encode", "candidates", "exact"} and "queries/s" in pipeline.in_words(report)
    assert 0 < report["parts_ms"]["encode"]["p50"] < report["latency_ms"]["p95"]
    with pytest.raises(ConfigError, match="expected flat, hnsw, ivf_flat or ivf_pq for DPR, got plaid; set index=flat"):
        engine_of(Plaid(), scorer=scorers())


def test_docs_and_queries_without_text(engine_of):
    docs = MemoryDocs([Doc("empty", ""), *(Doc(f"d{i}", "bab cel") for i in range(3))])
    engine = engine_of(collection=Collection("c", docs, {"q": "bab", "blank": " "}, {"q": {"d0": 1}}))
    assert sorted(engine.search(["q", "blank"], 9)["blank"]) == ["d0", "d1", "d2", "empty"]


@pytest.mark.parametrize("kind", [FastPlaid, Warp])
def test_engines_of_others_find_the_best(store, kind):
    package = {FastPlaid: "fast_plaid", Warp: "xtr_warp"}[kind]
    if importlib.util.find_spec(package) is None:
        with pytest.raises(ConfigError, match="index: expected the package"):
            kind().over(store)
        pytest.skip(f"{package} is not installed: its builds need torch 2.11")
    queries, hits = asked(), 0
    for (rows, scores), truth in zip(kind(rescore=3).over(store).rank(queries, 10), exact(store, queries), strict=True):
        np.testing.assert_allclose(scores, truth[rows], atol=1e-5)
        hits += len(set(rows.tolist()) & set(np.argsort(-truth)[:10].tolist()))
    assert hits >= 70


def test_the_interface_of_another_engine(store):
    """`ExternalIndex` with a brute-force program in the place of an engine."""
    from ranker.retrieval.indexes._external import ExternalIndex

    def find(queries, count):
        found = [brute_force(store, query.numpy()) for query in queries]
        return [[(int(row), float(scores[row])) for row in np.argsort(-scores)[:count]] for scores in found]

    queries = asked(2)
    for rescore in (0, 2):
        ranked = ExternalIndex(store.folder, find, rescore, store).rank(queries, 5)
        for (rows, scores), truth in zip(ranked, exact(store, queries), strict=True):
            assert rows.tolist() == np.argsort(-truth)[: 5 * max(1, rescore)].tolist()
            np.testing.assert_allclose(scores, truth[rows], atol=1e-5)


def test_vectors_on_the_device_give_exact_scores(store, monkeypatch):
    monkeypatch.setattr(index, "find_spec", lambda name: None)
    small_effort(monkeypatch)
    opened = Plaid(probes=12, candidates=12, rescore=3).over(store)
    opened._tensors.load(store, room=10**9)
    assert opened._tensors._short.values.dtype == torch.float16
    for (rows, scores), truth in zip(opened.rank(asked(), 10), exact(store, asked()), strict=True):
        np.testing.assert_allclose(scores, truth[rows], atol=1e-5)
        assert len(rows) == 30 and {*rows.tolist()} >= {*np.argsort(-truth)[:20].tolist()}
    opened.deleted = np.array([3, 7])
    assert not {3, 7} & {*np.concatenate([rows for rows, _ in opened.rank(asked(), 200)]).tolist()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("exhaustive", [True, False])
def test_on_a_gpu_it_finds_the_same(store, monkeypatch, exhaustive):
    small_effort(monkeypatch)
    monkeypatch.setattr(index, "EXHAUSTIVE", 10**9 if exhaustive else 0)
    queries = asked()
    options = SimpleNamespace(probes=12, candidates=12, rescore=3)
    on_gpu = Plaid(**vars(options), gpu=True).over(store).rank(queries, 10)
    for (rows, scores), truth in zip(on_gpu, exact(store, queries), strict=True):
        np.testing.assert_allclose(scores, truth[rows], atol=1e-4)
        assert len(set(rows.tolist()) & set(np.argsort(-truth)[:10].tolist())) >= 9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stored", [True, False])
def test_on_a_gpu_a_batch_ranks_as_single_queries_and_repeats_its_bits(store, monkeypatch, stored):
    small_effort(monkeypatch)
    monkeypatch.setattr(index, "EXHAUSTIVE", 0)
    opened, queries = Plaid(probes=12, candidates=12, rescore=3, stored=stored, gpu=True).over(store), asked()
    together, again = opened.rank(queries, 10), opened.rank(queries, 10)
    for number, (rows, scores) in enumerate(together):
        ((own_rows, own_scores),) = opened.rank(queries.take(torch.tensor([number])), 10)
        assert rows.tolist() == own_rows.tolist() == again[number][0].tolist()
        assert scores.tolist() == again[number][1].tolist()
        np.testing.assert_allclose(scores, own_scores, atol=1e-5)
