"""The report in a real browser: sorted, filtered, opened and followed; nothing goes wrong, and nothing leaves the machine."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from suite.record.folder import Home
from suite.report.compose import build
from suite.report.data import read
from suite.report.live import Source, make_server
from suite.tracking import sync
from tests.records import write_cell, write_definition
from tests.report_home import SHARES, TASKS, make_report_home

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(
    filter(
        None,
        map(
            shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
        ),
    ),
    None,
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH"),
]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
FLAGS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, empty_db: Path) -> Home:
    return make_report_home(tmp_path_factory.mktemp("home"), empty_db)


@pytest.fixture(scope="module")
def address(home: Home) -> str:
    return build(home).as_uri()


class Visit:
    """A page, and all that went wrong or out while it was open."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(
            **{"viewport": {"width": 1440, "height": 900}, **options}
        )
        self.context.set_default_timeout(120_000)  # a busy machine draws slowly
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.problems: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on(
            "console",
            lambda line: (
                self.problems.append(line.text) if line.type in ("error", "warning") else None
            ),
        )
        self.page.goto(url)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def column(self, head: str, table: str = "board") -> list[str]:
        """Texts of the rows that are shown."""
        script = """([id, head]) => { const t = document.getElementById(id);
            const at = [...t.tHead.rows[0].cells].findIndex((c) => c.textContent === head);
            return [...t.tBodies[0].rows].filter((r) => !r.hidden).map((r) => r.cells[at].textContent); }"""
        found: list[str] = self.page.evaluate(script, [table, head])
        return found

    def head(self, name: str) -> Any:
        return self.page.locator("#board thead th").filter(
            has=self.page.get_by_role("button", name=name, exact=True)
        )


def test_every_figure_is_drawn_without_a_complaint_and_without_a_request(
    browser: Any, address: str
) -> None:
    with Visit(browser, address) as visit:
        page = visit.page
        page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        count = page.locator(".plot").count()
        assert count >= 20
        for n in range(count):
            page.locator(".plot").nth(n).scroll_into_view_if_needed()
            page.wait_for_function(
                "(n) => document.querySelectorAll('.plot')[n].dataset.drawn === 'yes'", arg=n
            )
        assert page.locator(".plot .main-svg").count() >= count
        assert page.locator("#plot-energy-by-phase .bars path").count() >= len(SHARES) * 3, (
            "every phase has its bars"
        )
        assert page.title() == "demo: report", "the attack on the title stayed text"
        assert visit.problems == [] and visit.requests == [address]


def test_a_press_on_a_head_sorts_and_another_turns_it_round(browser: Any, address: str) -> None:
    with Visit(browser, address) as visit:
        visit.page.locator("select[data-task=board]").select_option("agreement")
        head = visit.head("memory")
        for direction in ("ascending", "descending"):
            head.get_by_role("button").focus()
            visit.page.keyboard.press("Enter")
            assert head.get_attribute("aria-sort") == direction
        visit.head("score").get_by_role("button").click()
        assert (
            visit.head("score").get_attribute("aria-sort") == "descending"
            and head.get_attribute("aria-sort") is None
        )
        scores = [float(text.split(" ")[0]) for text in visit.column("score")]
        assert scores == sorted(scores, reverse=True) and len(scores) == len(SHARES)
        visit.head("rank").get_by_role("button").click()
        assert visit.column("rank")[-1] == "-", "what is not known comes last"


