"""A home folder for ir_datasets that needs no network: small real collections, and a tiny one in MS MARCO's formats."""

import gzip
import importlib
import importlib.util
import io
import logging
import os
import sys
import tarfile
from pathlib import Path

# Some texts of the official collection are encoded in UTF-8 twice, like passage 1 here; ir_datasets repairs them.
PASSAGES = {
    "0": (
        "The presence of communication amid scientific minds was equally important to the success of the Manhattan "
        "Project."
    ),
    "1": "Manila is the capital of the Philippines; letâ\x80\x99s go there.",
    "2": 'A "quoted passage about the androgen receptor, with one quote mark only.',
    "3": "Goldfish grow to the size of their pond, they say.",
    "4": "Wild goldfish were found in ponds as large as a football.",
    "5": "The androgen receptor is a nuclear receptor activated by hormones.",
    "6": "Anthropological definition of environment: surroundings of an organism.",
    "7": "The capital of the project was spent within a year.",
}
TRAIN_QUERIES = {
    "121352": "define extreme",
    "634306": "what does chattel mean",
    "920825": "what was the great leap forward",
    "510633": "tattoo fixers",
}
TRAIN_QRELS = {"121352": {"0": 1}, "634306": {"7": 1}, "920825": {"1": 1}, "510633": {"3": 1}}
TRIPLES = [("121352", "0", "3"), ("634306", "7", "1"), ("121352", "0", "4"), ("920825", "1", "5"), ("510633", "3", "2")]
DEV_QUERIES = {"1048585": "what is paula deen's capital", "2": "androgen receptor define"}
DEV_QRELS = {"1048585": {"1": 1}, "2": {"5": 1}}
TOP1000_DEV = [("2", "2"), ("1048585", "7"), ("2", "5"), ("1048585", "1")]  # a query's lines need not be adjacent
DL19_QUERIES = {
    "156493": "do goldfish grow",
    "1110199": "what is wifi vs bluetooth",
    "1063750": "why did the us enter ww1",
}
DL19_QRELS = {"156493": {"3": 3, "4": 1, "1": 0}, "1110199": {"6": 2, "0": 1}}
DL20_QUERIES = {"1030303": "who is the capital", "997622": "where is the show shameless filmed"}
DL20_QRELS = {"1030303": {"1": 2, "7": 0}}


def fresh_ir_datasets(monkeypatch, home):
    """Import ir_datasets again, with `home` as its home. After the test, the modules imported before are restored."""
    monkeypatch.setenv("IR_DATASETS_HOME", str(home))
    monkeypatch.setenv("IR_DATASETS_DL_TRIES", "1")
    for name in [name for name in sys.modules if name.partition(".")[0] == "ir_datasets"]:
        monkeypatch.delitem(sys.modules, name)
    logging.getLogger("ir_datasets").handlers.clear()  # each import adds a handler
    module = importlib.import_module("ir_datasets")
    for name in [name for name in sys.modules if name.partition(".")[0] == "ir_datasets"]:
        fresh = sys.modules.pop(name)  # monkeypatch also removes it after the test
        monkeypatch.setitem(sys.modules, name, fresh)
    return module


def shared_data():
    """Return the folder of real collections beside the checkout, or None."""
    folder = Path(
        os.environ.get("RANKER_SHARED_DATA") or Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
    )
    return folder.resolve() if folder.is_dir() else None


def lay_out_small(home):
    """Write cranfield, vaswani and beir/scifact into a home folder with the script that lies beside the data."""
    script = shared_data() / "prepare_ir_datasets_home.py"
    spec = importlib.util.spec_from_file_location("prepare_ir_datasets_home", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.prepare(home=home)


def lay_out_msmarco(home, ir_datasets):
    """Write the archives that ir_datasets would download. If it would not keep an archive, let it read ours.

    Checksums are verified only at a download, so the real classes read these archives like the real ones.
    """
    base = Path(home) / "msmarco-passage"
    files = {
        "collectionandqueries.tar.gz": _tar(
            {
                "collection.tsv": _tsv(PASSAGES),
                "queries.train.tsv": _tsv(TRAIN_QUERIES),
                "queries.dev.small.tsv": _tsv(DEV_QUERIES),
                "qrels.dev.small.tsv": _qrels(DEV_QRELS),
            }
        ),
        "queries.tar.gz": _tar({"queries.train.tsv": _tsv(TRAIN_QUERIES), "queries.dev.tsv": _tsv(DEV_QUERIES)}),
        "train/qrels": _qrels(TRAIN_QRELS).encode(),
        "train/docpairs.tsv.gz": gzip.compress("".join("\t".join(triple) + "\n" for triple in TRIPLES).encode()),
        "top1000.dev.tar.gz": _tar(
            {"top1000.dev": "".join(f"{q}\t{d}\t{DEV_QUERIES[q]}\t{PASSAGES[d]}\n" for q, d in TOP1000_DEV)}
        ),
        "trec-dl-2019/qrels": _qrels(DL19_QRELS, iteration="Q0").encode(),
        "msmarco-test2019-queries.tsv.gz": gzip.compress(_tsv(DL19_QUERIES).encode()),
        "trec-dl-2020/qrels": _qrels(DL20_QRELS).encode(),
        "trec-dl-2020/queries.tsv.gz": gzip.compress(_tsv(DL20_QUERIES).encode()),
    }
    for name, content in files.items():
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    subsets = ir_datasets.datasets.msmarco_passage.subsets
    top1000 = subsets["dev/small"].scoreddocs_handler()._scoreddocs_dlc._streamer._streamer._streamer
    top1000._cache_path = base / "top1000.dev.tar.gz"
    queries19 = subsets["trec-dl-2019"].queries_handler()._dlc._streamer._streamer
    queries19._cache_path = base / "msmarco-test2019-queries.tsv.gz"


def lay_out_unpacked_msmarco(home):
    """Write the files that ir_datasets keeps after the download of a (tiny) MS MARCO, so that a program reads them."""
    base = Path(home) / "msmarco-passage"
    files = {
        "irds_version.txt": b"v2",
        "collection.tsv": _tsv(PASSAGES).encode(),
        "dev/small/queries.tsv": _tsv(DEV_QUERIES).encode(),
        "dev/small/qrels": _qrels(DEV_QRELS).encode(),
        "trec-dl-2019/qrels": _qrels(DL19_QRELS, iteration="Q0").encode(),
        "trec-dl-2019/queries.tsv": _tsv(DL19_QUERIES).encode(),
        "trec-dl-2020/qrels": _qrels(DL20_QRELS).encode(),
        "trec-dl-2020/queries.tsv.gz": gzip.compress(_tsv(DL20_QUERIES).encode()),
    }
    for name, content in files.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_bytes(content)


def _tsv(texts):
    return "".join(f"{key}\t{text}\n" for key, text in texts.items())


def _qrels(qrels, iteration="0"):
    return "".join(f"{q}\t{iteration}\t{d}\t{grade}\n" for q, judged in qrels.items() for d, grade in judged.items())


def _tar(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()
