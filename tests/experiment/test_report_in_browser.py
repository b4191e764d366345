"""The report page as a reader meets it: opened from disk in headless Chromium, on a desk and on a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_runs import example_run

from fedskew.report import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.browser

# Everything whose box leaves the page to the right, every picture without a size, every letter in a picture that is
# lower than 9 pixels or lies outside its picture.
MEASURE = """() => {
  const width = document.documentElement.clientWidth;
  const svgs = [...document.querySelectorAll("figure > svg")];
  const inside = (text) => {
    const [box, frame] = [text.getBoundingClientRect(), text.closest("svg").getBoundingClientRect()];
    return box.left >= frame.left - 2 && box.right <= frame.right + 2 && box.top >= frame.top - 2
      && box.bottom <= frame.bottom + 2;
  };
  const texts = [...document.querySelectorAll("figure text")];
  return {
    page: document.documentElement.scrollWidth,
    wide: [...document.querySelectorAll("main *")].filter((e) => e.getBoundingClientRect().right > width + 1)
      .map((e) => e.tagName + " " + e.textContent.slice(0, 40)),
    pictures: svgs.length,
    hidden: svgs.filter((e) => !e.checkVisibility() || e.getBoundingClientRect().width < 200
      || e.getBoundingClientRect().height < 50).length,
    keys: [...document.querySelectorAll(".legend use")].filter((e) => e.getBoundingClientRect().width < 10).length,
    small: texts.filter((e) => e.getBoundingClientRect().width && parseFloat(getComputedStyle(e).fontSize)
      * e.getScreenCTM().a < 9 && e.getScreenCTM().b === 0).map((e) => e.textContent),
    outside: texts.filter((e) => !inside(e)).map((e) => e.textContent),
  };
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium on the PATH (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    names = ("fedavg", "fedentopt+fedprox+fedpals", "<script>document.title = 'run'</script>")
    small = [example_run(name, seed, diverging=(2,)) for name in names for seed in (0, 1, 2)]
    large = [
        example_run(name, clients=200, classes=100, cohort=20, rounds=60, client_evaluations=True) for name in names
    ]
    return {
        "one seed": write_report([example_run(evaluate_every=7, target=False)], folder / "one.html", "One run"),
        "comparison": write_report(small, folder / "small.html", "Three methods, <script>and more</script>"),
        "200 clients and 100 classes": write_report(large, folder / "large.html", "Three methods " * 6),
    }


@pytest.mark.parametrize(
    ("which", "width", "scheme"),
    [
        ("one seed", 1280, "dark"),
        ("one seed", 390, "light"),
        ("comparison", 1280, "light"),
        ("comparison", 390, "dark"),
        ("200 clients and 100 classes", 1280, "light"),
        ("200 clients and 100 classes", 390, "light"),
    ],
)
def test_the_page_is_whole_readable_and_silent(chromium, pages, which, width, scheme):
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(pages[which].as_uri())
    for details in page.locator("summary").all():
        details.click()
    seen = page.evaluate(MEASURE)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    context.close()

    assert said == []
    assert asked == [pages[which].as_uri()]
    assert seen["page"] <= width
    assert seen["wide"] == []
    assert seen["pictures"] >= 9
    assert seen["hidden"] == 0
    assert seen["keys"] == 0
    assert seen["small"] == []
    assert seen["outside"] == []
    assert (max(int(part) for part in background[4:-1].split(",")) < 64) == (scheme == "dark")
