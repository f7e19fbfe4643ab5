"""Measure two runs and compare them query by query, like `evaluate.py run=RUN qrels=QRELS baseline=RUN`."""

from ranker.evaluation.metrics import evaluate
from ranker.evaluation.report import compare

QRELS = {"q1": {"d1": 1}, "q2": {"d4": 2, "d5": 1}, "q3": {"d7": 1}}
BASELINE = {"q1": {"d2": 3.0, "d1": 2.0}, "q2": {"d5": 2.0, "d6": 1.5, "d4": 1.0}, "q3": {"d8": 1.0, "d7": 0.5}}
RUN = {
    "q1": {"d1": 0.9, "d2": 0.1},
    "q2": {"d4": 0.8, "d5": 0.7, "d6": 0.1},
    "q3": {"d7": 0.5, "d8": 0.5},  # d7 and d8 tie
}


def main() -> dict:
    """Print each measure of the run, and its comparison with the baseline; return the measures."""
    measures = ["RR@10", "nDCG@10", "AP"]
    evaluation, baseline = evaluate(RUN, QRELS, measures), evaluate(BASELINE, QRELS, measures)
    comparison = compare(evaluation, baseline)
    for name, value in evaluation.means.items():
        entry = comparison[name]
        print(
            f"{name}: {value:.4f}, baseline {entry['baseline']:.4f}, p {entry['p_value']:.3f}, "
            f"{entry['wins']} wins, {entry['losses']} losses"
        )
    return evaluation.means


if __name__ == "__main__":
    main()
