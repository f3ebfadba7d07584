"""The report as people see it: opened and clicked through in a real browser, from one file."""

import re
import shutil

import pytest

from longarc.runs.directory import RunDirectory
from longarc.viewer.report import write_report
from report_cases import EVIL, NUM_STEPS, STAGE, make_report_run

pytestmark = pytest.mark.e2e

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=executable, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_report_run(tmp_path_factory.mktemp("runs") / "demo")


class Watched:
    """A page, and everything it complained about or asked for."""

    def __init__(self, page):
        self.page = page
        self.complaints = []
        self.requests = []
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))


@pytest.fixture
def opened(browser, run):
    path = write_report(RunDirectory.look(run))
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(20_000)
    watched = Watched(context.new_page())
    watched.page.goto(path.as_uri())
    yield watched
    text = watched.page.inner_text("main")
    assert not re.search(r"\b(null|undefined|NaN|Infinity)\b|\[object", text)
    # Whatever a test did: no error, no script but the page's own, nothing fetched.
    assert watched.complaints == []
    assert watched.requests == [path.as_uri()]
    assert watched.page.evaluate("window.hacked") is None
    context.close()


@pytest.fixture
def page(opened):
    return opened.page


def background(page, selector):
    return page.locator(selector).evaluate("e => getComputedStyle(e).backgroundColor")


def test_the_header_and_the_arc_say_what_was_run_and_how_far_it_got(page):
    assert page.inner_text("#run-name") == "demo <b>run</b>"
    assert "4 of 5 stages done" in page.inner_text("#summary")
    assert "15 parameters" in page.inner_text("#facts")
    stages = {name: page.inner_text(f'.stage[data-stage="{name}"]') for name in ("sft", "distill")}
    assert "done" in stages["sft"]
    assert "20 / 20" in stages["sft"]
    assert "30 s" in stages["sft"]
    assert "waiting" in stages["distill"]
    rl = page.inner_text(f'.stage[data-stage="{STAGE}"]')
    assert f"{NUM_STEPS} / {NUM_STEPS}" in rl
    assert "success 33 % → 100 %" in rl


def test_each_stage_has_its_curves_and_pointing_at_one_reads_its_values(page):
    assert page.locator('#charts [data-chart="Language-model loss"]').count() == 1
    page.click(f'#curve-tabs [data-tab="{STAGE}"]')
    assert page.locator('#charts [data-chart="Language-model loss"]').count() == 0
    chart = page.locator('#charts [data-chart="Success"] svg')
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.96, box["y"] + box["height"] / 2)
    shown = page.inner_text("#tooltip")
    assert shown.split("\n") == [f"step {NUM_STEPS - 1}", "mean: 1", "files: 1"]


def test_a_value_that_is_not_a_number_breaks_the_curve(page):
    speed = page.locator('#charts [data-chart="Tokens per second"]')
    assert speed.locator("path.curve").count() == 2
    page.click("#other-charts-box summary")
    assert page.locator('#other-charts [data-chart="router/max_load"]').is_visible()


def test_the_matrix_shows_rates_intervals_forgetting_and_recovery(page):
    def cell(stage, family):
        return page.locator(f'#matrix td[data-stage="{stage}"][data-family="{family}"]')

    text = cell("sft", "files").inner_text()
    assert "31.3 %" in text
    assert "21–43 % · 20 of 64" in text
    assert "1 excluded" in text
    assert "★ best" in cell(STAGE, "files").inner_text()
    assert "▼ forgot −31.3" in cell(STAGE, "reasoning").inner_text()
    assert "↺ recovered +1.6" in cell("distill", "reasoning").inner_text()
    assert "at the end 97 % of its best" in page.inner_text("#matrix tfoot")
    assert "6 of 390 rollouts were excluded" in page.inner_text("#matrix")
    assert background(page, f'#matrix td[data-stage="{STAGE}"][data-family="files"]') != background(
        page, f'#matrix td[data-stage="{STAGE}"][data-family="reasoning"]'
    )
    assert "20/60" in page.inner_text('#difficulty [data-family="files"]')