def test_rows_are_filtered_by_task_by_text_and_by_number(browser: Any, address: str) -> None:
    with Visit(browser, address) as visit:
        page = visit.page
        assert visit.column("task") == ["mean"] * len(SHARES), "the mean comes first"
        page.locator("select[data-task=board]").select_option("")
        assert set(visit.column("task")) == {"mean", *TASKS}
        page.locator("input[data-find=board]").fill("bitfit")
        assert set(visit.column("arm")) == {"bitfit"}
        assert page.locator("[data-count=board]").text_content() == "3 of 12 rows"
        page.locator("input[data-find=board]").fill("")
        page.get_by_role("button", name="Filter columns").click()
        page.get_by_label("Filter score", exact=True).fill("> 80")
        scores = [float(text.split(" ")[0]) for text in visit.column("score")]
        assert scores and min(scores) > 80
        page.get_by_label("Filter score", exact=True).fill("")
        every = visit.column("memory")
        for bound, kept in (
            ("< 9", []),
            ("> 9", every),
            ("< 9000 KiB", []),
            ("> 0.001 GiB", every),
            ("<= 10,000,000 B", []),
            ("< 9000 kib", []),
            ("> 9.9 MB", every),
            ("< 9 gb", every),
            ("< 300 MX", []),
            ("> 9 MX", []),
            ("= 9.5", every),
            ("= 9.5 MiB", every),
            ("= 9.5 GiB", []),
            ("= 9", []),
        ):
            page.get_by_label("Filter memory", exact=True).fill(bound)
            assert visit.column("memory") == kept, f"{bound}: all take 9.5 MiB"
        page.get_by_label("Filter memory", exact=True).fill("")
        shown = visit.column("score")[0].split(" ")[0]
        page.get_by_label("Filter score", exact=True).fill(f"= {shown}")
        assert {text.split(" ")[0] for text in visit.column("score")} == {shown}, "more digits"
        page.get_by_label("Filter score", exact=True).fill(f"= {shown[0]}")
        assert visit.column("score") == []
        page.get_by_label("Filter score", exact=True).fill("")
        every_rank = visit.column("rank")
        best = [text for text in every_rank if text.split("-")[0] == "1"]
        known = [text for text in every_rank if text[0].isdigit()]
        for bound, ranks in (
            ("<= 1", best),
            ("= 1", best),
            ("> 1", [text for text in known if text not in best]),
            (">= 1", known),
        ):
            page.get_by_label("Filter rank", exact=True).fill(bound)
            assert visit.column("rank") == ranks and ranks, bound
        page.get_by_label("Filter rank", exact=True).fill("")
        page.get_by_label("Filter energy, estimate", exact=True).fill("> 20")
        assert len(visit.column("arm")) == len(every), "22.0 mWh, stored in kWh"
        page.get_by_label("Filter energy, estimate", exact=True).fill("> 0.1 Wh")
        assert visit.column("arm") == []
        page.get_by_label("Filter energy, estimate", exact=True).fill("> 0.02 Wh")
        assert len(visit.column("arm")) == len(every)
        page.get_by_label("Filter arm", exact=True).fill("lora")
        assert set(visit.column("arm")) == {"lora"}
        page.get_by_label("Filter arm", exact=True).fill("nobody")
        assert visit.column("arm") == []


def test_an_arms_part_opens_from_the_leaderboard_and_by_its_address(
    browser: Any, address: str, home: Home
) -> None:
    read_ = read(home.path)
    lora = next(arm for arm in read_.arms.values() if arm.label == "lora")
    with Visit(browser, address) as visit:
        part = visit.page.locator(f"#{lora.anchor}")
        assert not part.evaluate("(d) => d.open")
        visit.page.locator("#board").get_by_role("link", name="lora", exact=True).first.click()
        visit.page.wait_for_function("(id) => document.getElementById(id).open", arg=lora.anchor)
        assert part.get_by_text("10 trials").is_visible()
        hashes = visit.column("trial", f"{lora.anchor}-trials")
        assert sorted(hashes) == sorted(t["trial"] for t in read_.trials if t["arm"] == lora.key)
    with Visit(browser, f"{address}#{lora.anchor}") as visit:
        assert visit.page.locator(f"#{lora.anchor}").evaluate("(d) => d.open")


def test_on_a_phone_tables_scroll_inside_their_boxes_and_the_page_does_not(
    browser: Any, address: str
) -> None:
    with Visit(
        browser, address, viewport={"width": 320, "height": 844}, has_touch=True, is_mobile=True
    ) as visit:
        page = visit.page
        page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        for n in range(page.locator(".plot").count()):
            page.locator(".plot").nth(n).scroll_into_view_if_needed()
        page.wait_for_function(
            "() => [...document.querySelectorAll('.plot')].every((p) => p.dataset.drawn)"
        )
        wide = (
            "[document.documentElement.scrollWidth, document.querySelector('.scroll').scrollWidth]"
        )
        # Most phones, and back to the narrowest, with all figures drawn.
        for width in (390, 320):
            page.set_viewport_size({"width": width, "height": 844})
            page.wait_for_function(
                "(width) => document.documentElement.scrollWidth <= width", arg=width
            )
            whole, table = page.evaluate(wide)
            assert whole <= width
            assert table <= 390, "the everyday columns fit on most phones"
        page.get_by_role("button", name="All columns").click()
        whole, table = page.evaluate(wide)
        assert whole <= width < table
        assert visit.problems == []


