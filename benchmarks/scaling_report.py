"""The report of scaling.py: a table for each model, and a line for each requirement that says whether it is met."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TARGET = 8  # number of GPUs for which the requirements are made
FLOAT32, FIRST, BF16, LINEAR = 1e-5, 1e-6, 1e-3, 0.90
SUMMANDS = {"colbert": 32}  # a score is the sum of as many similarities, and may differ by as much more
SPREAD = 0.01  # for bf16 scores: share of their standard deviation, which is small for random weights
COLUMNS = (
    "devices",
    "float32 losses: largest gap",
    "bf16 losses: gap at the first step, largest gap",
    "pairs/s",
    "share of linear",
    "memory per device, GB (on card)",
    "evaluation: pairs/s",
    "score gap float32, bf16",
    "encoding: docs/s",
    "vector gap float32, bf16",
)


class Results:
    """Results of one model by job and number of devices; None for a part that failed or did not run."""

    def __init__(self, found: dict[str, Any], model: str) -> None:
        self.base, self.parts, self.model = found["base"], found["parts"], model
        self.devices = sorted({int(key.split()[2]) for key in self.parts if key.startswith(f"{model} ")})

    def part(self, what: str, devices: int) -> dict[str, Any] | None:
        """Return a part if it succeeded."""
        part = self.parts.get(f"{self.model} {what} {devices}")
        return part if part is not None and "failed" not in part else None

    def failed(self, what: str) -> list[str]:
        """Return the failed parts of a job."""
        parts = {n: self.parts.get(f"{self.model} {what} {n}", {}) for n in self.devices}
        return [f"{n}: {part['failed']}" for n, part in parts.items() if "failed" in part]

    def losses(self, precision: str, devices: int) -> tuple[float, float] | None:
        """Return the relative gap to the baseline's losses: at the first step, and the largest over all steps."""
        here, first = self.part("losses", devices), self.part("losses", self.base)
        if here is None or first is None:
            return None
        pairs = list(zip(here["ranks"][0][precision], first["ranks"][0][precision], strict=True))
        gaps = [abs(a - b) / abs(b) for a, b in pairs]
        return gaps[0], max(gaps)

    def speed(self, devices: int) -> float | None:
        """Return the pairs/s over all devices."""
        part = self.part("speed", devices)
        return part["ranks"][0]["pairs_per_second"] if part else None

    def share(self, devices: int) -> float | None:
        """Return the speed per device, divided by that of the baseline."""
        here, first = self.speed(devices), self.speed(self.base)
        return here / devices / (first / self.base) if here and first else None

    def result(self, what: str, devices: int, precision: str, key: str) -> Any:
        """Return one value of a comparison."""
        part = self.part(what, devices)
        return part["result"][precision][key] if part else None


def report(found: dict[str, Any], gpus: int) -> list[str]:
    """Return all lines of the report."""
    here, settings = found["environment"], found["settings"]
    lines = [
        f"{here['card']}, {here['gpus']} GPUs, {here['cores']} cores; torch {here['torch']}, "
        f"lightning {here['lightning']}, transformers {here['transformers']}, NCCL {here['nccl']}; "
        f"random BERT {settings['size']}; "
        f"{settings['pairs']} pairs per step and device in {settings['steps']} steps"
    ]
    views = [Results(found, model) for model in dict.fromkeys(key.split()[0] for key in found["parts"])]
    for view in views:
        lines += ["", f"{view.model}:", "", *table(view)]
    lines += ["", "Required, measured, verdict:", ""]
    for view in views:
        lines += requirements(view, gpus)
    return lines


