"""Compare the packaged teacher's float32 scores with those of its int8 graph in onnxruntime.

    python -m ranker.labelling.packaged_teacher teacher
    python benchmarks/packaged_teacher.py teacher                          # 30 test queries of cwe, BM25's top 10
    python benchmarks/packaged_teacher.py teacher data=files data.path=DIR # the same for another collection

Both have weights rounded to int8, but only the graph also rounds activations. The rounding of activations depends on
the whole batch, so each pair is scored alone. The script needs the extra `teacher` (or `--wheel`, here and in the first
command).
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from one_line import one_line
from scipy.stats import kendalltau, pearsonr
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ranker.assembly.data import chosen_sets, load_source
from ranker.cli import entry
from ranker.config.roots import CONF
from ranker.data.collection import Collection, Splits
from ranker.labelling.packaged_teacher import reader
from ranker.retrieval.first_stage import FirstStage, with_candidates


def test_set(overrides: list[str], depth: int) -> Collection:
    """Return the test set of the configuration, with BM25's candidates."""
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        data = compose("train", ["name=x", *overrides]).data
    sets = chosen_sets(load_source(data), "test")
    splits = with_candidates(Splits(None, None, sets), depth, ".cache", FirstStage.of(data))
    return next(iter(splits.tests.values()))


def main() -> None:
    import onnxruntime

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*", help="the data, as for train.py")
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--queries", type=int, default=30)
    parser.add_argument("--docs", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=512)
    options = parser.parse_args()
    collection = test_set(options.overrides, options.docs)
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    model = AutoModelForSequenceClassification.from_pretrained(options.folder).eval()
    graph = onnxruntime.InferenceSession(reader(options.wheel)("model.onnx"))
    ours, theirs, tokens, taus = [], [], [], []
    for query_id in list(collection.qrels)[: options.queries]:
        for doc_id in collection.candidates[query_id][: options.docs]:
            pair = (collection.queries[query_id], collection.docs[doc_id].full_text)
            encoded = tokenizer(*pair, truncation="longest_first", max_length=options.max_tokens, return_tensors="pt")
            with torch.inference_mode():
                ours.append(model(**encoded).logits.item())
            theirs.append(graph.run(None, {key: value.numpy() for key, value in encoded.items()})[0].item())
            tokens.append(encoded["input_ids"].shape[1])
        part = slice(len(ours) - len(collection.candidates[query_id][: options.docs]), None)
        taus.append(kendalltau(ours[part], theirs[part]).statistic)
    gaps = np.abs(np.subtract(ours, theirs))
    print(f"{collection.name}: {len(ours)} pairs, {np.mean(tokens):.0f} tokens on average, the longest {max(tokens)}")
    print(f"scores from {min(ours):.2f} to {max(ours):.2f}, standard deviation {np.std(ours):.2f}")
    print(f"|float32 - int8|: mean {gaps.mean():.3f}, 95 % below {np.quantile(gaps, 0.95):.3f}, most {gaps.max():.3f}")
    print(f"Pearson {pearsonr(ours, theirs).statistic:.4f}, Kendall's tau per query {np.nanmean(taus):.3f}")


if __name__ == "__main__":
    one_line(main)
