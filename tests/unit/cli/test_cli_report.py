import json
import re

import pytest

from longarc.cli.main import main
from report_cases import make_report_run


@pytest.fixture
def run(tmp_path):
    return make_report_run(tmp_path / "run")


def test_the_report_is_written_and_its_place_printed(run, capsys):
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}/report.html\n"
    assert (run / "report.html").read_bytes().startswith(b"<!doctype html>")


def test_the_place_and_the_number_of_trajectories_can_be_chosen(run, tmp_path, capsys):
    place = tmp_path / "mine.html"
    arguments = ["report", str(run), "--output", str(place), "--open-trajectories", "5"]
    assert main(arguments) == 0
    (data,) = re.findall(r'id="data">(.*?)</script>', place.read_text())
    assert len(json.loads(data)["browser"]["trajectories"]) == 5
    assert not (run / "report.html").exists()


def test_a_negative_number_of_trajectories_is_refused(run, capsys):
    assert main(["report", str(run), "--open-trajectories", "-1"]) == 2
    assert "give 0 or more" in capsys.readouterr().err
