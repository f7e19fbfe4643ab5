"""A page in a real browser: it opens without errors, sorts, filters and unfolds queries; hostile texts run no code."""

import shutil

import pytest

from ranker.data.collection import Doc, MemoryDocs
from ranker.reports.content import Limits, RankedSet, Texts, set_content, with_terms
from ranker.reports.page import Page, write_page

pytest.importorskip("selenium", reason="needs selenium (extra dev)")
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

HOSTILE = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 2'>"
BEFORE = {"q1": {"d1": 2.0, "d2": 1.0}, "q2": {"d1": 2.0, "d2": 1.0}, "q10": {"d3": 2.0, "d1": 1.0}}
AFTER = {"q1": {"d1": 1.0, "d2": 2.0}, "q2": {"d1": 2.0, "d2": 1.0}, "q10": {"d3": 1.0, "d1": 2.0}}
QRELS = {"q1": {"d2": 1}, "q2": {"d1": 2}, "q10": {"d3": 1, "d4": 1}}
VALUES = {
    "first stage": {"q1": {"RR": 0.5, "P@1": 0.0}, "q2": {"RR": 1.0, "P@1": 1.0}, "q10": {"RR": 1.0, "P@1": 0.0}},
    "run": {"q1": {"RR": 1.0, "P@1": 1.0}, "q2": {"RR": 1.0, "P@1": 1.0}, "q10": {"RR": 0.5, "P@1": 0.5}},
}
QUERIES = {"q1": "stolen passwords", "q2": f"second {HOSTILE}", "q10": "a third question"}
DOCS = [
    Doc("d1", f"A password was stolen. {HOSTILE}", "Theft"),
    Doc("d2", "Many passwords are weak."),
    Doc("d3", "third"),
    Doc("d4", "nowhere ranked"),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    part = RankedSet(
        "set", {"first stage": BEFORE, "run": AFTER}, QRELS, VALUES, texts=Texts(QUERIES, MemoryDocs(DOCS))
    )
    content = with_terms(set_content(part, Limits()))
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(path, Page("A page", {"Run": "here"}, "ranker train", "name: x", {}, (), None, [content]), Limits())
    return path.as_uri()


@pytest.fixture(scope="module")
def browser():
    """Chromium with its driver, as Debian's packages chromium and chromium-driver install them."""
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs Chromium and its driver (apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


@pytest.fixture
def page(browser, address):
    browser.get(address)
    return browser


def shown(page):
    """Ids of the listed queries."""
    return [element.text for element in page.find_elements(By.CSS_SELECTOR, "tr.row .id")]


def press(page, selector, key=Keys.ENTER):
    page.find_element(By.CSS_SELECTOR, selector).send_keys(key)


def test_it_opens_without_errors_and_runs_no_foreign_script(page):
    assert page.title == "A page"
    assert page.get_log("browser") == []
    assert page.execute_script("return window.broken === undefined")
    press(page, "tr.row:nth-child(1) button")
    assert page.execute_script("return window.broken === undefined && !document.querySelector('img')")
    assert "img src=x" in page.find_element(By.CSS_SELECTOR, ".detail .docs").text


def test_it_sorts_by_the_keyboard(page):
    assert shown(page) == ["q1", "q2", "q10"]  # by difference: +0.5, 0, -0.5
    press(page, "th[data-key='difference'] button")
    assert shown(page) == ["q10", "q2", "q1"]
    press(page, "th[data-key='id'] button", Keys.SPACE)
    assert shown(page) == ["q1", "q2", "q10"]  # 2 comes before 10
    heading = page.find_element(By.CSS_SELECTOR, "th[data-key='id']")
    assert heading.get_attribute("aria-sort") == "ascending"
    press(page, "th[data-key='0'] button")
    assert shown(page) == ["q2", "q10", "q1"]  # 1, 1, 0.5
    page.find_element(By.CSS_SELECTOR, "select option:nth-child(2)").click()  # P@1: 0, 1, 0 before
    assert shown(page) == ["q2", "q1", "q10"]
    cells = [cell.text.split() for cell in page.find_elements(By.CSS_SELECTOR, "tr.row:nth-child(2) td")]
    assert cells == [["0.0000"], ["1.0000"], ["+1.0000"]]


def test_it_filters(page):
    search = page.find_element(By.CSS_SELECTOR, "input[type=search]")
    search.send_keys("Passwords stolen")
    assert shown(page) == ["q1"]
    assert page.find_element(By.CSS_SELECTOR, "[role=status]").text == "1 of 3 queries"
    search.clear()
    search.send_keys("q10")
    assert shown(page) == ["q10"]
    search.clear()
    search.send_keys(" ")
    page.find_element(By.XPATH, "//option[text()='worse']").click()
    assert shown(page) == ["q10"]
    page.find_element(By.XPATH, "//option[text()='better']").click()
    assert shown(page) == ["q1"]


def test_it_unfolds_a_query(page):
    button = page.find_element(By.CSS_SELECTOR, "tr.row:nth-child(1) button")
    button.send_keys(Keys.ENTER)
    assert button.get_attribute("aria-expanded") == "true"
    detail = page.find_element(By.ID, button.get_attribute("aria-controls"))
    before, after = detail.find_elements(By.CSS_SELECTOR, ".runs > div")
    assert [element.text for element in before.find_elements(By.CSS_SELECTOR, ".docid")] == ["d1", "d2"]
    assert [element.text for element in after.find_elements(By.CSS_SELECTOR, ".docid")] == ["d2", "d1"]
    first = after.find_element(By.CSS_SELECTOR, ".doc")
    assert "relevant" in first.get_attribute("class") and "up from 2" in first.text and "grade 1" in first.text
    marks = [element.text for element in detail.find_elements(By.CSS_SELECTOR, ".runs > div:first-child mark")]
    assert marks == ["password", "stolen", "passwords"]
    button.send_keys(Keys.ENTER)
    assert button.get_attribute("aria-expanded") == "false" and not page.find_elements(By.CSS_SELECTOR, ".detail")


def test_relevant_docs_that_no_run_has_are_listed(page):
    press(page, "tr.row:nth-child(3) button")
    below = page.find_element(By.CSS_SELECTOR, ".below")
    assert "d4" in below.text and "first stage: not ranked, run: not ranked" in below.text


@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_into_a_narrow_and_a_wide_window(page, width):
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    )
    press(page, "tr.row:nth-child(1) button")
    widths = page.execute_script("const page = document.documentElement; return [page.scrollWidth, page.clientWidth]")
    assert widths[0] == widths[1] <= width
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
