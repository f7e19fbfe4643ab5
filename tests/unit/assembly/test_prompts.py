"""Prompts and instructions of a set or of each query: rows are the whole prompt, tokenized at once."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from omegaconf import OmegaConf

from ranker.assembly.labelling import docs_to_score
from ranker.assembly.prompts import has_instructions, inputs_of
from ranker.assembly.suite import validation_suite
from ranker.data.datamodule import RankData
from ranker.data.instructions import BUDGET
from ranker.data.options import BatchOptions
from ranker.data.scorer_inputs import TextLimits
from ranker.data.sources.rows import Rows
from ranker.encoders.loading import load_encoder
from ranker.errors import ConfigError
from ranker.models.colbert import ColBERT
from ranker.models.dpr import DPR
from ranker.models.lm_reranker import LMReranker
from ranker.models.monobert import MonoBERT
from ranker.models.splade import SPLADE

PAIR = "Task: {instruction}\nQuery: {query} [SEP] {doc} ?"
QUERY = "Instruct: {instruction}\nQuery: {query}"
ROWS = [
    {"task": "find apples", "q": "how far", "positive": "the river runs", "negative": "a hundred miles"},
    {"task": "find the river", "q": "how far", "positive": "an apple", "negative": "or a pear"},
    {"task": "", "q": "what is it ?", "positive": "b c", "negative": "an apple, or a pear"},
    {"task": "say " * 100, "q": "word " * 30, "positive": "the end", "negative": "a start"},
]
LIMITS = TextLimits(12, 30)


@pytest.fixture
def splits(tmp_path):
    """Rows with an instruction for each query."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    columns = {"query": "q", "positive": "positive", "negative": "negative", "instruction": "task"}
    return Rows(train=str(path), columns=columns, val_queries=0, cache_dir=str(tmp_path / "cache")).load()


def rows_of(batch):
    ends = batch.cu_seqlens.tolist()
    return [batch.tokens[a:b].tolist() for a, b in pairwise(ends)]


def step_of(splits, inputs, tmp_path):
    data = RankData(splits, inputs, BatchOptions(queries=8, docs=2), LIMITS, cache_dir=tmp_path / "cache")
    (batch,) = data.train_steps()[0, 0].micro_batches
    return batch


def beginning(tokenizer, text, count):
    """The beginning of a text: its first `count` tokens, cut by their offsets."""
    ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return text[: ends[min(count, len(ends)) - 1][1]] if ends else ""


@pytest.mark.parametrize(
    ("name", "model", "options"),
    [("tiny", MonoBERT, {"prompt": PAIR}), ("tiny_lm", LMReranker, {"prompt": PAIR, "yes_word": "a", "no_word": "b"})],
)
def test_each_query_of_rows_has_its_instruction_in_the_prompt(splits, tmp_path, name, model, options):
    scorer = model(load_encoder(name), **options)
    assert has_instructions(splits)
    assert dict(splits.train.queries).values() and "how far" in set(splits.train.queries.values())
    batch = step_of(splits, inputs_of(scorer, None, options, by_query=True), tmp_path)
    tokenizer = scorer.encoder.tokenizer
    expected = [
        tokenizer(
            PAIR.format(
                instruction=beginning(tokenizer, row["task"], BUDGET),
                query=beginning(tokenizer, row["q"], LIMITS.query),
                doc=row[doc],
            )
        )["input_ids"]
        for row in ROWS
        for doc in ("positive", "negative")
    ]
    ends = 0 if model is MonoBERT else 1
    expected = [ids if ids[-1] != tokenizer.eos_token_id or not ends else ids[:-1] for ids in expected]
    assert sorted(rows_of(batch.pairs)) == sorted(expected)


def test_each_query_of_a_bi_encoder_has_its_instruction(splits, tmp_path):
    scorer = DPR(load_encoder("tiny"))
    batch = step_of(splits, inputs_of(scorer, None, {"query_prompt": QUERY, "doc_prompt": "Doc: "}, True), tmp_path)
    tokenizer = scorer.encoder.tokenizer
    texts = [
        QUERY.format(
            instruction=beginning(tokenizer, row["task"], BUDGET), query=beginning(tokenizer, row["q"], LIMITS.query)
        )
        for row in ROWS
    ]
    assert sorted(rows_of(batch.queries)) == sorted(tokenizer(texts)["input_ids"])
    docs = [f"Doc: {row[key]}" for row in ROWS for key in ("positive", "negative")]
    assert sorted(rows_of(batch.docs)) == sorted(tokenizer(docs)["input_ids"])