def table(view: Results) -> list[str]:
    """Return a table with one row per number of devices."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "| " + " | ".join("---" for _ in COLUMNS) + " |"]
    for n in view.devices:
        low, half = view.losses("float32", n), view.losses("bf16", n)
        cells = [
            str(n),
            gap(low and low[1]),
            f"{gap(half and half[0])}, {gap(half and half[1])}",
            number(view.speed(n)),
            share(view.share(n)),
            memory(view.part("speed", n)),
            number(view.result("evaluate", n, "bf16", "pairs_per_second")),
            ", ".join(gap(view.result("evaluate", n, precision, "gap")) for precision in ("float32", "bf16")),
            number(view.result("encode", n, "bf16", "docs_per_second")),
            ", ".join(gap(view.result("encode", n, precision, "gap")) for precision in ("float32", "bf16")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def requirements(view: Results, gpus: int) -> list[str]:
    """Return one line per requirement."""
    others = [n for n in view.devices if n != view.base] or [view.base]

    def line(
        what: str,
        name: str,
        required: str,
        values: dict[int, Any],
        good: Callable[[Any], bool],
        show: Callable[[Any], str] = gap,
    ) -> str:
        known = {n: value for n, value in values.items() if value is not None}
        seen = ", ".join(f"{show(value)} on {n}" for n, value in known.items()) or "nothing"
        broken = view.failed(what)
        complete = gpus >= TARGET and TARGET in known
        if not all(good(value) for value in known.values()):
            verdict = "NOT MET"
        elif broken or not known:
            verdict = f"NOT SHOWN, failed ({'; '.join(broken)})" if broken else "NOT RUN"
        else:
            verdict = (
                "met"
                if complete
                else f"met as far as run, not run on {TARGET} GPUs" + ("" if gpus else ": these are CPU processes")
            )
        return f"- {view.model}, {name}: required {required}; measured {seen}; {verdict}"

    def at_most(limit: float) -> Callable[[Any], bool]:
        return lambda value: value <= limit

    losses = {precision: {n: view.losses(precision, n) for n in others} for precision in ("float32", "bf16")}
    picked = {(p, i): {n: value and value[i] for n, value in losses[p].items()} for p in losses for i in (0, 1)}
    scores = {
        (p, key): {n: view.result("evaluate", n, p, key) for n in others}
        for p in losses
        for key in ("gap", "gap_of_spread")
    }
    exact = FLOAT32 * SUMMANDS.get(view.model, 1)
    lines = [
        line(
            "losses",
            "losses of 20 steps, float32, SGD",
            f"equal to {FLOAT32:.0e}",
            picked["float32", 1],
            at_most(FLOAT32),
        ),
        line("losses", "loss of the first step, bf16", f"equal to {FIRST:.0e}", picked["bf16", 0], at_most(FIRST)),
        line("losses", "losses of 20 steps, bf16", f"equal to {BF16:.0e}", picked["bf16", 1], at_most(BF16)),
        scaling(view, gpus),
        line(
            "speed",
            "memory per device, GB (on card)",
            "report only",
            {n: view.part("speed", n) for n in view.devices},
            bool,
            memory,
        ),
        line(
            "evaluate",
            "one run, each query and doc once, ids as in the baseline",
            "yes",
            {n: whole_run(view, n) for n in view.devices},
            bool,
            lambda value: "yes" if value else "no",
        ),
        line("evaluate", "scores, float32", f"equal to {exact:.0e}", scores["float32", "gap"], at_most(exact)),
        line(
            "evaluate",
            "scores, bf16",
            f"equal to {SPREAD} of their standard deviation",
            scores["bf16", "gap_of_spread"],
            at_most(SPREAD),
        ),
    ]
    if view.model == "dpr":
        lines += [
            line(
                "encode",
                "each doc encoded once, ids beside vectors",
                "yes",
                {n: whole_encoding(view, n) for n in view.devices},
                bool,
                lambda value: "yes" if value else "no",
            ),
            *(
                line(
                    "encode",
                    f"vectors, {p}",
                    f"equal to {limit:.0e}",
                    {n: view.result("encode", n, p, "gap") for n in others},
                    at_most(limit),
                )
                for p, limit in (("float32", FLOAT32), ("bf16", BF16))
            ),
        ]
    return lines


def scaling(view: Results, gpus: int) -> str:
    """Return the line of the requirement that applies only to eight GPUs."""
    shares = {n: view.share(n) for n in view.devices}
    at_target = shares.get(TARGET) if gpus >= TARGET else None
    seen = ", ".join(f"{value:.3f} on {n}" for n, value in shares.items() if value is not None) or "nothing"
    verdict = f"NOT RUN on {TARGET} GPUs" if at_target is None else "met" if at_target >= LINEAR else "NOT MET"
    failed = view.failed("speed")
    return (
        f"- {view.model}, share of linear: required {LINEAR:.2f} on {TARGET}; measured {seen}; {verdict}"
        + (f"; failed ({'; '.join(failed)})" if failed else "")
    )  # fmt: skip


def whole_run(view: Results, devices: int) -> bool | None:
    """Return whether the run contains every query with each of its docs once, in both precisions."""
    keys = ("same_ids", "pairs_twice", "docs_of_a_query", "queries", "pairs")
    found = [[view.result("evaluate", devices, p, key) for key in keys] for p in ("float32", "bf16")]
    if found[0][0] is None:
        return None
    return all(
        same and not twice and docs == [8] and pairs == 8 * queries for same, twice, docs, queries, pairs in found
    )


def whole_encoding(view: Results, devices: int) -> bool | None:
    """Return whether every doc has one vector, in the collection's order, in both precisions."""
    found = [
        [view.result("encode", devices, p, key) for key in ("same_ids", "docs_twice", "in_order")]
        for p in ("float32", "bf16")
    ]
    return None if found[0][0] is None else all(same and not twice and order for same, twice, order in found)


def gap(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def memory(part: dict[str, Any] | None) -> str:
    """Return a device's peak allocated memory in GB, and in brackets the card's used memory with NCCL and CUDA."""
    if part is None:
        return "-"
    on_card = [rank["memory_on_card"] for rank in part["ranks"] if "memory_on_card" in rank]
    peak = f"{max(rank['memory'] for rank in part['ranks']) / 1e9:.2f}"
    return peak + (f" ({max(on_card) / 1e9:.2f})" if on_card else "")
