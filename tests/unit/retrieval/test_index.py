"""faiss indexes: metric, probes, sizes, what is kept and what is refused."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from ranker.errors import CheckpointError, ConfigError, DataError
from ranker.retrieval.index import VectorIndex
from ranker.retrieval.index_type import num_lists
from ranker.retrieval.indexes.binary import Binary
from ranker.retrieval.indexes.flat import Flat
from ranker.retrieval.indexes.hnsw import HNSW
from ranker.retrieval.indexes.int8 import Int8
from ranker.retrieval.indexes.ivf_flat import IVFFlat
from ranker.retrieval.indexes.ivf_pq import IVFPQ

faiss = pytest.importorskip("faiss")


class Vectors:
    """What an index reads of a folder of vectors."""

    def __init__(self, vectors: np.ndarray, folder) -> None:
        self.values, self.folder = vectors.astype(np.float32), folder
        self.description = SimpleNamespace(dim=vectors.shape[1], digest="made here")
        self.num_vectors = len(vectors)
        self.doc_ids = np.array([f"d{i}".encode() for i in range(len(vectors))])
        self.ends = np.arange(1, len(vectors) + 1)

    def chunks(self, most=64):
        for start in range(0, len(self.values), most):
            yield self.values[start : start + most]

    def sample(self, count, seed=0):
        return self.values[np.random.default_rng(seed).permutation(len(self.values))[:count]]


@pytest.fixture
def vectors(tmp_path):
    def make(count=200, dim=16, seed=0):
        values = np.random.default_rng(seed).normal(size=(count, dim))
        return Vectors(values / np.linalg.norm(values, axis=1, keepdims=True), tmp_path)

    return make


KINDS = {"flat": Flat, "ivf_flat": IVFFlat, "ivf_pq": IVFPQ, "hnsw": HNSW, "int8": Int8, "binary": Binary}


@pytest.mark.parametrize("name", [name for name in KINDS if name != "binary"])  # one bit a number needs more numbers
def test_pc59_pc61_every_kind_searches_by_inner_product(tmp_path, name):
    others = np.random.default_rng(0).normal(size=(300, 2)) * 0.1 - [1.0, 0.0]
    points = Vectors(np.concatenate([[[3.0, 4.0], [1.0, 0.0], [10.0, 40.0]], others]), tmp_path)
    kind = (
        IVFPQ(lists=1, subvectors=1) if name == "ivf_pq" else IVFFlat(lists=1) if name == "ivf_flat" else KINDS[name]()
    )
    index = VectorIndex.over(points, kind)
    assert index._index.metric_type == faiss.METRIC_INNER_PRODUCT
    scores, places = index.search(np.array([[1.0, 0.0]]), 3)
    assert places.tolist() == [[2, 0, 1]]  # C, A, B; by L2 it would be B, A, C
    assert scores[0, 0] > scores[0, 1] > scores[0, 2]
    if name not in ("ivf_pq", "int8"):  # whose products are approximate
        assert scores.tolist() == [[10.0, 3.0, 1.0]]


def test_pc61_one_probe_finds_fewer_and_says_so_all_probes_find_all(vectors, caplog):
    points = vectors()
    query = points.values[:1]
    few = VectorIndex.over(points, IVFFlat(lists=20, probes=1))
    assert "20 lists learn from 200 vectors, fewer than 39 each; lower index.lists" in caplog.text
    scores, places = few.search(query, 50)
    found = int((places[0] >= 0).sum())
    assert found < 50
    assert f"1 of 1 queries got fewer than 50 vectors, the fewest {found}; raise index.probes" in caplog.text
    assert (scores[0, found:] == -np.inf).all()
    all_of_them = VectorIndex.over(points, IVFFlat(lists=20, probes=20)).search(query, 50)[1]
    exact = np.argsort(-(points.values @ query[0]), kind="stable")[:50]
    assert all_of_them[0].tolist() == exact.tolist()


@pytest.mark.parametrize("name", KINDS)
def test_more_than_there_are_gives_all_and_no_place_twice(vectors, name):
    points = vectors(count=300)
    kind = KINDS[name](lists=4, probes=4) if name.startswith("ivf") else KINDS[name]()
    _, places = VectorIndex.over(points, kind).search(points.values[:3], 1000)
    assert places.shape == (3, 300)
    assert all(sorted(row) == list(range(300)) for row in places.tolist())


def test_no_query_and_no_vector(vectors, tmp_path):
    index = VectorIndex.over(vectors(), Flat())
    assert [part.shape for part in index.search(np.zeros((0, 16)), 5)] == [(0, 5), (0, 5)]
    empty = VectorIndex.over(Vectors(np.zeros((0, 16)), tmp_path), Flat())
    assert [part.shape for part in empty.search(np.zeros((2, 16)), 5)] == [(2, 0), (2, 0)]


@pytest.mark.parametrize("name", ["ivf_flat", "ivf_pq", "hnsw", "int8", "binary"])
def test_what_was_learned_is_kept_and_other_vectors_are_refused(vectors, name):
    points = vectors(count=400)
    made = VectorIndex.over(points, KINDS[name]())
    path = next(points.folder.glob("index-*.faiss"))
    stamp = path.stat().st_mtime_ns
    again = VectorIndex.over(points, KINDS[name]())
    assert path.stat().st_mtime_ns == stamp and made.num_bytes == again.num_bytes == path.stat().st_size
    for one, other in zip(made.search(points.values[:5], 10), again.search(points.values[:5], 10), strict=True):
        np.testing.assert_array_equal(one, other)
    points.description.digest = "of another model"
    with pytest.raises(
        CheckpointError, match=r"expected an index of .*of another model.*, got one of .*made here.*; delete"
    ):
        VectorIndex.over(points, KINDS[name]())


def test_int8_products_are_those_of_rounded_numbers(vectors):
    points = vectors(count=500)
    scores, places = VectorIndex.over(points, Int8()).search(points.values[:4], 500)
    lowest, highest = points.values.min(0), points.values.max(0)
    # faiss takes the middle of each of 255 intervals between the smallest and the largest value of a number
    codes = np.clip(np.trunc(255 * (points.values - lowest) / (highest - lowest)), 0, 255)
    rounded = lowest + (codes + 0.5) / 255 * (highest - lowest)
    apart = np.abs(scores - np.take_along_axis(points.values[:4] @ rounded.T, places, 1))
    # a number on the border of two intervals may be rounded to the other one
    assert np.median(apart) < 1e-6 and apart.max() < 0.01


def test_binary_estimates_inner_products_also_of_vectors_of_different_lengths(tmp_path):
    rng = np.random.default_rng(2)
    values = rng.normal(size=(2000, 128)) * rng.uniform(0.2, 5, size=(2000, 1))
    points, queries = Vectors(values, tmp_path), rng.normal(size=(20, 128))
    scores, places = VectorIndex.over(points, Binary()).search(queries, 2000)
    truth = np.take_along_axis(queries @ values.T, places, 1)
    assert np.corrcoef(scores.ravel(), truth.ravel())[0, 1] > 0.75  # by distances it would be near 0
    assert np.polyfit(truth.ravel(), scores.ravel(), 1)[0] == pytest.approx(1, abs=0.1)  # without a bias


@pytest.mark.parametrize(("name", "share"), [("int8", 0.25), ("binary", (8 + 8 + 64 * 64 * 4 / 4000) / 256)])
def test_small_vectors_take_their_share_of_the_bytes_and_find_the_best(vectors, name, share):
    points = vectors(count=4000, dim=64)
    queries = points.values[:50] + 0.05 * np.random.default_rng(1).normal(size=(50, 64))
    kind = KINDS[name]()
    index = VectorIndex.over(points, kind)
    assert index.num_bytes == pytest.approx(share * points.values.nbytes, rel=0.1)
    places = index.search(queries, kind.rescore * 10)[1]
    best = np.argsort(-(queries @ points.values.T), axis=1)[:, :10]
    found = np.mean([len(set(got) & set(wanted)) / 10 for got, wanted in zip(places, best, strict=True)])
    assert found >= (1.0 if name == "int8" else 0.8)


def test_how_it_is_searched_may_change_without_building_it_again(vectors):
    points = vectors()
    VectorIndex.over(points, IVFFlat(lists=8, probes=1))
    stamps = {path: path.stat().st_mtime_ns for path in points.folder.glob("index-*.faiss")}
    index = VectorIndex.over(points, IVFFlat(lists=8, probes=8))
    assert index._index.nprobe == 8
    assert {path: path.stat().st_mtime_ns for path in points.folder.glob("index-*.faiss")} == stamps
    assert json.loads(next(points.folder.glob("index-*.json")).read_text())["metric"] == "inner product"


def test_a_vector_that_is_not_finite_is_refused(vectors):
    points = vectors()
    points.values[130, 3] = np.nan
    with pytest.raises(DataError, match="expected finite vectors, got NaN or infinity for doc 'd130'"):
        VectorIndex.over(points, Flat())


def test_number_of_lists():
    assert [num_lists(None, count) for count in (0, 10, 200, 100_000, 8_841_823)] == [1, 1, 5, 1264, 11894]
    assert num_lists(20, 200) == 20 and num_lists(500, 200) == 200


def test_what_an_index_takes_by_default_and_by_its_options():
    for kind in (IVFFlat, IVFPQ):
        probes = [kind(lists=lists).make(16, 10_000).nprobe for lists in (4, 40, 100, 800)]
        assert probes == [4, 8, 12, 100]  # an eighth, at least 8, at most all
        assert kind(lists=40, probes=3).make(16, 10_000).nprobe == 3
    assert [IVFPQ().make(16, count).pq.nbits for count in (1, 5, 200, 256, 10_000)] == [1, 2, 7, 8, 8]
    assert [IVFPQ(lists=lists).train_vectors(10**6) for lists in (10, 1000)] == [64 * 256, 64 * 1000]
    assert [kind().train_vectors(10**6) for kind in (Flat, HNSW)] == [0, 0]
    assert (IVFPQ().rescore, IVFPQ(rescore=4).rescore, HNSW().rescore) == (10, 4, 1)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: IVFFlat(lists=0), "index.lists: expected at least 1, got 0"),
    (lambda: HNSW(search_depth=0), "index.search_depth: expected at least 1, got 0"),
    (lambda: HNSW(neighbours=0), "index.neighbours: expected at least 1, got 0"),
    (lambda: HNSW(build_depth=0), "index.build_depth: expected at least 1, got 0"),
    (lambda: IVFPQ(subvectors=5).make(16, 100), "index.subvectors: expected a divisor of the vectors' size 16, got 5"),
])  # fmt: skip
def test_wrong_options(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.skipif(hasattr(faiss, "StandardGpuResources"), reason="this faiss has GPU support")
def test_a_gpu_that_is_asked_for_and_not_there_is_an_error(vectors):
    with pytest.raises(ConfigError, match=r"index.gpu: expected a GPU that faiss sees, got none"):
        VectorIndex.over(vectors(), IVFFlat(gpu=True))


class OnGpus:
    """Stands for faiss's copies on two GPUs (IndexReplicas): neither written nor asked for more than 2048 vectors."""

    def __init__(self, index):
        self.inside, self.train, self.add, self.metric_type = index, index.train, index.add, index.metric_type

    @property
    def ntotal(self):
        return self.inside.ntotal

    def search(self, queries, count):
        assert count <= 2048
        return self.inside.search(queries, count)


