"""Write generated texts in the file formats of MS MARCO passage ranking, where ir_datasets looks for them."""

from __future__ import annotations

import gzip
import shutil
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from token_store import bundled_tokenizer, vocabulary

PASSAGES, TRAIN_QUERIES, TRIPLES, DEV_QUERIES, CANDIDATES = 8_841_823, 500_000, 40_000_000, 6_980, 1_000
WORDS = 43  # mean number of words of a passage; lines of 340 bytes on average make a collection.tsv of 3 GB
QUERY_WORDS = 6
BLOCK = 1 << 16  # number of passages that a process writes at a time
TRIPLES_AT_ONCE = 500_000
NOT_ASCII = ("café", "don’t", "–", "naïve", "€")  # MS MARCO also has such words


class Sizes:
    """Numbers of passages, queries and triples for a share of MS MARCO. Each query has one relevant passage."""

    def __init__(self, share: float) -> None:
        self.passages = round(PASSAGES * share)
        self.queries = {"train": round(TRAIN_QUERIES * share), "dev": max(1, round(DEV_QUERIES * share))}
        self.triples = round(TRIPLES * share)
        self.candidates = min(CANDIDATES, self.passages // 2)

    def relevant(self, split: str, queries: np.ndarray) -> np.ndarray:
        """Return the passage that is relevant to each query; queries are spread evenly over the passages."""
        shift = 1 if split == "train" else 3  # quarters of the distance between the passages of two queries
        return (4 * queries + shift) * self.passages // (4 * self.queries[split])

    def queries_of(self, split: str, start: int, stop: int) -> np.ndarray:
        """Return the indices of the queries whose relevant passage is one of `start` to `stop` - 1."""
        first, last = (max(0, bound * self.queries[split] // self.passages - 2) for bound in (start, stop))
        near = np.arange(first, min(last + 4, self.queries[split]))
        passages = self.relevant(split, near)
        return near[(passages >= start) & (passages < stop)]


def query_ids(split: str, queries: np.ndarray) -> np.ndarray:
    """Return the ids of queries; those of train are odd, those of dev are even."""
    return 2 * queries + (1 if split == "train" else 0)


def generate(home: Path, share: float, processes: int) -> None:
    """Write all files to `home/msmarco-passage`, with several processes.

    They are the files that ir_datasets extracts from its downloads: `collection.tsv`, `train/queries.tsv`
    (queries.train.tsv), `train/qrels` (qrels.train.tsv), `train/docpairs.tsv.gz` (qidpidtriples.train.full.tsv.gz),
    `dev/small/queries.tsv`, `dev/small/qrels` and `dev/ms.run` (the ids of top1000.dev). `dev/first_stage.run` is a
    TREC run of the same candidates with scores.
    """
    folder = home / "msmarco-passage"
    for name in ("train", "dev/small", "parts"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "irds_version.txt").write_text("v2")  # without this file, ir_datasets would delete the collection
    sizes, words = Sizes(share), zipf_words()
    with ProcessPoolExecutor(processes, initializer=_keep, initargs=(words,)) as pool:
        starts = range(0, sizes.passages, BLOCK)
        blocks = pool.map(partial(_write_block, folder / "parts", sizes), starts)
        triples = pool.map(partial(_write_triples, folder / "parts", sizes), range(0, sizes.triples, TRIPLES_AT_ONCE))
        candidates = pool.map(partial(_write_candidates, folder / "parts", sizes), range(0, sizes.queries["dev"], 500))
        names = ("collection.tsv", "train/queries.tsv", "train/qrels", "dev/small/queries.tsv", "dev/small/qrels")
        _join(folder, names, blocks)
        _join(folder, ("train/docpairs.tsv.gz",), triples)
        _join(folder, ("dev/ms.run", "dev/first_stage.run"), candidates)
    shutil.rmtree(folder / "parts")


def _join(folder: Path, names: tuple[str, ...], parts) -> None:
    """Append the parts of each file in order, and delete the parts."""
    files = [(folder / name).open("wb") for name in names]
    for paths in parts:
        for file, path in zip(files, paths, strict=True):
            with path.open("rb") as part:
                shutil.copyfileobj(part, file, 1 << 22)
            path.unlink()
    for file in files:
        file.close()


# these functions run in the processes of `generate`
# ----------------------------------------------------------------------------------------------------------------------

_WORDS = np.empty(0, dtype=object)
_TABLE = np.empty(0, dtype=np.int32)


def zipf_words() -> np.ndarray:
    """Return words by falling frequency; some of them are not ASCII."""
    from transformers import AutoTokenizer

    words = vocabulary(AutoTokenizer.from_pretrained(bundled_tokenizer()))
    return np.concatenate([words[:500], np.array(NOT_ASCII, dtype=object), words[500:]])


def _keep(words: np.ndarray) -> None:
    """Keep the words in a process, and a table of word indices in which each occurs as often as by Zipf's law."""
    global _WORDS, _TABLE
    weights = np.cumsum(1 / (np.arange(len(words)) + 2.7))  # frequencies by the Zipf-Mandelbrot law
    places = (np.arange(1 << 22) + 0.5) / (1 << 22) * weights[-1]
    _WORDS, _TABLE = words, np.searchsorted(weights, places).astype(np.int32)


def _drawn(rng: np.random.Generator, count: int) -> list[str]:
    return _WORDS[_TABLE[rng.integers(0, len(_TABLE), count, dtype=np.int32)]].tolist()


def _write_block(folder: Path, sizes: Sizes, start: int) -> list[Path]:
    """Write a block of passages, and the queries for which they are relevant; a query has words of its passage."""
    rng = np.random.default_rng([1, start])
    stop = min(start + BLOCK, sizes.passages)
    lengths = np.maximum(1, rng.gamma(6, WORDS / 6, stop - start).astype(int))
    ends = np.cumsum(lengths).tolist()
    words = _drawn(rng, ends[-1])
    begins = [0, *ends[:-1]]
    texts = [" ".join(words[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    lines = {"collection": "".join([f"{start + i}\t{text}\n" for i, text in enumerate(texts)])}
    for split in ("train", "dev"):
        queries = sizes.queries_of(split, start, stop)
        ids, passages = query_ids(split, queries).tolist(), (sizes.relevant(split, queries) - start).tolist()
        chosen = rng.random((len(ids), QUERY_WORDS))
        lines[f"{split}.queries"] = "".join(
            f"{query} {' '.join(words[begins[row] + int(at * lengths[row])] for at in places)}\n".replace(" ", "\t", 1)
            for query, row, places in zip(ids, passages, chosen, strict=True)
        )
        lines[f"{split}.qrels"] = "".join(f"{q}\t0\t{start + row}\t1\n" for q, row in zip(ids, passages, strict=True))
    paths = []
    for name, text in lines.items():
        paths.append(folder / f"{name}.{start}")
        paths[-1].write_bytes(text.encode())
    return paths


def _write_triples(folder: Path, sizes: Sizes, start: int) -> list[Path]:
    """Write one part of the gzip file of triples: query, relevant passage, another passage; in random order."""
    rng = np.random.default_rng([2, start])
    count = min(TRIPLES_AT_ONCE, sizes.triples - start)
    queries = rng.integers(0, sizes.queries["train"], count)
    columns = (query_ids("train", queries), sizes.relevant("train", queries), rng.integers(0, sizes.passages, count))
    lines = map("%d\t%d\t%d\n".__mod__, zip(*(column.tolist() for column in columns), strict=True))
    path = folder / f"triples.{start}"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write("".join(lines).encode())
    return [path]


def _write_candidates(folder: Path, sizes: Sizes, start: int) -> list[Path]:
    """Write the candidates of 500 dev queries, the relevant and random passages, as pairs of ids and as a TREC run."""
    rng = np.random.default_rng([3, start])
    queries = np.arange(start, min(start + 500, sizes.queries["dev"]))
    paths = [folder / f"pairs.{start}", folder / f"run.{start}"]
    with paths[0].open("w") as pairs, paths[1].open("w") as run:
        for query, own in zip(query_ids("dev", queries).tolist(), sizes.relevant("dev", queries), strict=True):
            others = np.unique(rng.integers(0, sizes.passages, sizes.candidates + 200))
            docs = rng.permutation(others[others != own])[: sizes.candidates - 1].tolist()
            docs.insert(int(rng.integers(len(docs) + 1)), int(own))
            pairs.write("".join([f"{query}\t{doc}\n" for doc in docs]))
            run.write("".join([f"{query} Q0 {doc} {i} {30 - i / 64} bm25\n" for i, doc in enumerate(docs, 1)]))
    return paths
