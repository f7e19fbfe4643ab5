"""Parse names of measures with ir-measures, and set the relevance threshold of a set."""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Sequence
from contextlib import redirect_stdout

import ir_measures
from ir_measures import Measure

from ranker.data.parsing import MAX_GRADE
from ranker.errors import ConfigError
from ranker.evaluation.measure_values import EXACT, FROM_QRELS, computed_measure


def parse_measures(names: Sequence[str | Measure]) -> list[Measure]:
    """Parse ir-measures names; a repeated measure is returned once.

    Raises:
        ConfigError: Names are wrong; the message has a line for each wrong name, with the most similar correct name.

    >>> parse_measures(["AP", "MRR@10", "AP(rel=2)", "MAP"])
    [AP, RR@10, AP(rel=2)]
    """
    if isinstance(names, str) or not names:
        raise ConfigError(f"measures: expected a list of ir-measures names, as [AP, RR@10, nDCG@10], got {names!r}")
    measures, faults = [], []
    for name in names:
        try:
            measures.append(_parse(name))
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(faults))
    return list(dict.fromkeys(measures))


def with_relevance(measures: Sequence[Measure], relevance: int) -> list[Measure]:
    """Add the relevance threshold to binary measures without a threshold; nDCG and other graded measures stay as is.

    >>> with_relevance(parse_measures(["AP", "RR@10", "P(rel=3)@5", "nDCG@10"]), 2)
    [AP(rel=2), RR(rel=2)@10, P(rel=3)@5, nDCG@10]
    """
    if relevance < 1:
        raise ConfigError(f"relevance: expected a grade of at least 1, got {relevance}; 1 counts every grade above 0")
    binary = [m.SUPPORTED_PARAMS["rel"].default == 1 if "rel" in m.SUPPORTED_PARAMS else False for m in measures]
    return list(
        dict.fromkeys(
            m(rel=relevance) if is_binary and "rel" not in m.params and relevance > 1 else m
            for m, is_binary in zip(measures, binary, strict=True)
        )
    )


def names_with_relevance(measures: Sequence[str | Measure], relevance: int) -> dict[str, str]:
    """Return for each measure: its name without the set's relevance threshold -> its name in an `Evaluation`.

    >>> names_with_relevance(["nDCG@10", "RR@10"], 2)
    {'nDCG@10': 'nDCG@10', 'RR@10': 'RR(rel=2)@10'}
    """
    return {str(measure): str(with_relevance([measure], relevance)[0]) for measure in parse_measures(measures)}


def _parse(name: str | Measure) -> Measure:
    try:
        measure = name if isinstance(name, Measure) else ir_measures.parse_measure(name.strip())
        measure.validate_params()
    except (ValueError, NameError, AssertionError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"measures: expected an ir-measures name, as AP, RR@10 or nDCG@10, got {name!r}; {_hint(str(name), error)}"
        ) from None
    params = measure.params
    for key in ("cutoff", "rel"):
        if key in params and (isinstance(params[key], bool) or params[key] < 1):
            raise ConfigError(f"measures: expected a {key} of at least 1, got {name!r}")
    if "recall" in params and not (0 <= params["recall"] <= 1 and round(params["recall"], 2) == params["recall"]):
        raise ConfigError(f"measures: expected a recall from 0.0 to 1.0 with at most two decimals, got {name!r}")
    for grade, gain in params.get("gains", {}).items():
        if not isinstance(grade, int) or not isinstance(gain, int) or gain > MAX_GRADE:
            raise ConfigError(f"measures: expected whole gains up to {MAX_GRADE}, got {name!r}")
    if measure.NAME not in FROM_QRELS and not EXACT.supports(computed_measure(measure, set())):
        raise ConfigError(
            f"measures: expected a measure that can be computed exactly here, got {name!r}; "
            "no installed evaluator computes it; use another"
        )
    return measure


def _hint(name: str, error: Exception) -> str:
    registry = ir_measures.measures.registry
    known = {key.lower(): key for key in reversed(registry)}  # nDCG comes before its alias NDCG
    base, rest = re.fullmatch(r"\s*([^@(\s]*)(.*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
    if base in registry:
        cutoff_missing = "cutoff" in str(error) and "@" not in rest
        return f"give it a cutoff, as {base}@10" if cutoff_missing else str(error)
    try:
        with redirect_stdout(io.StringIO()):
            return f"did you mean {ir_measures.parse_trec_measure(name)[0]}?"  # the name is trec_eval's
    except (ValueError, KeyError, IndexError, TypeError):
        close = [base.lower()] if base.lower() in known else difflib.get_close_matches(base.lower(), known, n=1)
        return f"did you mean {known[close[0]]}{rest}?" if close else "https://ir-measur.es lists them"
