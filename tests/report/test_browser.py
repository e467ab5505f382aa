"""The report in a real browser: all is drawn, answers to the mouse, and fits on a phone and on paper."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.browser import PROGRAM, Browser
from tests.report.made import HANDFUL, Entrant, made
from thinwire.net.costs import Link
from thinwire.predict import BreakEven
from thinwire.tools.report import comparison, page, words
from thinwire.tools.report.forecast import BANDWIDTHS, WORKERS, Forecast, Prediction
from thinwire.tools.report.summary import summarise

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium here: `apt install chromium`")

EVIL = "<img src=x onerror=alert(1)>"


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
    sections = comparison.sections(records, summaries, Forecast(predictions, {}))
    path = tmp_path_factory.mktemp("report") / "report.html"
    page.write(path, words.heading(records), sections)
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def opened(browser: Browser, report: Path) -> Iterator[Browser]:
    """The report on a desktop; afterwards nothing may have gone wrong, and nothing been asked for."""
    browser.trouble.clear()
    browser.requests.clear()
    browser.open(report)
    yield browser
    assert browser.trouble == []
    assert set(browser.requests) <= {report.as_uri()}


POINTS = """(() => {
  const box = document.querySelectorAll('.chart')[%d];
  box.scrollIntoView({block: 'center'});
  const marks = [...box.querySelectorAll('.points path, .bars .point path')];
  const boxes = marks.filter(p => p.getBBox().width > 0).map(p => p.getBoundingClientRect());
  return boxes.map(b => [b.x + b.width / 2, b.y + b.height / 2]);
})()"""


def test_every_plot_is_drawn_and_answers_to_the_mouse(opened: Browser) -> None:
    count = opened.run("document.querySelectorAll('.chart').length")
    assert count == 6
    for number in range(count):
        marks = opened.run(POINTS % number)
        assert len(marks) >= 6, f"plot {number + 1}"
        text = hover(opened, number, marks)
        assert re.search(r"\d", text), f"plot {number + 1}: {text!r}"


def hover(browser: Browser, number: int, marks: list[list[float]]) -> str:
    """What appears when the mouse goes over the middle of a few marks."""
    found = f"document.querySelectorAll('.chart')[{number}].querySelector('.hoverlayer').textContent"
    for x, y in marks[len(marks) // 2 :][:5]:
        browser.mouse(x - 3, y)
        browser.mouse(x, y)
        for _ in range(30):
            if text := browser.run(found):
                return text
            browser.run("new Promise(done => setTimeout(done, 20))")
    return ""


def test_the_switch_shows_other_data(opened: Browser) -> None:
    axes = "[document.querySelector('.xtitle').textContent, document.querySelector('.ytitle').textContent]"
    assert opened.run(axes) == ["training time in s", "test accuracy"]
    opened.click("input[value='train'] + span")
    opened.click("input[value='sent'] + span")
    opened.wait(f"{axes}.join() === 'sent by each worker in MB,training loss'")
    assert opened.run("document.querySelectorAll('#plot-1 .points path').length") > 50
    opened.click("input[value='accuracy'] + span")
    opened.click("input[value='step'] + span")
    opened.wait(f"{axes}.join() === 'step,test accuracy'")


def test_the_legend_hides_a_method_everywhere(opened: Browser) -> None:
    visible = (
        "[...document.querySelectorAll('.chart')].flatMap(c => c.data)"
        ".filter(t => t.meta === 'fp16').map(t => t.visible ?? true)"
    )
    assert set(opened.run(visible)) == {True}
    opened.click("#plot-1 ~ .legend button[data-series='fp16']")
    opened.wait(f"{visible}.every(v => v === false)")
    assert opened.run("document.querySelectorAll('button[data-series=fp16][aria-pressed=true]').length") == 0


def test_tables_sort_and_copy(opened: Browser) -> None:
    first = "document.querySelectorAll('table')[1].tBodies[0].rows[0].cells[0].textContent"
    assert opened.run(first) == "dense"
    column = opened.run(
        "[...document.querySelectorAll('table')[1].tHead.rows[0].cells]"
        ".findIndex(c => c.textContent.startsWith('time to'))"
    )
    opened.run("document.querySelectorAll('table')[1].id = 'summary'")
    opened.click(f"#summary thead th:nth-child({column + 1}) button")
    opened.wait(f"{first} === 'powersgd(rank=2)'")
    opened.run("navigator.clipboard.writeText = async text => { window.copied = text; }")
    opened.click("#summary")
    opened.run("document.querySelectorAll('.copy')[1].click()")
    opened.wait("!!window.copied")
    rows = opened.run("window.copied").splitlines()
    assert rows[0].startswith("method,accuracy,steps to 97")
    assert re.match(r"powersgd\(rank=2\),0\.97\d{4,}", rows[1])  # not as rounded as it is shown
    assert len(rows) == 1 + len(HANDFUL) + 1


def test_the_records_can_be_saved(opened: Browser, tmp_path: Path) -> None:
    opened.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    opened.click("[data-download]")
    path = tmp_path / "records.jsonl"
    opened.until(path.exists, "the file")
    opened.until(lambda: path.read_text().endswith("}\n"), "its end")
    assert json.loads(path.read_text().splitlines()[0])["kind"] == "setting"
    # The file is taken from the page itself.
    opened.requests[:] = [each for each in opened.requests if not each.startswith("blob:")]


def test_it_fits_on_a_phone(opened: Browser, report: Path) -> None:
    opened.open(report, 375, 800, phone=True)
    assert opened.run("document.documentElement.scrollWidth") == 375
    too_wide = (
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll') && "
        "e.getBoundingClientRect().right > 376 && !e.closest('svg')).map(e => e.outerHTML.slice(0, 80))"
    )
    assert opened.run(too_wide) == []
    assert opened.run("Math.min(...[...document.querySelectorAll('.chart')].map(c => c.clientWidth))") >= 340


def test_it_is_printed_on_paper(opened: Browser, tmp_path: Path) -> None:
    opened.run("window.widths = []")
    opened.run(
        "addEventListener('beforeprint', () => { window.widths = "
        "[...document.querySelectorAll('.chart .main-svg')].map(s => s.getBoundingClientRect().width); })"
    )
    path = tmp_path / "report.pdf"
    opened.pdf(path)
    widths = opened.run("window.widths")
    assert widths
    assert max(widths) <= 690
    pages = path.read_bytes().count(b"/Type /Page\n")
    assert 2 <= pages <= 8
    opened.wait("document.querySelector('.chart .main-svg').getBoundingClientRect().width > 1000")


def test_nothing_from_the_records_becomes_a_part_of_the_page(opened: Browser) -> None:
    assert opened.run("document.querySelectorAll('img').length") == 0
    assert opened.run(f"document.body.textContent.includes({json.dumps(EVIL)})") is True
