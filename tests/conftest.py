"""Small collections and encoders that tests generate. No network is needed."""

import gc
import os
import random
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

gc.disable()  # the collection of the tests imports everything and leaves hardly any garbage


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but rarely, and not among the imported modules and tests; compose faster."""
    from tests.assets.composition import remember

    remember()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("RANKER_SHARED_DATA", ROOT.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the folder of the checkout."""
    return ROOT


@pytest.fixture
def shared_data() -> Path:
    """Return the folder of real collections beside a developer's checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the collections in {SHARED}; set RANKER_SHARED_DATA")
    return SHARED


@pytest.fixture(scope="session")
def small_files(tmp_path_factory) -> Path:
    """Return a folder in the `files` format: 40 queries over 60 docs; a query's words are words of its relevant doc."""
    folder = tmp_path_factory.mktemp("small")
    rng = random.Random(5)
    words = [first + second for first in "bdfgklmnprst" for second in ("ab", "el", "ir", "om", "un")]
    texts = [" ".join(rng.choices(words, k=rng.randint(4, 20))) for _ in range(60)]
    import json

    (folder / "docs.jsonl").write_text(
        "".join(json.dumps({"id": f"d{i}", "text": text}) + "\n" for i, text in enumerate(texts))
    )
    (folder / "queries.tsv").write_text(
        "".join(f"q{i}\t{' '.join(rng.sample(texts[i].split(), 3))}\n" for i in range(40))
    )
    for split, numbers in {"train": range(24), "dev": range(24, 32), "test": range(32, 40)}.items():
        (folder / f"qrels.{split}.txt").write_text("".join(f"q{i} 0 d{i} 1\n" for i in numbers))
    return folder
