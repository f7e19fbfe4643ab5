"""ColBERT: MaxSim without padding, query expansion, markers, punctuation."""

import pytest
import torch

from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.loading import load_encoder
from ranker.errors import ConfigError
from ranker.interactions.maxsim import TextVectors, maxsim_all, maxsim_pairs
from ranker.models.colbert import ColBERT

ROWS = [[0, 1, 2, 3], [1, -1, 3, -1], [2, 2, -1, 0]]


def scorer_of(**options) -> ColBERT:
    torch.manual_seed(0)
    options = {"projection": 8, "query_length": 12, "query_prompt": "zq", "doc_prompt": "zd", **options}
    return ColBERT(load_encoder("tiny", dropout=0.0, attention_dropout=0.0), **options).eval()


def test_pc56_padding_never_wins_the_maximum():
    query = TextVectors(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    one = torch.tensor([[-0.6, 0.8]])
    alone = TextVectors(one, torch.tensor([1]))
    among = TextVectors(torch.cat([one, torch.rand(5, 2)]), torch.tensor([1, 5]))  # padded to five vectors
    assert maxsim_pairs(query, alone, torch.tensor([0])).item() == pytest.approx(-0.6)
    assert maxsim_pairs(query, among, torch.tensor([0, 0]))[0].item() == pytest.approx(-0.6)
    assert maxsim_all(query, among)[0, 0].item() == pytest.approx(-0.6)


def test_pc56_padded_query_tokens_add_nothing():
    queries = TextVectors(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([1, 2]))
    doc = TextVectors(torch.tensor([[0.5, 0.25]]), torch.tensor([1]))
    assert maxsim_all(queries, doc).flatten().tolist() == [0.5, 0.75]


def test_a_score_is_the_same_alone_and_in_a_batch_ragged_and_padded(texts):
    scorer = scorer_of()
    together = texts(scorer, ROWS)
    with torch.no_grad():
        scores = scorer(together)
        assert (scores[~together.doc_mask] == 0).all()
        for group, row in enumerate(ROWS):
            for place, doc in enumerate(row):
                if doc >= 0:
                    alone = scorer(texts(scorer, [[doc] if i == group else [0] for i in range(3)]))[group, 0]
                    torch.testing.assert_close(alone, scores[group, place], rtol=0, atol=1e-5)
        scorer.encoder = Encoder(scorer.encoder.model, scorer.encoder.tokenizer, Execution(ragged=False))
        torch.testing.assert_close(scorer(together), scores, rtol=0, atol=1e-5)


def test_a_score_is_the_sum_of_the_best_cosines(texts):
    scorer = scorer_of()
    batch = texts(scorer, [[0], [1], [2]])
    with torch.no_grad():
        queries, docs = scorer.encode_queries(batch.queries), scorer.encode_docs(batch.docs)
        assert queries.counts.tolist() == [12, 12, 12] and torch.allclose(docs.values.norm(dim=1), torch.tensor(1.0))
        expected = [
            max_per_token.sum().item()
            for max_per_token in (
                (q @ d.T).max(1).values
                for q, d in zip(
                    queries.values.split(queries.counts.tolist()), docs.values.split(docs.counts.tolist()), strict=True
                )
            )
        ]
        assert scorer(batch).flatten().tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("ragged", [True, False])
def test_pc58_expansion_leaves_the_querys_own_vectors_as_they_are_unless_it_is_attended_to(texts, ragged):
    plain, apart, attended = scorer_of(query_length=0), scorer_of(), scorer_of(attend_to_expansion=True)
    vectors = {}
    for name, scorer in (("plain", plain), ("apart", apart), ("attended", attended)):
        scorer.encoder = Encoder(scorer.encoder.model, scorer.encoder.tokenizer, Execution(ragged=ragged))
        with torch.no_grad():
            vectors[name] = scorer.encode_queries(texts(scorer, [[0], [1], [2]]).queries)
    own = int(vectors["plain"].counts[0])
    assert own < 12
    torch.testing.assert_close(vectors["apart"].values[:own], vectors["plain"].values[:own], rtol=0, atol=1e-6)
    assert (vectors["attended"].values[:own] - vectors["plain"].values[:own]).abs().max() > 1e-3
    expansion = vectors["apart"].values[own:12]
    assert (expansion.norm(dim=1) > 0.99).all() and (expansion[0] - expansion[1]).abs().max() > 1e-3


def test_pc58_both_settings_are_saved(tmp_path):
    for attend in (False, True):
        scorer_of(attend_to_expansion=attend, query_length=9).save(tmp_path / str(attend), 100, 50)
        back = ColBERT.load(tmp_path / str(attend))
        assert (back.query_length, back.attend_to_expansion) == (9, attend)


def test_expansion_takes_part_in_the_sum(texts):
    with_masks, without = (scorer_of(query_length=length) for length in (12, 0))
    scores = [scorer(texts(scorer, [[0], [1], [2]], ["a", "b", "c"])) for scorer in (with_masks, without)]
    assert (scores[0] - scores[1]).abs().min() > 1e-3


def test_punctuation_has_no_vectors_in_docs_and_has_in_queries(texts):
    masked, whole = scorer_of(), scorer_of(mask_punctuation=False)
    queries, docs = ["is it? yes.", "a", "b"], ["well, yes. no!", "...", "c", "d"]
    batches = [texts(scorer, [[0, 1], [2, 3], [3, 2]], queries, docs) for scorer in (masked, whole)]
    kept = [masked.encode_docs(batches[0].docs).counts.tolist(), whole.encode_docs(batches[1].docs).counts.tolist()]
    assert [full - few for few, full in zip(*kept, strict=True)] == [3, 3, 0, 0, 0, 0]
    assert kept[0][1] == 3  # [CLS] zd [SEP] stay where a doc is nothing but punctuation
    assert (
        masked.encode_queries(batches[0].queries).counts.tolist()
        == whole.encode_queries(batches[1].queries).counts.tolist()
    )
    assert kept[0] == masked.doc_vector_counts(batches[0].docs).tolist()


def test_markers_stand_after_the_first_token_and_no_text_holds_them(texts):
    scorer = scorer_of(query_prompt="zq", doc_prompt="z-d")
    batch = texts(scorer, [[0], [1], [2]], ["ab", "b", "c"], ["ab zq", "d", "e", "f"])
    names = scorer.encoder.tokenizer.convert_ids_to_tokens
    assert names(batch.queries.tokens[:12]) == ["[CLS]", "zq", "ab", "[SEP]", *["[MASK]"] * 8]
    # neither in this vocabulary nor in brackets: a text
    assert names(batch.docs.tokens[: int(batch.docs.cu_seqlens[1])])[:4] == ["[CLS]", "z", "-", "d"]
    assert "zq" not in names(batch.docs.tokens)
    assert batch.queries.attended.tolist() == [4, 4, 4] and batch.queries.num_attended == 12


def test_markers_that_the_vocabulary_lacks_are_added_with_the_mean_of_all_embeddings(texts):
    encoder = load_encoder("tiny")
    table = encoder.model.get_input_embeddings().weight.detach().clone()
    state = torch.get_rng_state()
    scorer = ColBERT(encoder, projection=None, query_prompt="[Q]", doc_prompt="<doc>")
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn, so other weights start as without markers
    weight = scorer.encoder.model.get_input_embeddings().weight
    assert weight.requires_grad and encoder.config.vocab_size == len(weight) == len(table) + 2
    torch.testing.assert_close(weight, torch.cat([table, table.mean(0, keepdim=True).expand(2, -1)]))
    batch = texts(scorer, [[0], [1], [2]], ["ab", "[q] [Q]", "c"], ["ab [Q]", "d", "e", "f"])
    names = scorer.encoder.tokenizer.convert_ids_to_tokens
    assert names(batch.queries.tokens[:4]) == ["[CLS]", "[Q]", "ab", "[SEP]"]
    assert names(batch.docs.tokens[:6]) == ["[CLS]", "<doc>", "ab", "[", "q", "]"]
    scorer(batch).sum().backward()
    assert (weight.grad[-2:].abs().amax(1) > 0).all()


def test_a_marker_takes_a_spare_row_of_a_larger_table():
    encoder = load_encoder("tiny")
    known = len(encoder.tokenizer)
    encoder.model.resize_token_embeddings(known + 10)
    table = encoder.model.get_input_embeddings().weight.detach().clone()
    weight = ColBERT(encoder, query_prompt="[Q]", doc_prompt="[Q]").encoder.model.get_input_embeddings().weight
    expected = table.clone()
    expected[known] = table[:known].mean(0)
    torch.testing.assert_close(weight, expected)


def test_a_model_with_new_markers_is_built_again_and_takes_the_trained_weights():
    first, again = scorer_of(query_prompt="[Q]", doc_prompt="[D]"), scorer_of(query_prompt="[Q]", doc_prompt="[D]")
    for mine, other in zip(first.state_dict().items(), again.state_dict().items(), strict=True):
        assert mine[0] == other[0] and torch.equal(mine[1], other[1])
    with torch.no_grad():
        first.encoder.model.get_input_embeddings().weight[-2:] += 1.0
    again.load_state_dict(first.state_dict())
    assert again.encoder.tokenizer.get_vocab() == first.encoder.tokenizer.get_vocab()


def test_a_tokenizer_with_neither_mask_nor_eos_fills_no_queries():
    encoder = load_encoder("tiny")
    encoder.tokenizer.mask_token = encoder.tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="expected 0, since the encoder's tokenizer has neither a mask token nor"):
        ColBERT(encoder)
    assert ColBERT(encoder, query_length=0).layouts()[0].fill_to == 0


def test_longer_queries_are_cut_only_if_asked_to(texts):
    long = "a b c d e f g h i j k l m n o p"
    for cut, expected in ((False, 19), (True, 12)):
        batch = texts(scorer_of(cut_queries=cut), [[0], [1], [2]], [long, "a", "b"])
        assert batch.queries.cu_seqlens.diff().tolist() == [expected, 12, 12]


@pytest.mark.parametrize(("options", "message"), [
    ({"similarity": "l2"}, "model.similarity: expected one of cosine, dot; got 'l2'"),
    ({"query_length": -1}, "model.query_length: expected at least 0"),
    ({"query_length": 0, "cut_queries": True}, "model.query_length: expected at least 1 with cut_queries=True, got 0"),
])  # fmt: skip
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        scorer_of(**options)
