"""The CPU kernels of the compressed late-interaction index, against plain loops."""

import numpy as np
import pytest
import torch

from ranker.retrieval.late.arrays import Arrays
from ranker.retrieval.late.build import SCALES, compress
from ranker.retrieval.late.centroids import Centroids
from ranker.retrieval.late.residuals import fit

pytest.importorskip("numba", reason="needs numba (extras cpu and gpu)")

from ranker.retrieval.late import cpu_search, doc_kernels, query_kernels, vector_code
from ranker.retrieval.late.cpu_search import CPUSearch, probes_of

DOCS = 60


def index_of(dim, bits, seed=0, centroids=22):
    """Return an index of unit vectors, and the vectors decompressed by numpy."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 40, DOCS)
    centres = rng.normal(size=(centroids, dim))
    vectors = centres[rng.integers(centroids, size=counts.sum())] + 0.4 * rng.normal(size=(counts.sum(), dim))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    centres = torch.from_numpy((centres / np.linalg.norm(centres, axis=1, keepdims=True)).astype(np.float32))
    found = Centroids(centres, centres[:1], torch.tensor([0, centroids]))
    nearest = found.nearest(torch.from_numpy(vectors))
    buckets = fit((torch.from_numpy(vectors) - centres[nearest]).numpy().flatten(), bits)
    codes, residuals, scales = compress(vectors, (found, buckets))
    arrays = Arrays(found, buckets, codes, residuals, scales, np.cumsum(counts), np.ones(DOCS, bool))
    unpacked = centres.numpy()[codes]
    for vector in range(len(vectors)):  # the first element of a byte is in its highest bits
        for place in range(dim):
            byte = residuals[vector, place * bits // 8]
            level = byte >> (8 - bits * (place % (8 // bits) + 1)) & (2**bits - 1)
            unpacked[vector, place] += buckets.weights[level].item()
    return arrays, unpacked * scales[:, None].astype(np.float32), vectors


def asked(tokens, dim, seed=5):
    values = np.random.default_rng(seed).normal(size=(tokens, dim)).astype(np.float32)
    return values / np.linalg.norm(values, axis=1, keepdims=True)


@pytest.mark.parametrize(("dim", "bits"), [(24, 2), (12, 2), (10, 4), (128, 2)])  # 6, 3, 5 and 32 bytes
@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("shuffles", [True, False])
def test_scores_are_those_of_decompressed_vectors_at_the_probed_centroids(monkeypatch, dim, bits, tokens, shuffles):
    if shuffles and not vector_code.SHUFFLES:
        pytest.skip("needs AVX2")
    if not shuffles:  # the kernel without its compiled code, in which numba has bound the shuffles
        monkeypatch.setattr(doc_kernels, "sums", vector_code.plain_sums)
        monkeypatch.setattr(doc_kernels, "fetch", lambda values, row: None)
        monkeypatch.setattr(doc_kernels, "scan", doc_kernels.scan.py_func)
    monkeypatch.setattr(cpu_search, "LEAST_NEAR", 1)
    arrays, decompressed, _ = index_of(dim, bits)
    query = asked(tokens, dim)
    query[0] *= 20  # as a sum of merged tokens
    centroids = arrays.centroids.values.numpy()
    similarities = centroids @ query.T
    residuals = decompressed / arrays.scales[:, None].astype(np.float32) - centroids[arrays.codes]
    lengths = np.linalg.norm(query, axis=1)
    spread = lengths * np.sqrt((residuals**2).mean())
    ends = [0, *arrays.ends.tolist()]
    for probes in (5, 22):
        rows, scores = CPUSearch(arrays).scores(query, probes)
        counts = probes_of(lengths, probes, 22)
        lowest = np.array([np.sort(similarities[:, token])[-min(count, 22)] for token, count in enumerate(counts)])
        expected = {}
        for row in range(DOCS):
            own = range(ends[row], ends[row + 1])
            total, found = 0.0, False
            for token in range(tokens):
                best = lowest[token] + spread[token]
                for vector in own:
                    if similarities[arrays.codes[vector], token] >= lowest[token]:
                        best, found = max(best, decompressed[vector] @ query[token]), True
                total += best
            if found:
                expected[row] = total
        assert set(rows.tolist()) >= set(expected)
        if probes == 22:  # with fewer, the bound of a histogram may admit a centroid more
            assert sorted(rows.tolist()) == list(range(DOCS))
            truth = [expected[row] for row in rows.tolist()]
            # each of the entries is rounded by at most half a step; six standard deviations of such sums, and two steps
            steps = query_kernels.tables(query, arrays.buckets.half_byte_values().numpy(), dim * bits // 8 + 1, 1.0)[1]
            bound = np.sqrt((steps**2).sum()) * (6 * np.sqrt(dim * bits / 4 / 12) + 2)
            np.testing.assert_allclose(scores, truth, atol=bound)
            assert np.corrcoef(scores, truth)[0, 1] > 0.99
        else:
            order = [row for row in rows[np.argsort(-scores)].tolist() if row in expected][:20]
            best = sorted(expected, key=expected.__getitem__)[-20:]
            assert len(set(order) & set(best)) >= 18


@pytest.mark.skipif(not vector_code.SHUFFLES, reason="needs AVX2")
def test_shuffles_add_up_the_same_integers_as_the_plain_loop():
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, size=(3, 34, 32)).astype(np.uint8)
    blocks[:, 32:] = rng.integers(8192, 31744, size=(3, 32)).astype("<i2").view(np.uint8).reshape(3, 2, 32)
    table = rng.integers(0, 64, size=(4, 32, 2, 16)).astype(np.uint8)
    table[3] = 63  # the largest sum, 4032
    ours, plain = np.zeros(32, np.int16), np.zeros(32, np.int16)
    call = _callable_sums()
    for block, token, start in ((0, 0, 0), (2, 1, -7000), (1, 3, 3900), (2, 2, 1)):
        call(blocks, block, table, token, start, ours, 2)
        vector_code.plain_sums(blocks, block, table, token, start, plain, 2)
        assert ours.tolist() == plain.tolist()
        byte = blocks[block, :32]
        entries = [
            int(table[token, p, 0, byte[p, 5] >> 4]) + int(table[token, p, 1, byte[p, 5] & 15]) for p in range(32)
        ]
        scale = int(blocks[block, 32:].reshape(-1).view("<i2")[5])
        assert plain[5] == 4 * (start + sum(entries)) * scale // 65536


def _callable_sums():
    from numba import njit

    @njit
    def call(blocks, block, table, token, start, out, later):
        vector_code.shuffled_sums(blocks, block, table, token, start, out, later)

    return call


@pytest.mark.parametrize("tokens", [1, 16, 17, 33, 48])
def test_maxsim_is_that_of_a_plain_loop_whatever_the_other_docs(tokens):
    _, _, vectors = index_of(12, 2)
    counts = np.array([1, 2, 3, 4, 5, 8, 37])
    ends, query = np.cumsum(counts), asked(tokens, 12)
    found = doc_kernels.maxsim(vectors, ends - counts, ends, query)
    for doc, (start, end) in enumerate(zip(ends - counts, ends, strict=True)):
        truth = sum(max(float(vectors[row] @ query[token]) for row in range(start, end)) for token in range(tokens))
        assert found[doc] == pytest.approx(truth, abs=1e-5)
        assert doc_kernels.maxsim(vectors, ends[doc : doc + 1] - counts[doc], ends[doc : doc + 1], query) == found[doc]


def test_maxsim_of_float16_is_that_of_the_converted_vectors(monkeypatch):
    monkeypatch.setattr(cpu_search, "CONVERTED", 3)
    _, _, vectors = index_of(12, 2)
    counts, query = np.array([1, 5, 8, 2, 37, 4, 9]), asked(17, 12)
    ends, halves = np.cumsum(counts), vectors.astype(np.float16)
    docs = np.array([6, 0, 4, 1])
    found = cpu_search.maxsim(halves, ends[docs] - counts[docs], ends[docs], query)
    converted = halves.astype(np.float32)
    assert found.tolist() == doc_kernels.maxsim(converted, ends[docs] - counts[docs], ends[docs], query).tolist()
    truth = [(converted[ends[doc] - counts[doc] : ends[doc]] @ query.T).max(0).sum() for doc in docs]
    np.testing.assert_allclose(found, truth, atol=1e-5)


def test_each_token_probes_about_the_requested_number_of_centroids():
    rng = np.random.default_rng(0)
    similarities = np.round(2000 * rng.normal(size=(9000, 16))).clip(-8000, 8000).astype(np.int16)
    for count in (1, 40, 900, 9000):
        counts = [count, 300, 9000]
        for token, least in enumerate(query_kernels.bounds(similarities, np.array(counts))):
            reached = (similarities[:, token] >= least).sum()
            assert 0.6 * counts[token] - 3 <= reached <= 1.4 * counts[token] + 8, (counts[token], reached)


def test_sums_of_merged_tokens_probe_more():
    assert probes_of(np.full(5, 0.7, np.float32), 300, 9000).tolist() == [300] * 5
    # square roots 4 and 1: 1000 * (4, 1) * cube root of (4 + 1) / (4**4 + 1), which is 0.26895
    lengths = np.array([16, 1], dtype=np.float32)
    assert probes_of(lengths, 1000, 9000).tolist() == probes_of(3 * lengths, 1000, 9000).tolist() == [1076, 269]
    assert probes_of(lengths, 100, 9000).tolist() == [108, cpu_search.LEAST_NEAR]
    assert probes_of(lengths, 9000, 9000).tolist() == [9000, 9000]
    assert probes_of(np.zeros(2, np.float32), 300, 9000).tolist() == [300, 300]


def test_deleted_docs_are_not_found():
    arrays, _, _ = index_of(12, 2)
    arrays.present[[3, 40]] = False
    search = CPUSearch(arrays)
    rows = search.candidates(asked(4, 12), 22, DOCS)
    assert rows.tolist() == [row for row in range(DOCS) if row not in (3, 40)]
    assert (search._slots() == -1).all()
    few = search.candidates(asked(4, 12), 22, 7)
    every, scores = search.scores(asked(4, 12), 22)
    assert few.tolist() == sorted(every[np.argsort(-scores)[:7]].tolist())


def test_scales_give_decompressed_vectors_the_length_of_the_vectors():
    _, decompressed, vectors = index_of(24, 2)
    np.testing.assert_allclose(np.linalg.norm(decompressed, axis=1), 1, atol=1e-3)
    centres = torch.eye(24)[:2]
    codec = Centroids(centres, centres[:1], torch.tensor([0, 2])), fit(np.zeros(0, np.float32), 2)
    _, _, scales = compress(np.stack([3 * vectors[0], 0.1 * vectors[0], 0 * vectors[0]]), codec)
    assert scales.tolist() == [SCALES[1], SCALES[0], SCALES[0]]


def test_merged_tokens_are_sums():
    query = asked(2, 12)
    near = query + 0.02 * asked(2, 12, seed=8)
    sums = query_kernels.merged(np.concatenate([query, near]), 0.95)
    np.testing.assert_allclose(sums, query + near, atol=1e-6)
