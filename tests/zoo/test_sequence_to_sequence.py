"""Sequence-to-sequence models as rerankers against transformers' own `ForConditionalGeneration`, on each row alone."""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForSeq2SeqLM

from ranker.encoders.loading import load_encoder
from ranker.models.mono_t5 import MonoT5
from tests.zoo.test_language_models import PAIRS, batch_of

PROMPT = "Query: {query} Document: {doc} Relevant:"


@pytest.mark.parametrize("family", ["t5", "mt5", "umt5", "longt5"])
@pytest.mark.usefixtures("float64_stays")
def test_scores_and_gradients_are_those_of_each_row_alone(family, checkpoint, tmp_path):
    folder = checkpoint(family)
    encoder = load_encoder(str(folder), dropout=0.0, attention_dropout=0.0)
    scorer = MonoT5(encoder, true_word="the", false_word="of").double().eval()
    batch = batch_of(scorer, tmp_path, PAIRS)
    rows = batch.pairs.tokens.split(batch.pairs.cu_seqlens.diff().tolist())
    for (query, doc), row in zip(PAIRS[:-1], rows, strict=False):  # the last doc is cut
        whole_prompt = PROMPT.replace("{query}", query).replace("{doc}", doc)
        assert encoder.tokenizer(whole_prompt)["input_ids"] == row.tolist()
    whole = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float64).eval()
    weights = torch.linspace(-1, 1, len(rows), dtype=torch.float64)
    yes, no = scorer.head.words
    expected = []
    for row, weight in zip(rows, weights, strict=True):
        start = torch.tensor([[whole.config.pad_token_id]])
        logits = whole(input_ids=row.unsqueeze(0), decoder_input_ids=start).logits[0, 0]
        (weight * (logits[yes] - logits[no])).backward()
        expected.append((logits[yes] - logits[no]).detach())
    got = scorer(batch)[:, 0]
    (got * weights).sum().backward()
    expected = torch.stack(expected)
    assert expected.std() > 0.1
    assert (got - expected).abs().max() <= 1e-9 * expected.abs().max()
    theirs = {name: weight.grad for name, weight in whole.named_parameters()}
    ours = {name: weight.grad for name, weight in encoder.model.named_parameters()}
    ours |= {f"decoder.{name}": weight.grad for name, weight in scorer.head.decoder.named_parameters()}
    if not scorer.head.tied:
        theirs["lm_head.weight"], ours["lm_head.weight"] = theirs["lm_head.weight"][[yes, no]], scorer.head.rows.weight
    assert len(ours) >= len(theirs) - 1
    for name, gradient in ours.items():
        if gradient is not None:
            assert_close(gradient, theirs[name], rtol=1e-9, atol=1e-9 * float(theirs[name].abs().max()), msg=name)
        else:  # weights that a step of one token does not read
            assert theirs[name] is None or not theirs[name].any(), name
