"""Write the model card of a published folder, with facts of the run, and numbers from the folder's run files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ranker.evaluation.significance import p_text
from ranker.release.usage import CALIBRATED, model_use

RANK = "text-ranking"
COMMAND = "ir_measures evaluation/{name}/qrels.txt evaluation/{name}/run.trec {measures}"
SHOWN = (
    "loss._target_", "optim._target_", "optim.lr", "optim.weight_decay", "schedule._target_", "schedule.warmup",
    "batch.queries", "batch.docs", "batch.positives", "trainer.max_epochs", "trainer.max_steps", "max_query_tokens",
    "max_doc_tokens", "max_pair_tokens", "depth", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """The facts in a card, without the measured numbers.

    Args:
        name: Name of the model.
        settings: The published `ranker.yaml` as plain values.
        model: Facts about the folder, see `ranker.release.usage.readme`.
        base: The encoder from which the training started: a hub id or a name.
        base_is_public: Whether `base` is a model id on the hub.
        licences: Part, such as the encoder -> its licence, if the owner states a licence in the package or source.
        license: SPDX id of the licence of the published weights; None: not stated.
        result: The run's `result.json`; may be empty.
        environment: The run's `environment.json`; may be empty.
    """

    name: str
    settings: Mapping[str, Any]
    model: Mapping[str, Any]
    base: str
    base_is_public: bool
    licences: Mapping[str, str]
    license: str | None
    result: Mapping[str, Any]
    environment: Mapping[str, Any]


def card(facts: Facts, sets: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of README.md, which starts with metadata for Hugging Face.

    Args:
        facts: Facts about the model.
        sets: Test set -> the content of its `metrics.json`, recomputed from the published run and judgements.
    """
    data = _metadata(facts, sets)
    lines = ["---", data, "---", "", f"# {facts.name}", "", *_opening(facts), "## Use", ""]
    lines += [text.replace("FOLDER", facts.name) for text in model_use(facts.model)]
    lines += ["With [ranker](#training), which cuts texts as in the training:", "", _own_use(facts.name)]
    lines += CALIBRATED if facts.model["calibrated"] else ()
    lines += ["## Results", ""]
    for name, metrics in sets.items():
        lines += [*_results(name, metrics), ""]
    return "\n".join([*lines, *_training(facts), *_licences(facts), *_limits(facts, sets)])


def _metadata(facts: Facts, sets: Mapping[str, Mapping[str, Any]]) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type=RANK,
            dataset_type=name,
            dataset_name=name,
            metric_type=measure.lower().replace("@", "_at_"),
            metric_name=measure,
            metric_value=round(value, 6),
        )
        for name, metrics in sets.items()
        for measure, value in metrics["measures"].items()
    ]
    data = ModelCardData(
        license=facts.license,
        library_name="transformers"
        if facts.model["folder_type"] in ("classifier", "words")
        else "sentence-transformers",
        pipeline_tag=RANK if facts.model["reads"] == "pairs" else "sentence-similarity",
        tags=["ranker", "reranker", "cross-encoder" if facts.model["reads"] == "pairs" else "bi-encoder"],
        base_model=facts.base if facts.base_is_public else None,
        model_name=facts.name,
        eval_results=results or None,
    )
    return data.to_yaml()


def _opening(facts: Facts) -> list[str]:
    model = str(facts.settings["model"]["_target_"]).rpartition(".")[2]
    reads = (
        "a query and a document together" if facts.model["reads"] == "pairs" else "queries and documents by themselves"
    )
    return [
        f"A reranker ({model}) that reads {reads} and gives scores to order documents by. It was trained with ranker "
        f"from {_base(facts)}. All numbers below are recomputed from the run files in `evaluation/`.",
        "",
    ]


def _base(facts: Facts) -> str:
    return f"[{facts.base}](https://huggingface.co/{facts.base})" if facts.base_is_public else f"`{facts.base}`"


def _own_use(name: str) -> str:
    return f"""```python
from ranker import Reranker
Reranker.load("{name}").rank("a query", ["a document", "another document"], top_k=10)  # the folder of these files
```
"""


