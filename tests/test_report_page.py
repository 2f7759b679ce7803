"""The page of a report in a real browser, without a window."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Browser, find_browser
from hiap.report.writing import write_report
from made_runs import made_run

pytestmark = pytest.mark.skipif(find_browser() is None, reason="needs a browser: apt-get install chromium")

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SHOWN = "(() => { const tip = document.getElementById('tip'); return tip.hidden ? null : tip.innerText; })()"
MIDDLE = """(() => {
  const part = document.querySelector(%s); part.scrollIntoView({block: 'center'});
  const box = part.getBoundingClientRect(); return [box.x + box.width * %g, box.y + box.height / 2];
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run whose words are long, so that they must wrap."""
    folder = made_run(tmp_path_factory.mktemp("page") / ("a_run_with_a_long_name_" * 3), 12)
    starts = json.loads((folder / "environment.json").read_text())
    starts[0]["command"] += " --weights " + "x" * 200
    (folder / "environment.json").write_text(json.dumps(starts))
    picture = {"label": "a_class_with_a_long_name", "dense": "a", "compact": "b", "png": PIXEL}
    (folder / "mistakes.json").write_text(json.dumps([picture] * 5))
    return write_report(folder)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.mark.parametrize("width", [375, 768, 1440])
def test_the_page_fits_its_screen_asks_for_nothing_and_has_no_errors(width: int, browser: Browser, page: Path) -> None:
    browser.open(page, width)
    assert browser.ask("[document.documentElement.scrollWidth, document.body.scrollWidth]") == [width, width]
    sizes = browser.ask(
        "[...document.querySelectorAll('.chart svg')].map((one) => one.getBoundingClientRect())"
        ".map((box) => [box.left, box.right, box.height])"
    )
    assert len(sizes) >= 14
    assert all(left >= 0 and right <= width and height > 60 for left, right, height in sizes)
    assert browser.ask("[...document.querySelectorAll('.chart svg')].every((o) => o.querySelector('path, image'))")
    assert browser.ask("[...document.images].every((one) => one.complete && one.naturalWidth > 0)")
    assert browser.requests() == [] and browser.complaints() == []


def test_the_example_of_the_docs_fits_a_phone_asks_for_nothing_and_has_no_errors(browser: Browser) -> None:
    example = Path(__file__).parents[1] / "docs" / "example" / "vit_tiny.html"
    browser.open(example, 375)
    assert browser.ask("[document.documentElement.scrollWidth, document.body.scrollWidth]") == [375, 375]
    assert browser.ask("[...document.querySelectorAll('.chart svg')].every((o) => o.querySelector('path, image'))")
    assert browser.ask("document.querySelectorAll('.chart svg').length") >= 17
    assert browser.requests() == [] and browser.complaints() == [] and example.stat().st_size < 3e6


def test_dark_and_light_have_colours_of_their_own(browser: Browser, page: Path) -> None:
    colours = []
    for dark in (False, True):
        browser.open(page, 1440, dark=dark)
        colours.append(browser.ask("getComputedStyle(document.body).backgroundColor"))
        line = "getComputedStyle(document.querySelector('.chart svg path[style*=\"--c1\"]')).stroke"
        colours.append(browser.ask(line))
    assert len(set(colours)) == 4


@pytest.mark.parametrize("width", [375, 1440])
def test_numbers_show_where_the_pointer_is(width: int, browser: Browser, page: Path) -> None:
    browser.open(page, width)
    assert browser.ask(SHOWN) is None
    for part, place, words in [
        ('.chart[aria-label="Accuracy, percent"] svg', 0.6, ["epoch", "gates hard", "dense model 80.00 %"]),
        ('.chart[aria-label="Neurons"] svg', 0.6, ["epoch", "block", "of 96 neurons"]),
        (".network .attention g", 0.5, ["block 0, head 0"]),
        (".network .ffn g", 0.5, ["block 0, FFN:", "of 96 neurons"]),
    ]:
        x, y = browser.ask(MIDDLE % (json.dumps(part), place))
        browser.point_at(x, y)
        shown = browser.ask(SHOWN)
        assert shown is not None and all(word in shown for word in words), (part, shown)
        left, right = browser.ask("(() => { const b = tip.getBoundingClientRect(); return [b.left, b.right]; })()")
        assert left >= 0 and right <= width
    browser.point_at(1, 1)
    assert browser.ask(SHOWN) is None and browser.complaints() == []


def test_a_table_is_copied_as_text(browser: Browser, page: Path) -> None:
    browser.open(page, 1440)
    copied = browser.ask(
        """(async () => {
          let text = null;
          Object.defineProperty(navigator, "clipboard", { value: { writeText: async (value) => { text = value; } } });
          document.querySelector("[data-copy$=topology]").click();
          await new Promise((done) => setTimeout(done, 50));
          return text;
        })()"""
    )
    lines = copied.splitlines()
    assert lines[0].split("\t")[:3] == ["block", "heads", "q/k dims"] and len(lines) == 5


def test_the_page_prints(browser: Browser, page: Path) -> None:
    browser.open(page, 1440, dark=True)
    printed = browser.pdf()
    assert printed.startswith(b"%PDF-") and len(printed) > 20_000
    browser.call("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.ask("getComputedStyle(document.querySelector('.copy')).display") == "none"