class FaissWithGpus:
    """The parts of faiss's GPU interface that ranker uses; remembers which indexes were moved to GPUs."""

    StandardGpuResources = GpuMultipleClonerOptions = SimpleNamespace

    def __init__(self):
        self.moved = []

    def __getattr__(self, name):
        return getattr(faiss, name)

    def get_num_gpus(self):
        return 2

    def index_cpu_to_all_gpus(self, index, co):
        self.moved.append((type(index).__name__, co.useFloat16))
        return OnGpus(index)

    def index_gpu_to_cpu(self, index):
        return index.inside


@pytest.fixture
def gpus(monkeypatch):
    made = FaissWithGpus()
    monkeypatch.setattr("ranker.retrieval.index._faiss", lambda: made)
    return made


@pytest.mark.parametrize(
    "kind", [Flat(), IVFFlat(lists=4), IVFPQ(lists=2, subvectors=8)], ids=lambda kind: type(kind).__name__
)
def test_an_index_on_gpus_is_written_and_read_back(vectors, gpus, kind):
    points = vectors(300)
    made, again = VectorIndex.over(points, kind), VectorIndex.over(points, kind)
    assert len(gpus.moved) == 2 and gpus.moved[0][1] == isinstance(
        kind, IVFPQ
    )  # float16 lookup tables, no float16 vectors
    for one, other in zip(made.search(points.values[:5], 10), again.search(points.values[:5], 10), strict=True):
        np.testing.assert_array_equal(one, other)


