"""Step plans, pair layouts and collation."""

from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from ranker.data.collate import Collator
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.step_plan import StepPlan, deal, fill
from ranker.data.template import Template
from ranker.data.token_store import build_token_store
from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_tokenizer
from ranker.errors import ConfigError, DataError
from ranker.models.dpr import DPR
from ranker.models.monobert import MonoBERT


@pytest.fixture
def collator_of(tmp_path):
    def make(
        queries: list[str], docs: list[str], max_pair_tokens=None, max_query_tokens=64, reads="pairs", positions=512
    ):
        tokenizer = tiny_tokenizer()
        stores = [
            build_token_store(
                [(str(i), text) for i, text in enumerate(texts)],
                tmp_path / reads / name,
                tokenizer,
                64,
                fingerprint=name,
            )
            for name, texts in (("queries", queries), ("docs", docs))
        ]
        return tokenizer, Collator.of(
            ScorerInputs(tokenizer, reads, positions), *stores, TextLimits(max_query_tokens, 64, max_pair_tokens)
        )

    return make


def pair(collator, query: int, doc: int):
    batch = collator.collate(np.array([query]), np.array([[doc]]), np.ones((1, 1)), np.array([0]), 1.0)
    return batch.pairs.tokens.tolist(), batch.pairs.segments.tolist()


def test_pc35_only_the_doc_is_cut(collator_of):
    tokenizer, collator = collator_of(["q q q"], ["a b c d e"], max_pair_tokens=8)
    tokens, segments = pair(collator, 0, 0)
    assert tokenizer.convert_ids_to_tokens(tokens) == ["[CLS]", "q", "q", "q", "[SEP]", "a", "b", "[SEP]"]
    assert segments == [0, 0, 0, 0, 0, 1, 1, 1]


def test_a_query_longer_than_the_pair_is_capped_and_never_crashes(collator_of):
    tokenizer, collator = collator_of(["q " * 60], ["a b"], max_pair_tokens=8)
    tokens, _ = pair(collator, 0, 0)
    assert tokenizer.convert_ids_to_tokens(tokens) == ["[CLS]", "q", "q", "q", "q", "[SEP]", "a", "[SEP]"]


def test_pc43_a_pair_is_never_longer_than_the_positions(collator_of):
    _, collator = collator_of(["q"], ["a " * 50], max_pair_tokens=33, positions=32)
    assert collator.max_pair_tokens == 32
    assert len(pair(collator, 0, 0)[0]) == 32


def test_pc37_pc38_literal_control_tokens_are_text(collator_of):
    tokenizer, collator = collator_of(["q"], ["a [SEP] b [PAD]"])
    tokens, _ = pair(collator, 0, 0)
    assert tokens.count(tokenizer.sep_token_id) == 2
    assert tokenizer.pad_token_id not in tokens
    assert "se" in "".join(tokenizer.convert_ids_to_tokens(tokens))


def test_pairs_equal_the_tokenizers_own(collator_of):
    queries, docs = ["ab cd", "x", "how far, is it?"], ["one two", "z", "three 4 five; six"]
    tokenizer, collator = collator_of(queries, docs)
    for q, query in enumerate(queries):
        for d, doc in enumerate(docs):
            expected = tokenizer(query, doc)
            assert pair(collator, q, d) == (expected["input_ids"], expected["token_type_ids"])


def test_an_empty_doc_keeps_its_separator(collator_of):
    _, collator = collator_of(["q"], [""])
    assert pair(collator, 0, 0)[1] == [0, 0, 0, 1]  # transformers would take it for a single text


