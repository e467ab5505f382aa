"""The report in a real browser: all is drawn, answers to the mouse, and fits on a phone and on paper."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.made import HANDFUL, Entrant, made
from thinwire.net.costs import Link
from thinwire.predict import BreakEven
from thinwire.tools.report import comparison
from thinwire.tools.report.forecast import BANDWIDTHS, WORKERS, Forecast, Prediction
from thinwire.tools.report.summary import summarise

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt install chromium")

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]
EVIL = "<img src=x onerror=alert(1)>"
DRAWN = "[...document.querySelectorAll('.chart')].every(p => p.querySelector('.main-svg .trace'))"


def straight(method: str, sent: float) -> Prediction:
    """A prediction without the method's code: compute, and bytes over bandwidth."""
    link = Link(1e-4, 12.5e6)
    by_workers = tuple(0.03 + link.seconds(count, sent) for count in WORKERS)
    by_bandwidth = tuple(0.03 + sent / each for each in BANDWIDTHS)
    return Prediction(method, by_bandwidth, by_workers, BreakEven("below", 5e8), 0.03 + sent / 12.5e6)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = made((*HANDFUL, Entrant(EVIL, 0.1, 0.001, fails_at=60)), seeds=2, interface=True)
    summaries = summarise(records)
    predictions = tuple(straight(one.method, 1e7 / (1 + number)) for number, one in enumerate(summaries))
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(comparison.render(records, summaries, Forecast(predictions, {})))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def window(request: pytest.FixtureRequest) -> dict[str, object]:
    """A desktop, unless a test asks for another one."""
    return {"viewport": {"width": 1280, "height": 900}, **getattr(request, "param", {})}


@pytest.fixture
def page(browser: playwright.Browser, report: Path, window: dict[str, object]) -> Iterator[playwright.Page]:
    """The report; afterwards nothing may have gone wrong, and nothing been asked for."""
    trouble: list[str] = []
    requests: list[str] = []
    found = browser.new_page(**window)
    found.set_default_timeout(60_000)
    found.on("pageerror", lambda error: trouble.append(str(error)))
    found.on("console", lambda said: trouble.append(said.text) if said.type != "log" else None)
    found.on("request", lambda request: requests.append(request.url))
    found.goto(report.as_uri())
    found.wait_for_selector("html[data-drawn]", state="attached")
    assert found.evaluate(DRAWN)
    yield found
    found.close()
    assert trouble == []
    # A file that is saved is taken from the page itself.
    assert {each for each in requests if not each.startswith("blob:")} == {report.as_uri()}


MARKS = """box => [...box.querySelectorAll('.points path, .bars .point path')]
  .filter(p => p.getBBox().width > 0).map(p => p.getBoundingClientRect())
  .map(b => [b.x + b.width / 2, b.y + b.height / 2])"""


def test_every_plot_is_drawn_and_answers_to_the_mouse(page: playwright.Page) -> None:
    charts = page.locator(".chart")
    assert charts.count() == 6
    for chart in charts.all():
        chart.evaluate("box => box.scrollIntoView({block: 'center'})")
        marks = chart.evaluate(MARKS)
        name = chart.get_attribute("id")
        assert len(marks) >= 6, name
        assert re.search(r"\d", hover(page, chart, marks)), name