def test_more_vectors_than_a_gpu_fetches_come_from_the_cpu(vectors, gpus, caplog):
    caplog.set_level("INFO")
    points = vectors(2100, dim=4)
    index = VectorIndex.over(points, Flat())
    assert index.search(points.values[:1], 2048)[1].shape == (1, 2048) and "searched on the CPU" not in caplog.text
    for _ in range(2):
        assert sorted(index.search(points.values[:1], 2100)[1][0]) == list(range(2100))
    assert caplog.text.count("a GPU fetches at most 2048 vectors, the search needs 2100: it runs on the CPU") == 1


@pytest.mark.parametrize(("make", "unfit"), [
    (lambda **more: IVFPQ(lists=2, subvectors=6, **more), "6 index.subvectors, which are none of 1, 2, 3, 4, 8"),
    (lambda **more: IVFFlat(lists=20, probes=18, **more), r"more than 16 index.probes \(18\)"),
])  # fmt: skip
def test_what_does_not_fit_a_gpu_stays_on_the_cpu_or_is_refused(vectors, gpus, monkeypatch, caplog, make, unfit):
    monkeypatch.setattr("ranker.retrieval.index_gpus.GPU_MAX", 16)
    caplog.set_level("INFO")
    points = vectors(300, dim=6)
    assert VectorIndex.over(points, make()).search(points.values[:1], 3)[1][0, 0] == 0 and not gpus.moved
    assert re.search(f"index: stays on the CPU, since it has {unfit}", caplog.text)
    with pytest.raises(ConfigError, match=f"index.gpu: expected an index that fits a GPU, got {unfit}"):
        VectorIndex.over(points, make(gpu=True))