def test_lags_mismatches_and_endings_are_counted(page):
    assert "18 uses of trajectories" in page.inner_text(f'[data-chart="{STAGE}: lag"]')
    mismatch = page.inner_text(f'[data-chart="{STAGE}: engine against trainer"]')
    assert "largest difference is 3.00e-7" in mismatch
    endings = page.inner_text(f'#counts tr[data-stage="{STAGE}"]')
    assert "sandbox_lost 6" in endings
    assert "trained 18" in endings


def test_trajectories_are_found_by_stage_family_outcome_and_reward(page):
    everything = page.locator("#list .trajectory").count()
    assert everything == 37
    page.select_option("#filter-outcome", "sandbox_lost")
    assert page.locator("#list .trajectory").count() == 6
    assert "lost" in page.inner_text("#detail .error")
    page.select_option("#filter-reward", "solved")
    assert "No trajectory is like that" in page.inner_text("#list")
    page.select_option("#filter-outcome", "")
    page.select_option("#filter-stage", "eval/distill")
    page.select_option("#filter-family", "reasoning")
    assert page.locator("#list .trajectory").count() == 1
    assert page.inner_text("#detail h3") == "eval/distill/reasoning/0/0"


def test_what_a_model_says_is_text_and_stays_text(page):
    page.click(f'#list [data-id="{STAGE}/0/0/0"]')
    assert f"The key is here. {EVIL}" in page.locator("#detail").text_content()
    page.click('[data-view="tokens"]')
    assert page.locator(".token.special").last.text_content() == EVIL.replace("\u2028", "\\u2028")
    assert page.locator("#detail script, #detail b").count() == 0


def test_tokens_are_coloured_by_what_is_asked_and_tell_their_numbers(page):
    page.click(f'#list [data-id="{STAGE}/3/0/0"]')
    page.click('[data-view="tokens"]')
    # "answer 3.0" starts behind the prompt: a given, a first and a last sampled token.
    given, first, later, last = (f'.token[data-position="{i}"]' for i in (5, 25, 32, 35))
    clear = "rgba(0, 0, 0, 0)"
    assert background(page, given) == clear
    assert len({background(page, token) for token in (given, first, last)}) == 3
    assert background(page, first) == background(page, later)

    page.click('[data-mode="version"]')
    assert len({background(page, token) for token in (given, first, later)}) == 3
    page.click('[data-mode="advantage"]')
    up = background(page, first)
    assert clear not in (up, background(page, later))
    assert background(page, last) == clear
    page.click('[data-mode="logratio"]')
    assert background(page, first) != clear
    page.click('[data-mode="value"]')
    assert background(page, first) != clear

    page.hover(later)
    shown = page.inner_text("#tooltip").split("\n")
    assert shown[0] == '"3"'
    assert "in the train mask" in shown
    assert "policy version 2" in shown
    assert "advantage 0.5" in shown
    assert "value 0.25" in shown
    assert "log-ratio 1.00e-6" in shown
    assert any(line.startswith("log-probability -0.5 ") for line in shown)

    page.click(f'#list [data-id="{STAGE}/3/1/0"]')
    page.click('[data-mode="advantage"]')
    page.click(f'#list [data-id="{STAGE}/3/2/0"]')
    assert "None was recorded" in page.inner_text("#detail")
    page.check("#filter-reported")
    assert page.locator("#list .trajectory").count() == 2 * NUM_STEPS


def test_a_failed_rollout_is_pushed_the_other_way(page):
    page.click(f'#list [data-id="{STAGE}/0/0/0"]')
    page.click('[data-view="tokens"]')
    page.click('[data-mode="advantage"]')
    up = background(page, '.token[data-position="25"]')
    page.click(f'#list [data-id="{STAGE}/0/1/0"]')
    assert background(page, '.token[data-position="25"]') != up


def test_a_run_without_anything_opens_too(browser, tmp_path):
    recipe = {"name": "empty", "seed": 0, "stages": {"pretrain": {"kind": "pretrain"}}}
    RunDirectory.create(tmp_path / "run", recipe=recipe, seeds={}).close()
    path = write_report(RunDirectory.look(tmp_path / "run"))
    context = browser.new_context()
    watched = Watched(context.new_page())
    watched.page.goto(path.as_uri())
    assert "0 of 1 stages done" in watched.page.inner_text("#summary")
    assert "Nothing has been evaluated yet" in watched.page.inner_text("main")
    assert watched.complaints == []
    context.close()
