"""What ``longarc serve`` refuses before anything is loaded."""

import pytest

from longarc.cli.main import main


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine-only", "--temperature", "0"], "--temperature has no effect with --engine-only"),
        (["--engine-only", "--max-new-tokens", "5"], "--max-new-tokens has no effect with"),
        (["--engine-only", "--thinking"], "--thinking has no effect with --engine-only"),
        (["--ranks", "2"], "--ranks has no effect without --engine-only"),
        (["--drain-s", "0"], "--drain-s has no effect without --engine-only"),
        (["--attention", "sparse"], "--attention has no effect without --engine-only"),
        (["--engine-only"], "is not a run directory"),
    ],
)
def test_options_of_the_other_kind_of_server_are_refused(options, message, tmp_path, capsys):
    assert main(["serve", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "inf", "nan"])
def test_a_time_is_finite_and_not_negative(seconds, capsys):
    with pytest.raises(SystemExit):
        main(["serve", "x", "--engine-only", "--drain-s", seconds])
    assert "is not a time" in capsys.readouterr().err