def test_templates_of_bert_and_roberta(tmp_path):
    assert Template.of(tiny_tokenizer(), 2) == Template(((2,), (3,), (3,)), (0, 1))
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(
        models.WordLevel({"<s>": 0, "<pad>": 1, "</s>": 2, "a": 3, "b": 4, "<unk>": 5}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>").save_pretrained(tmp_path)
    assert Template.of(AutoTokenizer.from_pretrained(tmp_path), 2) == Template(((0,), (2, 2), (2,)), (0, 0))


def test_token_types_are_those_of_the_tokenizers_own_call():
    from tokenizers import processors

    tokenizer = tiny_tokenizer()
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    assert "token_type_ids" not in tokenizer("a", "b")
    assert Template.of(tokenizer, 2) == Template(((2,), (3,), (3,)), (0, 0))
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(  # Funnel's
        single="[CLS]:2 $A [SEP]:0", pair="[CLS]:2 $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    layout = Template.of(tokenizer, 2)
    assert (layout.segments, layout.special_segments) == ((0, 1), ((2,), (0,), (1,)))
    assert Template.of(tokenizer, 1).with_prompt([7, 8]).special_segments == ((2, 0, 0), (0,))


def test_rows_have_the_token_types_of_the_tokenizers_own_call(collator_of):
    from tokenizers import processors

    tokenizer, collator = collator_of(["q r"], ["s t u"])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:2 $A [SEP]:0", pair="[CLS]:2 $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    expected = tokenizer("q r", "s t u")
    mine = pair(replace(collator, pair=Template.of(tokenizer, 2)), 0, 0)
    assert mine == (expected["input_ids"], expected["token_type_ids"])


def test_group_sizes_are_the_collated_tokens(collator_of):
    rng = np.random.default_rng(0)
    queries, docs = ["q " * int(n) for n in rng.integers(1, 20, 6)], ["d " * int(n) for n in rng.integers(0, 40, 9)]
    doc_rows = rng.integers(-1, 9, (6, 4))
    doc_rows[:, 0] = 3
    for reads in ("pairs", "texts"):
        _, collator = collator_of(queries, docs, max_pair_tokens=30, reads=reads)
        sizes = collator.group_sizes(np.arange(6), doc_rows)
        for group in range(6):
            batch = collator.collate(
                np.array([group]), doc_rows[group : group + 1], np.zeros((1, 4)), np.array([0]), 1.0
            )
            assert sizes[group] == sum(
                texts.num_tokens for texts in (batch.pairs, batch.queries, batch.docs) if texts is not None
            )


def test_no_room_for_a_pair_is_a_config_error(collator_of):
    with pytest.raises(ConfigError, match="pair_tokens: expected at least 5"):
        collator_of(["q"], ["d"], max_pair_tokens=4)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("max_tokens", [40, 100, 10_000])
def test_a_step_is_dealt_whole_and_within_the_budget(world, max_tokens):
    plan = StepPlan(num_groups=23, groups_per_step=8, max_tokens=max_tokens, seed=1)
    sizes_of = np.random.default_rng(0).integers(5, 40, 23)
    seen = []
    for step in range(len(plan)):
        groups = plan.groups(0, step)
        parts = [part for rank in range(world) for part in plan.micro_batches(sizes_of[groups].tolist(), rank, world)]
        assert all(sizes_of[groups][part].sum() <= max_tokens for part in parts)
        assert sorted(group for part in parts for group in part) == list(range(len(groups)))
        seen += groups.tolist()
    assert len(plan) == 3
    assert sorted(seen) == list(range(23))


def test_pc70_epochs_differ_and_repeat():
    plan = StepPlan(num_groups=40, groups_per_step=40, max_tokens=100, seed=1)
    assert plan.groups(0, 0).tolist() != plan.groups(1, 0).tolist()
    assert plan.groups(1, 0).tolist() == StepPlan(40, 40, 100, seed=1).groups(1, 0).tolist()


def test_min_micro_batches_and_an_empty_device():
    plan = StepPlan(num_groups=4, groups_per_step=4, max_tokens=100, min_micro_batches=3)
    assert len(plan.micro_batches([5, 5, 5, 5], 0, 1)) == 3
    assert plan.micro_batches([5], 1, 2) == []


def test_a_group_over_the_budget_is_refused():
    with pytest.raises(DataError, match="max_tokens: expected at least 41"):
        StepPlan(2, 2, 40).micro_batches([41, 3], 0, 1)


def test_deal_is_balanced():
    sizes = np.random.default_rng(0).integers(10, 100, 64).tolist()
    loads = [sum(sizes[i] for i in part) for part in deal(sizes, 8)]
    assert max(loads) <= 1.02 * min(loads)


def test_an_item_over_the_budget_stands_alone_and_no_batch_is_empty():
    cut = [part.tolist() for part in fill(np.array([4, 2, 9, 7, 1]), np.array([20, 3, 7, 11, 1]), 10)]
    assert cut == [[4], [2, 9], [7], [1]]
    assert fill(np.array([], dtype=np.int64), np.array([], dtype=np.int64), 10) == []


@pytest.mark.parametrize(
    ("reads", "longest_query", "longest_doc"), [("pairs", 32 - 3 - 1, 32 - 3), ("texts", 32 - 2, 32 - 2)]
)
def test_texts_are_cut_to_what_the_positions_leave(collator_of, reads, longest_query, longest_doc):
    _, collator = collator_of(["q"], ["a"], reads=reads, positions=32)
    assert (collator.max_query_tokens, collator.max_doc_tokens) == (longest_query, longest_doc)


@pytest.mark.parametrize("reads", ["pairs", "texts"])
def test_a_group_costs_the_tokens_of_all_its_docs_the_first_of_the_store_too(collator_of, reads):
    _, collator = collator_of(["q q", "q"], ["a a a", "b", "c c"], reads=reads)
    query_rows, doc_rows = np.array([0, 1]), np.array([[0, 1, 2], [2, 0, -1]])
    costs = {
        "pairs": [3 * (2 + 3) + 3 + 1 + 2, 2 * (1 + 3) + 2 + 3],  # each pair: query, three special tokens, doc
        "texts": [2 + 2 + 3 * 2 + 3 + 1 + 2, 1 + 2 + 2 * 2 + 2 + 3],  # each text: two special tokens
    }[reads]
    assert collator.group_sizes(query_rows, doc_rows).tolist() == costs
    batch = collator.collate(query_rows, doc_rows, np.ones(doc_rows.shape), np.arange(2), 1.0)
    assert sum(part.num_tokens for part in (batch.pairs, batch.queries, batch.docs) if part is not None) == sum(costs)


@pytest.mark.parametrize("attend", [True, False])
def test_filled_rows_say_which_tokens_are_attended_to(collator_of, attend):
    tokenizer, collator = collator_of(["q", "q q q"], ["a"], reads="texts")
    plain = collator.query_batch(np.array([0, 1]))
    assert plain.attended is None and plain.num_attended == 0
    layout = replace(collator.query, fill_to=5, fill_token=tokenizer.mask_token_id, attend_fill=attend)
    batch = replace(collator, query=layout).query_batch(np.array([0, 1]))
    assert batch.cu_seqlens.tolist() == [0, 5, 10]  # a row of 3 tokens and two of filling, one of 5 and none
    assert batch.tokens[3:5].tolist() == [tokenizer.mask_token_id] * 2
    assert batch.segments.tolist() == [0] * 10
    assert (None if attend else [3, 5]) == (None if batch.attended is None else batch.attended.tolist())
    assert batch.num_attended == (0 if attend else 8)


def test_a_step_is_cut_into_as_few_micro_batches_as_its_deal_allows():
    # 20 tokens would fill two of 10, but no two of 6, 6 and 5 fit together
    assert StepPlan(6, 6, 10).micro_batches([6, 6, 5, 1, 1, 1], 0, 1) == [[0, 4], [1, 5], [2, 3]]


@pytest.mark.parametrize(("scorer", "reads"), [(MonoBERT, "pairs"), (DPR, "texts")])
def test_the_inputs_of_a_scorer(scorer, reads):
    made = scorer(load_encoder("tiny"))
    inputs = ScorerInputs.of(made)
    assert (inputs.tokenizer, inputs.reads, inputs.max_positions) == (
        made.encoder.tokenizer,
        reads,
        made.encoder.max_tokens,
    )
