"""Train a cross-encoder on a collection defined in Python: the classes that `train.py` uses, without yaml files."""

import tempfile
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch

from ranker.data.collection import Collection, Doc, MemoryDocs, Splits
from ranker.data.datamodule import RankData
from ranker.data.options import BatchOptions
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.encoders.loading import load_encoder
from ranker.evaluation.report import write_evaluation
from ranker.evaluation.scoring import Devices, score_collection
from ranker.losses.lce import LCE
from ranker.models.monobert import MonoBERT
from ranker.retrieval.first_stage import with_candidates
from ranker.training.options import Optimization
from ranker.training.rerank_module import RerankModule
from ranker.training.schedules import linear

FRUITS = """apple apricot banana blackberry blueberry cherry coconut fig grape grapefruit guava kiwi
lemon lime mango melon nectarine orange papaya peach pear pineapple plum raspberry""".split()  # noqa: SIM905
HINTS = {"red": "the colour of blood", "green": "the colour of grass"}
DOCS = MemoryDocs(
    Doc(f"{fruit}{n}", f"{n} {fruit} in {'a red' if n % 2 else 'a green'} bowl") for fruit in FRUITS for n in range(8)
)


def part(name: str, fruits: list[str]) -> Collection:
    """Build one split: queries name a fruit and describe a colour; bowls of that fruit and colour are relevant.

    The docs name the colour itself, so BM25 can't match it.
    """
    queries = {f"{fruit}-{colour}": f"{fruit} in {HINTS[colour]}" for fruit in fruits for colour in HINTS}
    qrels = {
        query_id: {f"{query_id.split('-')[0]}{n}": 1 for n in range(8) if (n % 2 == 1) == query_id.endswith("red")}
        for query_id in queries
    }
    return Collection(name, DOCS, queries, qrels)


def main() -> dict:
    """Train 60 steps and measure; the encoder is the packaged 2 x 128 encoder (extra `demo`)."""
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp())
    splits = with_candidates(
        Splits(part("train", FRUITS[:20]), None, {"fruit": part("fruit", FRUITS[20:])}), depth=8, cache_dir=folder
    )
    scorer = MonoBERT(load_encoder("model", package="cognition", dropout=0.0, attention_dropout=0.0))
    batch = BatchOptions(queries=8, docs=4, max_tokens=4096)
    data = RankData(splits, ScorerInputs.of(scorer), batch, TextLimits(16, 32), cache_dir=folder)
    optimization = Optimization(partial(torch.optim.AdamW, lr=5e-4), partial(linear, warmup=0.1), total_steps=60)
    module = RerankModule(scorer, ["nDCG@10"], LCE(), optimization)
    quiet = {"enable_model_summary": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_steps=60, accelerator="cpu", logger=False, **quiet)
    trainer.fit(module, datamodule=data)
    test = splits.tests["fruit"]
    run = score_collection(scorer, data.score_batches(test), Devices(torch.device("cpu")))
    return write_evaluation(folder / "fruit", run, test.qrels, ["nDCG@10", "RR@10"])


if __name__ == "__main__":
    print(main())
