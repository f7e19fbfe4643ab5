"""Language models as rerankers against transformers' own `ForCausalLM`, run on each row alone."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from ranker.data.collate import Collator
from ranker.data.scorer_inputs import ScorerInputs, TextLimits
from ranker.data.token_store import build_token_store
from ranker.encoders.loading import load_encoder
from ranker.models.lm_reranker import LMReranker
from ranker.types import RankBatch
from tests.zoo.rows import largest_difference
from tests.zoo.texts import DOCS, LONG_DOC, QUERIES

FAMILIES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi",
    "phi3",
    "smollm3",
    "gpt2",
    "opt",
    "mamba",
]
PROMPT = "Is it relevant?\nQuery: {query}\n\nDocument: {doc}\nAnswer:"


def words(tokenizer) -> tuple[str, str]:
    """Two words of one token after the prompt: letters, since the vocabularies are small."""
    before = len(tokenizer("Answer:", add_special_tokens=False)["input_ids"])
    found = [
        word for word in (" the", " of", " river", "a", "b", "c")
        if len(tokenizer(f"Answer:{word}", add_special_tokens=False)["input_ids"]) == before + 1
    ]  # fmt: skip
    return found[0], found[1]


def batch_of(scorer, tmp_path, pairs) -> RankBatch:
    """The pairs as docs of groups of one, through token stores and the collator."""
    inputs = ScorerInputs.of(scorer)
    stores = []
    for number, texts in enumerate(zip(*pairs, strict=True)):
        affixes = inputs.pair.affixes_of(number)
        rows = [(str(i), affixes.prefix + text + affixes.suffix) for i, text in enumerate(texts)]
        folder = tmp_path / f"store{number}"
        stores.append(build_token_store(rows, folder, inputs.tokenizer, 1000, fingerprint="x"))
    collator = Collator.of(inputs, *stores, TextLimits(1000, 1000, 150))
    numbers = torch.arange(len(pairs)).numpy()
    return collator.collate(numbers, numbers[:, None], numbers[:, None] * 0.0, numbers, 1.0)


PAIRS = [(QUERIES[i % len(QUERIES)], doc) for i, doc in enumerate([*DOCS, LONG_DOC])]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("float64_stays")
def test_scores_are_those_of_the_language_model_on_each_row_alone(family, checkpoint, tmp_path, record_property):
    folder = checkpoint(family)
    encoder = load_encoder(str(folder), attention_dropout=0.0)
    yes, no = words(encoder.tokenizer)
    scorer = LMReranker(encoder, prompt=PROMPT, yes_word=yes, no_word=no).eval()
    batch = batch_of(scorer, tmp_path, PAIRS)
    ids = [row.unsqueeze(0) for row in batch.pairs.tokens.split(batch.pairs.cu_seqlens.diff().tolist())]
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        scorer.to(dtype), whole.to(dtype)
        with torch.no_grad():
            got = scorer(batch)[:, 0]
            logits = torch.stack([whole(input_ids=row).logits[0, -1] for row in ids])
        expected = logits[:, scorer.word_ids[0]] - logits[:, scorer.word_ids[1]]
        worst = largest_difference(got, expected)
        record_property("worst", worst)
        assert expected.std() > 0 and worst <= bound
    for (query, doc), row in zip(PAIRS[:-1], ids, strict=False):  # the last doc is cut
        whole_prompt = PROMPT.replace("{query}", query).replace("{doc}", doc)
        assert encoder.tokenizer(whole_prompt)["input_ids"] == row[0].tolist()
