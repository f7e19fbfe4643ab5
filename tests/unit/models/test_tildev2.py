"""TILDEv2: scores by hand, repeated tokens, special tokens."""

import torch

from ranker.encoders.loading import load_encoder
from ranker.models.tildev2 import TILDEv2


def test_a_score_is_the_sum_over_query_tokens_of_their_best_weight_in_the_doc(texts):
    torch.manual_seed(0)
    scorer = TILDEv2(load_encoder("tiny", dropout=0.0, attention_dropout=0.0)).eval()
    queries, docs = ["ab b ab", "z"], ["b ab b", "c", "ab z"]
    batch = texts(scorer, [[0, 1, 2], [2, 1, -1]], queries=queries, docs=docs)
    with torch.no_grad():
        scores, states = scorer(batch), scorer.encoder(batch.docs)
        weights = torch.relu(states @ scorer.head.weight[0] + scorer.head.bias)
    names = scorer.encoder.tokenizer.convert_ids_to_tokens(batch.docs.tokens)
    bounds = batch.docs.cu_seqlens.tolist()
    for number, (group, place) in enumerate(batch.doc_mask.nonzero().tolist()):
        part = range(bounds[number], bounds[number + 1])
        expected = sum(
            max((weights[i].item() for i in part if names[i] == token), default=0.0)
            for token in queries[group].split()  # `[CLS]` and `[SEP]`, which every doc has, do not count
        )
        assert abs(scores[group, place].item() - expected) < 1e-5
    assert scores[0, 1] == 0.0 and scores[1, 2] == 0.0
    assert scores[0, 0] > 0


def test_only_the_best_position_of_a_token_is_trained(texts):
    torch.manual_seed(1)
    scorer = TILDEv2(load_encoder("tiny", dropout=0.0, attention_dropout=0.0)).eval()
    batch = texts(scorer, [[0]], queries=["b"], docs=["b c b b"])
    states = scorer.encoder(batch.docs).detach().requires_grad_()
    scorer.encoder.forward = lambda _: states
    torch.nn.init.constant_(scorer.head.bias, 5.0)
    scorer(batch).sum().backward()
    weights = states @ scorer.head.weight[0]
    best = max((1, 3, 4), key=lambda i: weights[i].item())
    assert states.grad.abs().sum(1).nonzero().flatten().tolist() == [best]
