"""The report page as a reader meets it: opened from disk in headless Chromium, on a desk and on a phone."""

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from example_runs import example_run, rare_run

from fedskew.report import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [pytest.mark.browser, pytest.mark.slow]

MEASURE = (Path(__file__).parent / "measure.js").read_text(encoding="utf-8")


TALL = 20_000
"""A height of the window in which all of a page is seen."""


def wait_until_drawn(page: Any) -> None:
    ready = "[...document.querySelectorAll('.chart')].every((e) => e.querySelector('.main-svg'))"
    end = time.monotonic() + 60
    while not page.evaluate(ready) and time.monotonic() < end:
        time.sleep(0.05)


def grow(page: Any, width: int) -> None:
    """Make the window so tall that all figures are seen, and wait until they are drawn."""
    page.set_viewport_size({"width": width, "height": TALL})
    wait_until_drawn(page)


def show(figure: Any) -> None:
    """Bring a figure into the window, and wait until it is drawn."""
    figure.scroll_into_view_if_needed()
    figure.locator(".main-svg").first.wait_for(state="attached")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium on the PATH (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page, waits until all its figures are drawn, and checks afterwards that it said and asked for nothing.

    A figure is drawn when it is seen, and that takes most of a test: with a small `height` few are, and none is waited
    for.
    """
    contexts, said, asked = [], [], []

    def open_page(path: Path, width: int, scheme: str = "light", height: int = TALL) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        if height == TALL:
            wait_until_drawn(page)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == []


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    names = ("fedavg", "fedentopt+fedprox+fedpals", "<script>document.title = 'run'</script>")
    small = [
        example_run(name, seed, diverging=(2,), skill=0.6 + 0.05 * at)
        for at, name in enumerate(names)
        for seed in (0, 1, 2)
    ]
    class_names = tuple(f"class name number {number}" for number in range(300))
    many = {"clients": 200, "classes": 300, "cohort": 20, "rounds": 5, "client_evaluations": True}
    large = [example_run(name, class_names=class_names, **many) for name in names]
    chinese = [f"{name}市第{at}人民医院" for at, name in enumerate(("北京", "上海", "广州"))]
    four = ("肺炎", "正常", "新冠", "结核")
    few = example_run(
        "本地", clients=3, classes=4, cohort=2, rounds=15, class_names=four, evaluate_every=7, target=False
    )
    cells = [
        example_run(f"{method}, beta={beta}", seed, rounds=3, skill=0.3 + 0.05 * at - 0.1 * float(beta))
        for at, method in enumerate(("fedavg", "fedprox", "fedvls", "mine"))
        for beta in ("0.1", "0.5")
        for seed in (0, 1)
    ]
    axes = {run.label: dict(zip(("method", "beta"), run.label.split(", beta="), strict=True)) for run in cells}
    return {
        "comparison": write_report(small, folder / "small.html", "Three methods, <script>and more</script>"),
        "200 clients and 300 classes": write_report(large, folder / "large.html", "Three methods " * 6),
        "one seed of three hospitals": write_report(
            [dataclasses.replace(few, client_names=tuple(chinese))], folder / "few.html", "三家医院"
        ),
        "sweep": write_report(cells, folder / "sweep.html", "A sweep", axes=axes, accuracy=0.3, notes=["A note."]),
    }


def assert_whole(page: Any, width: int, scheme: str) -> None:
    """Nothing is cut off, empty or too small to read, and the page has the colours that were asked for."""
    page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    seen = page.evaluate(MEASURE)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert seen["page"] <= width
    assert seen["wide"] == []
    assert seen["charts"] >= 9
    assert seen["empty"] == 0
    assert seen["small"] == []
    assert seen["outside"] == []
    if width > 1000:  # a phone has no room beside the buttons, and shows them to a finger alone
        assert seen["covered"] == []
    assert (max(int(part) for part in background[4:-1].split(",")) < 64) == (scheme == "dark")


def test_a_run_without_a_target_is_whole_by_night(opened, pages):
    assert_whole(opened(pages["one seed of three hospitals"], 1280, "dark"), 1280, "dark")


def test_heat_maps_of_300_classes_with_long_names_have_room_on_a_phone(opened, pages):
    page = opened(pages["200 clients and 300 classes"], 390)
    assert_whole(page, 390, "light")
    widths = page.evaluate(
        "[...document.querySelectorAll('.chart')].filter((e) => e.data.some((trace) => trace.type === 'heatmap'))"
        ".map((e) => e._fullLayout._size.w / e.clientWidth)"
    )
    assert len(widths) >= 3
    assert min(widths) > 0.5


FIRST = "document.querySelector('[data-chart=\"0\"]')"
LINES = f"{FIRST}.data.filter((trace) => trace.name)"


def wait_for(page: Any, said: str) -> None:
    """Wait until the first figure is as said: a menu comes into view when chosen, and what left it is drawn later."""
    show(page.locator('[data-chart="0"]'))
    page.wait_for_function(said)


def order(page: Any) -> list[str]:
    return page.evaluate(
        "[...document.querySelectorAll('#ranked tbody tr')].filter((e) => !e.hidden)"
        ".map((e) => e.cells[1].textContent.trim())"
    )


@pytest.mark.first
def test_a_sweeps_page_is_whole_and_its_runs_are_switched_smoothed_filtered_and_sorted(opened, pages):
    page = opened(pages["sweep"], 1280, height=2_000)
    show(page.locator('[data-chart="0"]'))
    assert order(page)[0] == "mine, beta=0.1"
    wait_for(page, f"{LINES}.length === 8")
    page.locator(".chip").nth(0).click()
    wait_for(page, f"{LINES}.length === 7")
    page.locator("#all").click()
    wait_for(page, f"{LINES}.length === 8")

    last = f"{LINES}[0].y.at(-1)"
    raw = page.evaluate(last)
    page.locator("#smoothing").fill("0.9")
    wait_for(page, f"{last} < {raw}")  # accuracy rises, so its moving average lags
    page.locator("#smoothing").fill("0")
    wait_for(page, f"{last} === {raw}")

    page.select_option("[data-axis=beta]", "0.5")
    assert len(order(page)) == 4
    page.locator("#filter").fill("fed")
    assert order(page) == [f"{name}, beta=0.5" for name in ("fedvls", "fedprox", "fedavg")]
    page.locator("th[data-sort=label] button").click()
    assert order(page) == [f"{name}, beta=0.5" for name in ("fedavg", "fedprox", "fedvls")]
    wait_for(page, f"{LINES}.length === 3")

    page.select_option("#reference", "method = fedvls")
    assert page.locator("#ranked tbody tr:not([hidden]) .difference").last.text_content() == "reference"
    page.select_option("#axis", "beta")
    page.select_option("#measure", "seconds")
    assert page.locator("#difference").text_content() == "Seconds against method = fedvls"

    assert page.evaluate(MEASURE)["wide"] == []
    grow(page, 390)
    assert_whole(page, 390, "light")


def test_a_comparison_is_whole_and_orders_menus_and_the_time_of_day_change_a_figure(opened, pages):
    page = opened(pages["comparison"], 390, "light", height=2_000)
    heat = page.locator("figure", has_text="Every class, round by round")
    show(heat)
    before = heat.locator(".chart").evaluate("(e) => e.data[0].z[0].at(-1)")
    heat.locator("[data-pick]").select_option("2")
    assert heat.locator(".chart").evaluate("(e) => e.data[0].z[0].at(-1)") != before
    heat.locator("[data-order]").select_option("fewest samples first")
    shown = heat.locator(".chart").evaluate("(e) => e.layout.yaxis.categoryarray")
    assert shown != heat.locator(".chart").evaluate("(e) => e.data[0].y")
    show(page.locator('[data-chart="0"]'))
    page.select_option("#along", "megabytes")
    wait_for(page, f"{FIRST}.layout.xaxis.title.text === 'MB, up and down'")

    line = f"{FIRST}.data.at(-1).line.color"
    light = page.evaluate(line)
    page.emulate_media(color_scheme="dark")
    wait_for(page, f"{line} !== '{light}'")
    grow(page, 390)
    assert_whole(page, 390, "dark")


def test_pages_that_share_one_script_draw_while_it_is_there_and_else_say_which_is_missing(chromium, tmp_path):
    runs = [example_run(rounds=3)]
    pages = [
        write_report(runs, tmp_path / name / "report.html", "One of many", scripts=tmp_path) for name in ["a", "b"]
    ]
    (script,) = tmp_path.glob("plotly-*.js")
    assert all(page.stat().st_size < 500_000 for page in pages)
    assert write_report(runs, tmp_path / "whole.html", "By itself").stat().st_size > 1_500_000
    page = chromium.new_context().new_page()
    page.goto(pages[0].as_uri())
    page.wait_for_selector(".chart .main-svg", timeout=60_000)
    assert not page.is_visible("#missing")
    script.unlink()
    page.goto(pages[1].as_uri())
    assert f"the script ../{script.name}, which is missing" in page.inner_text("#missing")
    assert page.is_visible("#missing")


def test_a_table_of_sites_breaks_no_word_and_no_page(opened, tmp_path):
    run = example_run(rounds=1, clients=3, cohort=3)
    run.rounds[1].deployment = {"refused": {}, "ended": "2026-11-22T10:00:00+00:00"}
    named = dataclasses.replace(run, client_names=("\x1b[2Jnorth\u202egpj" * 2, "St. Elisabeth 東京", "south"))
    path = write_report([named], tmp_path / "sites.html", "sites")
    page = opened(path, 1280, height=300)
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 300})
        lines = page.evaluate(
            """() => [...document.querySelectorAll(".sites thead th")].map((e) => {
              const range = document.createRange();
              range.selectNodeContents(e);
              return [e.textContent, new Set([...range.getClientRects()].map((box) => box.top)).size];
            })"""
        )
        assert len(lines) == 5
        assert [text for text, number in lines if number > len(text.split())] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        height = "Math.max(...[...document.querySelectorAll('.sites tr')].map((e) => e.clientHeight))"
        assert page.evaluate(height) < 200


def test_on_a_phone_the_figure_that_ranks_is_seen_beside_the_name(opened, pages, tmp_path):
    rare = [rare_run("a method that learned nothing at all", (941, 0)), rare_run("my-own-method", (700, 45))]
    uneven = write_report(rare, tmp_path / "rare.html", "Rare")
    for path, measure in ((pages["sweep"], "target_accuracy"), (uneven, "balanced_accuracy")):
        page = opened(path, 390, height=844)
        column = page.evaluate(f"document.querySelector('#ranked th[data-sort={measure}]').cellIndex")
        names = page.locator("#ranked tbody th").all()
        table = page.locator(".tall").bounding_box()
        assert names
        for name in names:
            first = name.locator(f"xpath=../*[{column + 1}]").bounding_box()
            box = name.locator("span").bounding_box()
            assert box["x"] + box["width"] <= first["x"] + 1
            assert first["x"] + first["width"] <= table["x"] + table["width"] <= 390


def test_in_print_a_curve_s_axis_is_whole(opened, pages):
    page = opened(pages["one seed of three hospitals"], 1280, height=900)
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 718, "height": 900})  # A4 without its margins
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    wait_until_drawn(page)
    beyond = page.evaluate(
        """[...document.querySelectorAll('.chart')].filter((e) => [...e.querySelectorAll('.main-svg, text')].some(
          (part) => part.getBoundingClientRect().right > e.getBoundingClientRect().right + 2)).length"""
    )
    assert beyond == 0
    assert page.locator(".bar").is_hidden()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
