import base64
import hashlib
import html
import json
import re

import pytest

from longarc.errors import ConfigError, ContractError
from longarc.pipeline import reporting
from longarc.runs.directory import RunDirectory
from longarc.viewer.report import report_data, write_report
from report_cases import EVIL, STAGE, make_report_run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_report_run(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture
def run(made):
    return RunDirectory.look(made)


@pytest.fixture
def page(run, tmp_path):
    return write_report(run, tmp_path / "report.html").read_text(encoding="utf-8")


def test_text_of_models_cannot_leave_the_data(page):
    assert EVIL not in page
    assert len(re.findall(r"<script", page)) == len(re.findall(r"</script", page)) == 2
    (embedded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    browser = json.loads(embedded)["browser"]
    assert EVIL in browser["token_texts"].values()
    said = [m["content"] for t in browser["trajectories"] for m in t["messages"]]
    assert f"The key is here. {EVIL}" in said
    assert "<title>demo &lt;b&gt;run&lt;/b&gt; - LongArc run</title>" in page


def test_the_page_may_run_its_own_script_only_and_connect_to_nothing(page):
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[-1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="(.*?)"', page)[0])
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest}'" in policy
    # A name of the SVG language, not an address.
    assert set(re.findall(r"https?://[^\s\"']*", page)) == {"http://www.w3.org/2000/svg"}


def test_the_numbers_are_those_of_the_ledger(run):
    data = report_data(run)
    stages = {stage["name"]: stage for stage in data["stages"]}
    with run.read_ledger() as ledger:
        trained = sum(step.num_trained_tokens for step in ledger.steps(STAGE))
        assert stages[STAGE]["num_trained_tokens"] == trained
        assert dict(data["lag"][STAGE]["counts"]) == ledger.lag_histogram(STAGE)
        assert dict(data["counts"][STAGE]["outcomes"]) == ledger.counts("outcome", stage=STAGE)
    assert dict(data["counts"][STAGE]["dispositions"])["waiting"] == 1
    assert stages["pretrain"]["num_trained_tokens"] == 40_000
    assert data["run"]["num_parameters"] == 15
    assert data["histograms"][STAGE]["mismatch/log_ratio"]["num_zero"] == 6


def test_trajectories_carry_what_the_step_reported(run):
    found = {t["id"]: t for t in report_data(run)["browser"]["trajectories"]}
    (segment,) = found[f"{STAGE}/0/1/0"]["segments"]
    assert segment["report"]["log_ratios"] == pytest.approx([1e-6] * 10, rel=1e-3)
    assert set(segment["report"]["advantages"]) == {-0.5}
    assert found[f"{STAGE}/0/2/0"]["has_report"] is False
    assert found[f"{STAGE}/0/0/0"]["uses"] == [{"stage": STAGE, "step": 0, "multiplicity": 1}]


def test_trajectories_that_would_make_the_file_too_large_are_left_out(run):
    everything = report_data(run)["browser"]
    some = report_data(run, max_trajectory_bytes=20_000)["browser"]
    assert 0 < len(some["trajectories"]) < len(everything["trajectories"])
    assert len(json.dumps(some["trajectories"], separators=(",", ":"))) <= 20_000
    assert some["num_all"] == everything["num_all"] == 37
    assert {t["stage"] for t in some["trajectories"]} == {STAGE, "eval"}


def test_the_report_stands_in_the_run_unless_told_otherwise(made):
    assert reporting.write_report(made) == made / "report.html"
    assert sorted(p.name for p in made.glob("*report*")) == ["report.html"]


def test_a_report_of_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a run directory"):
        reporting.write_report(tmp_path)


def test_a_place_that_is_no_place_is_refused(run, tmp_path):
    for place in (tmp_path, tmp_path / "missing" / "report.html"):
        with pytest.raises(ConfigError, match="no place for a report"):
            write_report(run, place)


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "stages/eval/results.json"])
def test_damage_is_named(tmp_path, name):
    path = make_report_run(tmp_path / "run")
    (path / name).write_text("{\n{}\n")
    with pytest.raises(ContractError, match=f"{name} is damaged"):
        reporting.write_report(path)
    assert not (path / "report.html").exists()