def test_a_set_has_its_instruction_or_its_prompt():
    tokenizer = (encoder := load_encoder("tiny")).tokenizer
    mono, dpr, colbert = MonoBERT(encoder, prompt=PAIR, instruction="find"), DPR(encoder), ColBERT(encoder)
    assert inputs_of(mono, {"weight": 2}, {"prompt": PAIR}).pair == mono.pair_layout()
    model = {"prompt": PAIR, "instruction": "find"}
    for node, prompt in (
        ({"instruction": "find apples"}, PAIR.replace("{instruction}", "find apples")),
        ({"prompt": "{query} or {doc}", "instruction": ""}, "{query} or {doc}"),
    ):
        layout = inputs_of(mono, node, model).pair
        other = MonoBERT(encoder, prompt=prompt).pair_layout()
        assert layout == other != mono.pair_layout()
    for scorer, before in ((dpr, "Instruct: find apples\nQuery: "), (colbert, "Instruct: find apples Query: ")):
        queries, docs = inputs_of(scorer, {"instruction": "find apples"}, {"query_prompt": QUERY}).layouts
        ids = tokenizer(before + "a")["input_ids"]
        assert [*queries.specials[0]] == ids[: len(queries.specials[0])] and docs.num_special == 2
        assert queries.num_special == len(ids) - 1 and queries.fill_to == (32 if scorer is colbert else 0)


@pytest.mark.parametrize(
    ("model", "node", "by_query", "message"),
    [
        ({"query_prompt": "Query: "}, None, True, "model.query_prompt: expected a template with {instruction} before"),
        ({"query_prompt": QUERY}, {"instruction": "a"}, True, "instruction: expected null for a set whose queries"),
        ({"query_prompt": QUERY}, {"prompt": PAIR}, False, "prompt: expected null for DPR, which has no such prompt"),
        ({"query_prompt": ""}, {"instruction": "a"}, False, "model.instruction: expected a query_prompt or doc_prompt"),
        ({}, {"instruction": "a"}, False, "checkpoint: expected a run folder, whose configuration has the prompt with"),
    ],
)  # fmt: skip
def test_an_instruction_without_a_place_is_refused(model, node, by_query, message):
    with pytest.raises(ConfigError) as refused:
        inputs_of(DPR(load_encoder("tiny")), node, model, by_query)
    assert str(refused.value).startswith(message)


def test_who_can_t_read_them_says_so(splits, tmp_path):
    with pytest.raises(ConfigError, match="instruction: expected null for SPLADE, which has no such prompt"):
        inputs_of(SPLADE(load_encoder("tiny")), {"instruction": "a"}, {"query_prompt": QUERY})
    plain = inputs_of(DPR(load_encoder("tiny")), None, {})
    with pytest.raises(ConfigError, match="expected queries without instructions"):
        step_of(splits, plain, tmp_path)
    assert np.unique([len(row) for row in splits.train.instructions.values()]).tolist() == [0, 11, 14, 400]


def test_commands_that_can_t_read_them_refuse_them_before_any_work(splits, tmp_path):
    columns = {"query": "q", "positive": "positive", "negative": "negative", "instruction": "task"}
    node = {"_target_": "ranker.data.sources.rows.Rows", "train": str(tmp_path / "rows.jsonl"), "columns": columns}
    node["_convert_"] = "all"
    cfg = {"data": {**node, "val_queries": 0}, "split": "train", "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(ConfigError, match=r"^train: expected queries without instructions"):
        docs_to_score(OmegaConf.create(cfg), OmegaConf.create({}))  # of label, merge, compress and calibrate


def test_a_suite_of_them_is_refused_before_the_work_unless_the_training_has_a_prompt_for_them(splits, tmp_path):
    columns = {"query": "q", "positive": "positive", "negative": "negative", "instruction": "task"}
    node = {
        "_target_": "ranker.data.sources.rows.Rows",
        "_convert_": "all",
        "test": str(tmp_path / "rows.jsonl"),
        "columns": columns,
    }
    cfg = {"suite": {"sets": {"own": node}}, "depth": 5, "val_depth": None, "cache_dir": str(tmp_path / "cache")}
    plain = replace(splits, train=replace(splits.train, instructions=None))
    with pytest.raises(ConfigError, match=r"^own: expected queries without instructions"):
        validation_suite(OmegaConf.create(cfg), plain)
    (kept,) = validation_suite(OmegaConf.create(cfg), splits).values()
    assert kept.instructions is not None
