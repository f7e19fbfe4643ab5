"""Long rows without windows: families with sparse attention learn a needle beyond it, and rows of 8,192 tokens run."""

import random

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import LlamaConfig, LlamaModel, ModernBertConfig, ModernBertModel

from ranker.data.collate import Collator
from ranker.data.collection import Candidates, Collection, MemoryDocs
from ranker.data.memory_store import MemoryStore
from ranker.data.score_batches import ScoreBatches
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.text_encoder import TextEncoder
from ranker.encoders.encoder import Encoder
from ranker.encoders.execution import Execution
from ranker.encoders.loading import load_encoder
from ranker.encoders.tiny import tiny_tokenizer
from ranker.models.monobert import MonoBERT
from ranker.types import RankBatch, TokenBatch
from tests.zoo.checkpoints import make

# the first two see 16 tokens and blocks of 8, the third 15 on each side; modernbert's windows are of 32 on each side
FAMILIES = {"longformer": "padded", "big_bird": None, "longt5": None, "modernbert": "modernbert", "qwen3": "packed"}
LETTERS = "abcdefghijklmnop"


def docs_of(number: int, seed: int) -> dict[str, str]:
    """Docs of 100 letters; those with an even number have a needle, 24 times z, in their second half."""
    rng, docs = random.Random(seed), {}
    for i in range(number):
        words = rng.choices(LETTERS, k=100)
        if i % 2 == 0:
            start = rng.randint(50, 76)
            words[start : start + 24] = "z" * 24
        docs[str(i)] = " ".join(words)
    return docs


def stores_of(scorer, docs):
    encoder = TextEncoder(scorer.encoder.tokenizer, 128)
    return Collator.of(
        ScorerInputs.of(scorer), MemoryStore(encoder, {"q": "q"}), MemoryStore(encoder, docs), TextLimits(8, 128)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_finds_a_needle_far_from_the_query(family, tmp_path):
    torch.manual_seed(0)
    encoder = load_encoder(str(make(family, tmp_path)), dropout=0.0, attention_dropout=0.0)
    # Longformer's own head makes the first token global; without that, the first token sees its window only
    scorer = MonoBERT(encoder, head="auto" if family == "longformer" else "own")
    if FAMILIES[family]:
        assert scorer.encoder.path == FAMILIES[family]
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=5e-3)
    target = torch.tensor([[1.0, 0.0] * 6])
    losses = []
    for step in range(26):
        collator = stores_of(scorer, docs_of(12, step))
        batch = collator.collate(np.zeros(1, int), np.arange(12)[None], target.numpy(), np.zeros(1, int), 1.0)
        assert batch.pairs is not None and batch.pairs.max_length > 100
        loss = binary_cross_entropy_with_logits(scorer(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # evaluated as evaluate.py does, on other docs
    docs = docs_of(16, 99)
    candidates = Candidates.from_lists([("q", list(docs), [0.0] * len(docs))])
    batches = ScoreBatches(
        Collection("needles", MemoryDocs([]), {"q": "q"}, {}, candidates), None, stores_of(scorer, docs), 600
    )
    assert len(batches) > 1
    scores = np.zeros(16)
    with torch.no_grad():
        for batch in batches:
            scores[batch.slots.numpy()] = scorer.eval()(batch.batch)[batch.batch.doc_mask].numpy()
    assert scores[::2].min() > scores[1::2].max(), (losses, scores)


def modernbert():
    return ModernBertModel(
        ModernBertConfig(
            vocab_size=120, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=1,
            local_attention=128, max_position_embeddings=8192, pad_token_id=0, cls_token_id=2, sep_token_id=3,
            bos_token_id=2, eos_token_id=3,
        )
    )  # fmt: skip


def llama():
    return LlamaModel(
        LlamaConfig(
            vocab_size=120, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=8192, pad_token_id=0,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("model", "pooling"), [(modernbert, "cls"), (llama, "last")])
def test_rows_of_8192_tokens_beside_short_ones(model, pooling):
    """A long row has the score that transformers gives it alone; gradients are the same with recomputed activations."""
    torch.manual_seed(0)
    whole = model().eval()
    lengths = [8192, 5, 300]
    tokens = torch.randint(5, 90, (sum(lengths),))
    rows = TokenBatch(tokens, torch.zeros_like(tokens), torch.tensor([0, *lengths]).cumsum(0).int(), max(lengths))
    batch = RankBatch(torch.zeros(1, 3), torch.ones(1, 3).bool(), torch.zeros(1).long(), 1.0, rows)
    with torch.no_grad():
        states = whole(tokens[None, :8192]).last_hidden_state[0]
    gradients = []
    for checkpointing in (False, True) if model is llama else (True,):
        encoder = Encoder(whole, tiny_tokenizer(), Execution(checkpointing=checkpointing))
        assert encoder.max_tokens == 8192 and encoder.ragged
        torch.manual_seed(1)
        scorer = MonoBERT(encoder, head="own", pooling=pooling)
        scores = scorer(batch)
        expected = scorer.head(states[0 if pooling == "cls" else -1]).item()
        assert scores[0, 0].item() == pytest.approx(expected, abs=1e-5)
        scorer.zero_grad()
        scores.sum().backward()
        gradients.append([weight.grad.clone() for weight in scorer.parameters() if weight.grad is not None])
    assert all(gradient.isfinite().all() for gradient in gradients[0])
    for one, other in zip(gradients[0], gradients[-1], strict=True):
        torch.testing.assert_close(one, other)
