"""Write the README of an export, with a few lines of code that run without changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ranker.release.parity import MEASURE

PAIR = '"how to sanitize a path", "Use realpath."'
RANKER = """```python
from ranker import Reranker
Reranker.load("FOLDER").rank("a query", ["a document", "another document"], top_k=10)
```
"""
CALIBRATED = (
    "`calibration.json` maps scores to probabilities of relevance: `Reranker.load(..., probabilities=True)`.",
    "",
)
CROSS_ENCODER = f"""```python
from sentence_transformers import CrossEncoder
scores = CrossEncoder("FOLDER").predict([({PAIR})])
```
"""
BI_ENCODER = """```python
from sentence_transformers import SentenceTransformer
model = SentenceTransformer("FOLDER")
model.similarity(model.encode_query(["a query"]), model.encode_document(["a document"]))
```
"""
MULTI_VECTOR = BI_ENCODER.replace("SentenceTransformer", "MultiVectorEncoder")
CLASSIFIER = f"""```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForSequenceClassification.from_pretrained("FOLDER")
inputs = tokenizer([{PAIR.split(", ")[0]}], [{PAIR.split(", ")[1]}], padding=True, truncation=True, return_tensors="pt")
scores = model(**inputs).logits{{score}}
```
"""
PROMPTED = """```python
import json
from transformers import {auto}, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = {auto}.from_pretrained("FOLDER")
prompt = json.load(open("FOLDER/prompt.json"))["prompt"]  # fill {{query}} and {{doc}}; one text per pair
inputs = tokenizer(prompt.replace("{{query}}", "a query").replace("{{doc}}", "a document"), return_tensors="pt")
scores = model(**inputs).logits{score}
```
"""
ONNX = """```python
import onnxruntime
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
session = onnxruntime.InferenceSession("FOLDER/{graph}")
inputs = tokenizer({texts}, padding=True, truncation=True, return_tensors="np")
({output},) = session.run(None, {{entry.name: inputs[entry.name] for entry in session.get_inputs()}})  # {shape}
```
"""
ONNX_TOKENS = """```python
import json
import numpy
import onnxruntime
from transformers import AutoTokenizer
settings = json.load(open("FOLDER/onnx.json"))
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
session = onnxruntime.InferenceSession("FOLDER/{graph}")
def run(text, fill=0):  # queries are filled up to a number of tokens
    inputs = dict(tokenizer([text], return_tensors="np"))
    expansion, missing = settings["expansion"], max(0, fill - inputs["input_ids"].shape[1])
    fills = {{"input_ids": expansion["token"], "attention_mask": int(expansion["attended"])}}
    for key, value in inputs.items():
        inputs[key] = numpy.pad(value, ((0, 0), (0, missing)), constant_values=fills.get(key, 0))
    return session.run(None, {{entry.name: inputs[entry.name] for entry in session.get_inputs()}})
query, _ = run(settings["query_prompt"] + "a query", settings["expansion"]["length"])
doc, mask = run(settings["doc_prompt"] + "a document")
score = (query[0] @ doc[0][mask[0] == 1].T).max(1).sum()
```
"""
ALONE = (
    "Padding changes the scores of this model in other programs: give them one text or pair a batch (`batch_size=1`)."
)


def readme(layout: str, facts: Mapping[str, Any], parity: Mapping[str, Any]) -> str:
    """Return the text of the README of an export.

    Args:
        layout: The format.
        facts: A dict. `folder_type`: `cross_encoder`, `bi_encoder`, `multi_vector`, `classifier` or `words`. `labels`:
            1 or 2. `prompt`: whether `prompt.json` has the prompt of pairs. `alone`: whether padding changes scores.
            `graphs`, `reads` and `tokens`, only for ONNX: names of graphs, form of inputs, and whether each token has a
            vector. `calibrated`: whether the folder has `calibration.json`. `limits`: longest query, doc and pair.
        parity: The content of `parity.json`.
    """
    query, doc, pair = facts["limits"]
    rates, sizes = parity["pairs_per_second"], parity["size_mb"]
    lines = [
        f"# Export: {layout}",
        "",
        f"Made by `ranker export format={layout} dtype={parity['dtype']}`. Scores order the docs of one query: higher "
        "is better. They are not probabilities.",
        "",
        *_use(layout, facts),
        "With ranker, which lays texts out and cuts them as in the training:",
        "",
        RANKER,
        *(CALIBRATED if facts["calibrated"] else ()),
        f"In the training, queries were cut to {query} tokens, docs to {doc}, and pairs with their special tokens to "
        f"{pair}; of a long pair only the doc is cut. Other programs shorten the longer text first.",
        "",
        "## Compared with the original",
        "",
        f"| set | pairs | largest gap | Kendall's tau | {MEASURE} | change (95 %) |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_row(name, part) for name, part in parity["sets"].items()),
        "",
        f"{rates['export']:.0f} pairs/s, the original {rates['original']:.0f} on the same machine (threads: "
        f"{parity['threads']}, load: {parity['load_average']:.1f}). {sizes['export']:.1f} MB, the original "
        f"{sizes['original']:.1f}. All numbers are in `parity.json`.",
        "",
    ]
    return "\n".join(lines)


def _use(layout: str, facts: Mapping[str, Any]) -> list[str]:
    if layout.startswith("onnx"):
        texts = '["a query"], ["a document"]' if facts["reads"] == "pairs" else '["a text"]'
        shape = "[pairs, 1]" if facts["reads"] == "pairs" else "[texts, dim]; see prompts and temperature in onnx.json"
        output = "scores" if facts["reads"] == "pairs" else "vectors"
        if facts["prompt"]:
            texts = '[prompt.replace("{query}", "a query").replace("{doc}", "a document")]'
        graphs = " and ".join(f"`{name}`" for name in facts["graphs"])
        text = ONNX.format(graph=facts["graphs"][0], texts=texts, output=output, shape=shape)
        if facts["tokens"]:
            text = ONNX_TOKENS.format(graph=facts["graphs"][0])
        note = " `prompt` is that of `prompt.json`." if facts["prompt"] else ""
        return [f"With onnxruntime ({graphs}; any numbers of rows and columns, padded at the end).{note}", "", text]
    return model_use(facts)


def model_use(facts: Mapping[str, Any]) -> list[str]:
    """Return lines of Markdown on the use of a model folder in transformers or sentence-transformers; see `readme`."""
    return [*_program_use(facts), *([ALONE, ""] if facts.get("alone") else [])]


def _program_use(facts: Mapping[str, Any]) -> list[str]:
    kind = facts["folder_type"]
    if kind == "words":
        ending = "[:, -1]  # the logit of yes_word minus that of no_word of lm_reranker.json"
        return ["With transformers:", "", PROMPTED.format(auto="AutoModelForCausalLM", score=ending)]
    if kind == "classifier":
        ending = "[:, 0]" if facts["labels"] == 1 else ".diff(dim=1)[:, 0]"
        if facts["prompt"]:
            auto = "AutoModelForSequenceClassification"
            return ["With transformers:", "", PROMPTED.format(auto=auto, score=ending)]
        return [
            "With transformers:",
            "",
            CLASSIFIER.format(score=ending),
            "With sentence-transformers:",
            "",
            CROSS_ENCODER if facts["labels"] == 1 else CROSS_ENCODER.replace(")])", ")]) @ [-1, 1]"),
        ]
    texts = {"cross_encoder": CROSS_ENCODER, "bi_encoder": BI_ENCODER, "multi_vector": MULTI_VECTOR}[kind]
    return ["With sentence-transformers:", "", texts]


def _row(name: str, part: Mapping[str, Any]) -> str:
    tau = "" if part["kendall_tau"] is None else f"{part['kendall_tau']:.4f}"
    measure = part.get(MEASURE)
    cells = ["", ""]
    if measure:
        low, high = measure["interval"]
        cells = [f"{measure['export']:.4f}", f"{measure['change']:+.4f} ({low:+.4f} to {high:+.4f})"]
    return "| " + " | ".join([name, str(part["pairs"]), f"{part['largest_gap']:.2g}", tau, *cells]) + " |"