def hover(page: playwright.Page, chart: playwright.Locator, marks: list[list[float]]) -> str:
    """What appears when the mouse goes over the middle of a few marks."""
    for x, y in marks[len(marks) // 2 :][:5]:
        page.mouse.move(x - 3, y)
        page.mouse.move(x, y)
        for _ in range(150):
            if text := chart.locator(".hoverlayer").first.text_content():
                return text
            page.wait_for_timeout(20)
    return ""


def test_the_switch_shows_other_data(page: playwright.Page) -> None:
    axes = "[document.querySelector('.xtitle').textContent, document.querySelector('.ytitle').textContent]"
    assert page.evaluate(axes) == ["training time in s", "test accuracy"]
    page.click("input[value='training loss'] + span")
    page.click("input[value='sent'] + span")
    page.wait_for_function(f"{axes}.join() === 'sent by each worker in MB,training loss'")
    assert page.locator("#training .points path").count() > 50
    page.click("input[value='accuracy'] + span")
    page.click("input[value='step'] + span")
    page.wait_for_function(f"{axes}.join() === 'step,test accuracy'")


def test_the_legend_hides_a_method_everywhere(page: playwright.Page) -> None:
    visible = (
        "[...document.querySelectorAll('.chart')].flatMap(c => c.data)"
        ".filter(t => t.meta === 'fp16').map(t => t.visible ?? true)"
    )
    assert set(page.evaluate(visible)) == {True}
    page.click(".legend button[data-series='fp16']")
    page.wait_for_function(f"{visible}.every(v => v === false)")
    assert page.locator("button[data-series=fp16][aria-pressed=true]").count() == 0
    page.click("input[value='test loss'] + span")
    page.wait_for_function("document.querySelector('.ytitle').textContent === 'test loss'")
    assert set(page.evaluate(visible)) == {False}


def test_tables_sort_and_copy(page: playwright.Page) -> None:
    summary = page.locator(".table", has_text="Summary")
    first = summary.locator("tbody tr").first.locator("th")
    assert first.text_content() == "dense"
    summary.locator("thead button", has_text="time to").click()
    playwright.expect(first).to_have_text("powersgd(rank=2)")
    page.evaluate("navigator.clipboard.writeText = async text => { window.copied = text; }")
    summary.locator(".copy").click()
    page.wait_for_function("!!window.copied")
    rows = page.evaluate("window.copied").splitlines()
    assert rows[0].startswith("method,accuracy,time to 97")
    assert rows[0].endswith("compute,compress,network")  # also those that are not shown
    assert re.match(r"powersgd\(rank=2\),0\.97\d{4,}", rows[1])  # not as rounded as it is shown
    assert len(rows) == 1 + len(HANDFUL) + 1


@pytest.mark.slow
def test_a_button_shows_all_columns(page: playwright.Page) -> None:
    summary = page.locator(".table", has_text="Summary")
    heads = summary.locator("thead th:visible")
    assert heads.all_text_contents() == [
        "method",
        "accuracy",
        "time to 97\u00a0%",
        "speed-up over dense",
        "median step",
        "sent per worker",
    ]
    summary.locator(".more").click()
    assert heads.count() == 13
    summary.locator(".more").click()
    assert heads.count() == 6


@pytest.mark.slow
def test_the_legend_stays_in_sight(page: playwright.Page) -> None:
    page.locator("#workers").scroll_into_view_if_needed()
    box = page.locator("div.legend").bounding_box()
    assert box is not None
    assert 0 <= box["y"] < 20
    assert box["height"] < 110


@pytest.mark.slow
def test_the_records_can_be_saved(page: playwright.Page, tmp_path: Path) -> None:
    with page.expect_download() as download:
        page.click("[data-download]")
    assert download.value.suggested_filename == "records.jsonl"
    download.value.save_as(tmp_path / "records.jsonl")
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["kind"] == "setting"
    assert json.loads(lines[-1])["kind"] == "run"


@pytest.mark.parametrize(
    "window",
    [{"viewport": {"width": 375, "height": 800}, "is_mobile": True, "has_touch": True}],
    indirect=True,
    ids=["phone"],
)
def test_it_fits_on_a_phone(page: playwright.Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    too_wide = (
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, .legend') && "
        "e.getBoundingClientRect().right > 376 && !e.closest('svg')).map(e => e.outerHTML.slice(0, 80))"
    )
    assert page.evaluate(too_wide) == []
    assert (
        page.evaluate("Math.min(...[...document.querySelectorAll('.chart')].map(c => c.clientWidth))") >= 340
    )


@pytest.mark.slow
def test_it_is_printed_on_paper(page: playwright.Page) -> None:
    page.evaluate(
        "addEventListener('beforeprint', () => { window.widths = "
        "[...document.querySelectorAll('.chart .main-svg')].map(s => s.getBoundingClientRect().width); })"
    )
    printed = page.pdf(prefer_css_page_size=True)
    widths = page.evaluate("window.widths")
    assert widths
    assert max(widths) <= 690
    assert 2 <= printed.count(b"/Type /Page\n") <= 8
    page.wait_for_function("document.querySelector('.chart .main-svg').getBoundingClientRect().width > 1000")


def test_nothing_from_the_records_becomes_a_part_of_the_page(page: playwright.Page) -> None:
    assert page.locator("img").count() == 0
    assert page.evaluate(f"document.body.textContent.includes({json.dumps(EVIL)})") is True