def _results(name: str, metrics: Mapping[str, Any]) -> list[str]:
    comparison = metrics.get("comparison", {})
    lines = [f"### {name}: {metrics['num_queries']} queries", ""]
    if comparison:
        lines += ["| measure | this model | first stage | difference | p | p (Holm) | wins / losses / ties |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
        for measure, value in metrics["measures"].items():
            part = comparison[measure]
            counts = f"{part['wins']} / {part['losses']} / {part['ties']}"
            tests = f"{p_text(part['p_value'])} | {p_text(part['p_value_holm'])} | {counts}"
            lines.append(f"| {measure} | {value:.4f} | {part['baseline']:.4f} | {part['delta']:+.4f} | {tests} |")
        lines += ["", "p: paired randomisation test over the queries, two-sided; Holm: corrected over the measures."]
    else:
        lines += ["| measure | this model |", "| --- | --- |"]
        lines += [f"| {measure} | {value:.4f} |" for measure, value in metrics["measures"].items()]
    measures = " ".join(f"'{measure}'" for measure in metrics["measures"])
    lines += ["", f"Compute them again: `{COMMAND.format(name=name, measures=measures)}`"]
    return [*lines, *(f"\nNote: {warning}" for warning in metrics["warnings"])]


def _training(facts: Facts) -> list[str]:
    data = facts.settings.get("data")
    source = "local files, which are not named here" if data is None else f"`{_short(data['_target_'])}`"
    names = [str(value) for key in ("train", "name") if data is not None and isinstance(value := data.get(key), str)]
    lines = [
        "## Training",
        "",
        f"- Data: {source}{' (' + ', '.join(names) + ')' if names else ''}",
        f"- Encoder: {_base(facts)}",
    ]
    settings = {key: _at(facts.settings, key) for key in SHOWN}
    lines += [
        f"- {key.removesuffix('._target_')}: {_short(value)}" for key, value in settings.items() if value is not None
    ]
    if facts.result:
        lines.append(
            f"- Steps: {facts.result['steps']}; the published weights are those of step {facts.result['best_step']}"
        )
    if facts.environment:
        gpus = facts.environment.get("gpus") or []
        lines.append(
            f"- Machine: {', '.join(map(str, gpus)) if gpus else str(facts.environment.get('cpus')) + ' CPU cores'}"
        )
        packages = facts.environment.get("packages", {})
        known = [f"{name} {packages[name]}" for name in ("ranker", "torch", "transformers") if name in packages]
        lines.append(f"- Versions: {', '.join(known)}")
    return [*lines, "", "All settings are in `ranker.yaml`; paths of the training's machine are left out.", ""]


def _at(node: Any, key: str) -> Any:
    """Return the value of a dotted key; None if the key is missing."""
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _short(value: Any) -> str:
    text = str(value)
    return text.rpartition(".")[2] if text.startswith(("ranker.", "torch.")) else text


def _licences(facts: Facts) -> list[str]:
    lines = ["## Licences", ""]
    lines.append(f"- These weights: {facts.license or 'not stated by their publisher'}")
    for name, licence in facts.licences.items():
        text = licence.strip()
        lines += [f"- {name}: {text}"] if "\n" not in text else [f"- {name}:", "", "```", text, "```"]
    return [*lines, ""]


def _limits(facts: Facts, sets: Mapping[str, Mapping[str, Any]]) -> list[str]:
    query, doc, pair = facts.model["limits"]
    queries = ", ".join(f"{metrics['num_queries']} queries of {name}" for name, metrics in sets.items())
    lines = ["## Limits", ""]
    lines.append(f"- Longer texts are cut: queries to {query} tokens, documents to {doc}, pairs to {pair}.")
    lines.append(f"- Measured on {queries} only; other collections, languages and first stages may give other results.")
    lines.append(
        "- Scores order the documents of one query. They are no probabilities, and not comparable over queries."
    )
    if any("comparison" in metrics for metrics in sets.values()):
        lines.append(
            "- The model re-orders what a first stage found: a document that is not among the candidates stays lost."
        )
    return [*lines, ""]