@pytest.mark.parametrize("width", [1440, 390])
def test_names_of_points_and_labels_of_ticks_cover_nothing_and_are_not_cut_off(
    browser: Any, address: str, width: int
) -> None:
    boxes = """(what) => [...document.querySelectorAll(what)].map((e) => {
        const [own, plot] = [e.getBoundingClientRect(), e.closest('.plot').getBoundingClientRect()];
        return [own.left, own.top, own.right, own.bottom, plot.left, plot.top, plot.right, plot.bottom]; })"""
    with Visit(browser, address, viewport={"width": width, "height": 900}) as visit:
        page = visit.page
        page.wait_for_selector("#plot-score-energy-mean[data-drawn] .annotation-text-g")
        names = page.evaluate(boxes, "#plot-score-energy-mean .annotation-text-g")
        assert len(names) == len(SHARES)
        page.locator("#rates .plot").first.scroll_into_view_if_needed()
        page.wait_for_selector("#rates .plot[data-drawn]")
        ticks = page.evaluate(boxes, "#rates .plot[data-drawn]:first-of-type .xtick text")
        assert len(ticks) >= 2
        for left, top, right, bottom, *plot in (*names, *ticks):
            assert plot[0] <= left and plot[1] <= top and right <= plot[2] and bottom <= plot[3]
        for n, one in enumerate(names):
            for other in names[:n]:
                apart = one[0] >= other[2] or other[0] >= one[2]
                assert apart or one[1] >= other[3] or other[1] >= one[3], (one, other)


def test_the_best_arm_within_a_readers_limits_is_named_or_that_there_is_none(
    browser: Any, address: str
) -> None:
    with Visit(browser, address) as visit:
        page = visit.page
        said = page.locator("#limits output")
        assert said.text_content() == "Give one limit or both."
        page.get_by_label("At most this memory, MiB").fill("300")
        assert "scores best on the mean over 2 tasks: " in said.text_content()
        assert said.text_content().startswith(visit.column("arm")[0])
        assert "3 seeds" in said.text_content() and "3 of 3 arms" in said.text_content()
        page.locator("select[data-task=board]").select_option("entailment")
        assert said.text_content().startswith("lora scores best on entailment: ")
        page.get_by_label("At most this energy, mWh").fill("20")
        assert said.text_content().startswith(
            "No arm is within these limits on entailment. The least: "
        )
        assert "takes 22.0 mWh" in said.text_content()


def test_in_the_dark_text_and_figures_are_light(browser: Any, address: str) -> None:
    with Visit(browser, address, color_scheme="dark") as visit:
        page = visit.page
        page.locator("#plot-scores").scroll_into_view_if_needed()
        page.wait_for_selector("#plot-scores[data-drawn] .ytick text")
        light = "(e) => Math.min(...getComputedStyle(e).{} .match(/\\d+/g).slice(0, 3).map(Number))"
        assert page.locator("body").evaluate(light.format("backgroundColor")) < 60
        assert page.locator("body").evaluate(light.format("color")) > 200
        assert page.locator("#plot-scores .ytick text").first.evaluate(light.format("fill")) > 200
        page.emulate_media(color_scheme="light")
        page.wait_for_function(
            "() => getComputedStyle(document.querySelector('#plot-scores .ytick text')).fill === 'rgb(27, 31, 36)'"
        )


def test_a_live_page_reloads_and_its_reader_stays_where_he_was(
    browser: Any, tmp_path: Path, empty_db: Path
) -> None:
    shutil.copy(empty_db, tmp_path / "mlflow.db")
    home = Home(tmp_path)
    write_definition(home, ["full", "lora", "read"], TASKS, trials=2)
    for task in TASKS:
        write_cell(home, "full", task, trials=2)
    sync(home, tracking_uri=home.tracking_uri)
    server = make_server(Source(home.path))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/demo"
        with Visit(browser, url) as visit:
            visit.page.locator("select[data-task=board]").select_option("agreement")
            visit.head("memory").get_by_role("button").click()
            visit.page.wait_for_function(
                "() => document.getElementById('live').textContent === 'live'"
            )
            assert visit.column("arm") == ["full"]
            with visit.page.expect_response(lambda response: response.url.endswith("?version")):
                pass
            for task in TASKS:
                write_cell(home, "lora", task, trials=2)
            sync(home, tracking_uri=home.tracking_uri)
            visit.page.wait_for_function(
                "() => document.querySelectorAll('#board tbody tr[data-task=agreement]').length === 2",
                timeout=60_000,
            )
            visit.page.wait_for_function(
                "() => document.querySelector('[data-task=board]').value === 'agreement'"
            )
            assert visit.head("memory").get_attribute("aria-sort") == "ascending"
            assert sorted(visit.column("arm")) == ["full", "lora"]
            assert (
                all(request.startswith(url) for request in visit.requests) and visit.problems == []
            )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
