"""Charts: points at positions computed by hand, long lines thinned, texts escaped."""

import re
import xml.etree.ElementTree as ET

import pytest

from ranker.reports import charts

SPACE = (charts.LEFT, charts.WIDTH - charts.RIGHT, charts.TOP, charts.HEIGHT - charts.BOTTOM)


def circles(svg):
    """(x, y, radius, title) of the circles of a drawing."""
    return [
        (float(part.get("cx")), float(part.get("cy")), float(part.get("r")), part[0].text)
        for part in ET.fromstring(svg).iter()
        if part.tag.endswith("circle")
    ]


def test_a_line_starts_and_ends_at_the_corners():
    left, right, top, bottom = SPACE
    chart = charts.lines("loss", "loss", {"<a>": [(0, 2.0), (10, 1.0)]}, best=(10, 1.0))
    (path,) = re.findall(r'class="line c0" d="([^"]+)"', chart.svg)
    assert path == f"M{left:.1f},{top:.1f}L{right:.1f},{bottom:.1f}"
    assert circles(chart.svg)[-1] == (right, bottom, 6, "best: 1.0000 at step 10")
    assert chart.legend == ("<a>",) and "&lt;a&gt; ends at 1.0000" in chart.svg
    assert charts.lines("loss", "loss", {"a": [(0, float("nan"))]}).svg == ""


def test_gains_by_hand():
    left, right, top, bottom = SPACE
    middle, half = (top + bottom) / 2, (left + right) / 2
    chart = charts.gains("t", "RR", [-0.5, 0.5])
    gain, loss = re.findall(r'class="(?:gain|loss)" d="([^"]+)"', chart.svg)
    assert gain == (
        f"M{left:.1f},{middle:.1f}L{left:.1f},{top:.1f}L{half:.1f},{top:.1f}L{half:.1f},{middle:.1f}"
        f"L{right:.1f},{middle:.1f}L{right:.1f},{middle:.1f}Z"
    )
    assert f"L{half:.1f},{bottom:.1f}L{right:.1f},{bottom:.1f}" in loss
    assert "1 better, 1 worse, 0 the same; mean +0.0000" in chart.svg
    assert len(charts.gains("t", "RR", [i / 1e5 for i in range(9000)]).svg) < 100_000


def test_a_scatter_joins_queries_of_equal_values():
    left, _, top, bottom = SPACE
    chart = charts.scatter("t", ("A", "B"), [(0.0, 1.0), (0.0, 1.0), (1.0, 0.25), (0.5, 0.5)])
    found = {title: (x, y) for x, y, _, title in circles(chart.svg)}
    assert found["2 queries: 0.00, 1.00"] == (left, top)
    assert found["1 query: 1.00, 0.25"][1] == pytest.approx(bottom - (bottom - top) / 4, abs=0.06)
    groups = dict(re.findall(r'<g class="points (\w+)">(.*?)</g>', chart.svg))
    assert [name for name, text in groups.items() if "2 queries: 0.00, 1.00" in text] == ["gain"]
    assert [name for name, text in groups.items() if "1 query: 1.00, 0.25" in text] == ["loss"]
    assert "2 queries above the diagonal, 1 below, 1 on it" in chart.svg


def test_curves_of_a_training():
    """A loss of 40 steps has a mean of two values; the best point is that of the monitored measure."""
    curves = {
        "train/loss": [(i, float(i)) for i in range(1, 41)],
        "val/RR": [(10, 0.2), (20, 0.1)],
        "val/nDCG@10": [(10, 0.4), (20, 0.6)],
        "optim/lr": [(1, 0.1)],
    }
    loss, measured = charts.training(curves, "val/nDCG@10")
    assert loss.legend == ("mean of 2 logged values",) and "as logged ends at 40.0000" in loss.svg
    assert "mean of 2 logged values ends at 39.5000" in loss.svg
    assert measured.legend == ("nDCG@10", "RR")
    assert measured.title == "Validation measures; ring: best nDCG@10, 0.6000 at step 20"
    assert circles(measured.svg)[-1][3] == "best: 0.6000 at step 20"
    assert charts.training({}, None) == []


def test_a_long_line_keeps_its_ends_and_its_mean():
    points = [(float(i), float(i % 7)) for i in range(10_000)]
    thin = charts.thinned(points, 100)
    assert len(thin) == 100 and thin[-1] == points[-1]
    assert sum(y for _, y in thin[:-1]) / 99 == pytest.approx(3.0, abs=0.05)
