"""Score pairs of texts with transformers or sentence-transformers from a folder alone, like users of these programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ranker.encoders.model_folder import read_object
from ranker.export._modules import has_modules, is_cross_encoder, is_multi_vector
from ranker.export._prompt import read_prompt
from ranker.export.language_model import OWN_FILE as WORDS

Pairs = Sequence[tuple[str, str]]
Program = Callable[[Pairs], np.ndarray]
BATCH = 32  # number of rows in a batch, as in CrossEncoder.predict


def program_of(folder: Path, device: str = "cpu", batch: int = BATCH) -> Program:
    """Return a function from pairs of a query and a doc to scores, float32 [pairs].

    sentence-transformers runs folders with modules.json, transformers runs all other folders. The folder's tokenizer
    truncates texts.

    Args:
        folder: A model folder without adapters.
        device: `cpu` or `cuda`.
        batch: Number of rows in a batch, which is padded to its longest row; 1 for a model whose states depend on
            padding.
    """
    if has_modules(folder):
        if is_cross_encoder(folder):
            return _cross_encoder(folder, device, batch)
        return _bi_encoder(folder, device, batch)
    if read_object(folder / WORDS).get("head") == "yes_no":
        return _words(folder, device, batch)
    return _classifier(folder, device, batch)


def _cross_encoder(folder: Path, device: str, batch: int) -> Program:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(folder), device=device)

    def score(pairs: Pairs) -> np.ndarray:
        scores = np.asarray(model.predict(list(pairs), batch_size=batch, show_progress_bar=False), dtype=np.float32)
        return scores[:, 1] - scores[:, 0] if scores.ndim == 2 else scores

    return score


def _bi_encoder(folder: Path, device: str, batch: int) -> Program:
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer

    model: Any = (MultiVectorEncoder if is_multi_vector(folder) else SentenceTransformer)(str(folder), device=device)
    stored = read_object(folder / "scorer.json")
    temperature = float(stored.get("temperature", 1.0))
    divisor = max(float(np.exp(temperature)), 0.01) if stored.get("learned") else temperature

    def score(pairs: Pairs) -> np.ndarray:
        queries, docs = ({text: i for i, text in enumerate(dict.fromkeys(texts))} for texts in zip(*pairs, strict=True))
        encoded = (
            model.encode_query(list(queries), batch_size=batch),
            model.encode_document(list(docs), batch_size=batch),
        )
        scores = np.zeros(len(pairs), dtype=np.float32)
        of_query: dict[int, list[int]] = {}
        for i, (query, _) in enumerate(pairs):
            of_query.setdefault(queries[query], []).append(i)
        for row, wanted in of_query.items():
            rows = [encoded[1][docs[pairs[i][1]]] for i in wanted]
            part = rows if is_multi_vector(folder) else np.stack(rows)
            scores[wanted] = model.similarity(encoded[0][row : row + 1], part)[0].float().cpu().numpy()
        return scores / divisor

    return score


def _classifier(folder: Path, device: str, batch: int) -> Program:
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=False)
    model.to(device).eval()

    def logits(inputs: Any) -> torch.Tensor:
        values = model(**inputs).logits.float()
        return values[:, 0] if values.shape[1] == 1 else values[:, 1] - values[:, 0]

    return _by_transformers(folder, device, logits, batch)


def _words(folder: Path, device: str, batch: int) -> Program:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    model.to(device).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    prompt, stored = read_prompt(folder), read_object(folder / WORDS)
    assert prompt is not None
    filled = prompt.replace("{query}", "a").replace("{doc}", "a")
    start = tokenizer(filled)["input_ids"]
    yes, no = (tokenizer(filled + stored[key])["input_ids"][len(start)] for key in ("yes_word", "no_word"))

    def logits(inputs: Any) -> torch.Tensor:
        ends = inputs["attention_mask"].sum(1) - 1
        values = model(**inputs).logits[torch.arange(len(ends), device=ends.device), ends].float()
        return values[:, yes] - values[:, no]

    return _by_transformers(folder, device, logits, batch, side="right")


def _by_transformers(
    folder: Path,
    device: str,
    logits: Callable[[Any], torch.Tensor],
    batch: int,
    side: str | None = None,
) -> Program:
    """Return a program that tokenizes pairs or filled prompts, and pads batches of similar lengths.

    Padding is at the side that the tokenizer has, or at `side`, because XLNet's classifier reads the last column.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.padding_side = side or tokenizer.padding_side
    prompt = read_prompt(folder)

    def score(pairs: Pairs) -> np.ndarray:
        order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
        scores = np.zeros(len(pairs), dtype=np.float32)
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            texts: list[list[str]] = [list(part) for part in zip(*(pairs[i] for i in chosen), strict=True)]
            if prompt is not None:
                texts = [[filled(prompt, *pairs[i]) for i in chosen]]
            inputs = tokenizer(*texts, padding=True, truncation=True, return_tensors="pt").to(device)
            with torch.inference_mode():
                scores[chosen] = logits(inputs).cpu().numpy()
        return scores

    return score


def filled(prompt: str, query: str, doc: str) -> str:
    """Return a prompt with its texts; braces inside the texts do not change.

    >>> filled("{query}: {doc}", "a {doc}", "b")
    'a {doc}: b'
    """
    fields = sorted((prompt.index(f"{{{name}}}"), name, text) for name, text in (("query", query), ("doc", doc)))
    parts, end = [], 0
    for start, name, text in fields:
        parts += [prompt[end:start], text]
        end = start + len(name) + 2
    return "".join([*parts, prompt[end:]])
