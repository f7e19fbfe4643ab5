"""DPR: one vector a text; similarities, temperature, separate encoders."""

import math

import pytest
import torch

from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.loading import load_encoder
from ranker.errors import ConfigError
from ranker.interactions.maxsim import TextVectors
from ranker.interactions.pooling import POOLINGS, pool
from ranker.models.dpr import DPR

ROWS = [[0, 1, 2, 3], [1, -1, 3, -1], [2, 2, -1, 0]]


def scorer_of(**options) -> DPR:
    torch.manual_seed(0)
    return DPR(load_encoder("tiny", dropout=0.0, attention_dropout=0.0), **options).eval()


def test_a_score_is_the_same_alone_and_in_a_batch_ragged_and_padded(texts):
    scorer = scorer_of()
    together = texts(scorer, ROWS)
    with torch.no_grad():
        scores = scorer(together)
        assert scores.shape == (3, 4) and (scores[~together.doc_mask] == 0).all()
        for group, row in enumerate(ROWS):
            for place, doc in enumerate(row):
                if doc >= 0:
                    alone = scorer(texts(scorer, [[doc] if i == group else [0] for i in range(3)]))[group, 0]
                    torch.testing.assert_close(alone, scores[group, place], rtol=0, atol=1e-5)
        scorer.encoder = Encoder(scorer.encoder.model, scorer.encoder.tokenizer, Execution(ragged=False))
        torch.testing.assert_close(scorer(together), scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_score_is_the_cosine_of_pooled_states_over_the_temperature(texts, pooling):
    scorer = scorer_of(pooling=pooling, temperature=0.2)
    batch = texts(scorer, [[0], [1], [2]])
    with torch.no_grad():
        query, doc = (pool(scorer.encoder(part), part, pooling) for part in (batch.queries, batch.docs))
        expected = torch.nn.functional.cosine_similarity(query, doc) / 0.2
        torch.testing.assert_close(scorer(batch)[:, 0], expected, rtol=0, atol=1e-5)


def test_pc59_dot_and_cosine_order():
    query, docs = TextVectors(torch.tensor([[1.0, 0.0]])), torch.tensor([[3.0, 4.0], [1.0, 0.0], [10.0, 40.0]])
    dot = scorer_of(similarity="dot", temperature=1.0).score_block(query, TextVectors(docs))
    assert dot.tolist() == [[3.0, 1.0, 10.0]]  # C, A, B
    cosine = scorer_of(temperature=1.0).score_block(query, TextVectors(torch.nn.functional.normalize(docs)))
    torch.testing.assert_close(cosine, torch.tensor([[0.6, 1.0, 0.242536]]), rtol=0, atol=1e-6)  # B, A, C


def test_pc59_a_zero_vector_is_not_nan(texts):
    scorer = scorer_of(projection=4)
    torch.nn.init.zeros_(scorer.projection[0].weight)
    assert scorer(texts(scorer, [[0], [1], [2]])).tolist() == [[0.0], [0.0], [0.0]]


def test_pc52_similarities_are_computed_in_full_precision(texts):
    tens = TextVectors(torch.full((1, 768), 10.0))
    scorer = scorer_of(similarity="dot", temperature=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            scorer.score_block(tens, tens).item() == 76800.0
        )  # beyond fp16, and bf16 would give 76800 rounded to 8 bits
        inner = scorer.encode_docs(texts(scorer, [[0], [1], [2]]).docs).values
        assert inner.dtype == torch.float32


def test_tied_encoders_share_weights_and_separate_ones_learn_apart(texts):
    tied, apart = scorer_of(projection=8), scorer_of(projection=8, tied=False)
    assert sum(p.numel() for p in apart.parameters()) == 2 * sum(p.numel() for p in tied.parameters())
    batch = texts(tied, ROWS)
    torch.testing.assert_close(tied(batch), apart(batch))  # docs start as a copy
    apart.encode_queries(batch.queries).values.sum().backward()
    assert apart.projection[0].weight.grad is not None and apart.doc_projection[0].weight.grad is None


def test_a_learned_temperature_starts_where_it_should_and_stops_at_a_hundredth(texts):
    scorer = scorer_of(temperature=0.05, learn_temperature=True)
    assert [parameter.item() for parameter in scorer.scoring_parameters()] == [pytest.approx(math.log(0.05))]
    batch = texts(scorer, ROWS)
    torch.testing.assert_close(scorer(batch), scorer_of(temperature=0.05)(batch))
    scorer.log_temperature.data.fill_(math.log(1e-6))
    torch.testing.assert_close(scorer(batch), scorer_of(temperature=0.01)(batch))
    scorer(batch)[0, 0].backward()  # d(cosine / tau) / d(log tau) = -cosine / tau
    assert scorer.log_temperature.grad.item() == pytest.approx(
        -scorer(batch)[0, 0].item(), rel=1e-5
    )  # it can come back


def test_prompts_are_laid_out_before_the_text(texts):
    scorer = scorer_of(query_prompt="query: ", doc_prompt="")
    tokens = texts(scorer, [[0], [1], [2]]).queries
    decoded = scorer.encoder.tokenizer.convert_ids_to_tokens(tokens.tokens[: int(tokens.cu_seqlens[1])])
    assert decoded == ["[CLS]", "qu", "##er", "##y", ":", "re", "##d", "ap", "##pl", "##e", "[SEP]"]


def test_auto_pooling_is_chosen_by_the_encoder_and_saved(tmp_path):
    scorer = scorer_of(pooling="auto")
    assert scorer.pooling == "cls"  # the tokenizer starts a text with [CLS]
    scorer.save(tmp_path / "saved", max_tokens=60)
    assert DPR.load(tmp_path / "saved").pooling == "cls"


@pytest.mark.parametrize(("options", "message"), [
    ({"pooling": "avg"}, "model.pooling: expected one of cls, mean, max, last, weightedmean, auto; got 'avg'"),
    ({"similarity": "l2"}, "model.similarity: expected one of cosine, dot; got 'l2'"),
    ({"temperature": 0.0}, "model.temperature: expected a finite number above 0, got 0.0"),
    ({"activation": "glu"}, "model.activation: expected one of identity, tanh, relu, gelu, silu, sigmoid; got 'glu'"),
])  # fmt: skip
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        scorer_of(**options)
