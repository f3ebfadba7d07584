"""What ``longarc serve`` refuses before anything is loaded."""

import pytest

from longarc.cli.main import main


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine-only", "--temperature", "0"], "--temperature has no effect with --engine-only"),
        (["--engine-only", "--max-new-tokens", "5"], "--max-new-tokens has no effect with"),
        (["--engine-only", "--thinking"], "--thinking has no effect with --engine-only"),
        (["--engine-only", "--model-name", "x"], "--model-name has no effect with --engine-only"),
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


@pytest.mark.parametrize("temperature", ["-1", "1e-300", "inf", "nan"])
def test_a_temperature_can_be_sampled_with(temperature, capsys):
    with pytest.raises(SystemExit):
        main(["serve", "x", "--temperature", temperature])
    assert "is not a temperature; 0 is, or 1e-06 and more" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--api-key", "--model-name"])
def test_an_empty_key_or_name_is_not_taken_for_none(option, tmp_path, capsys):
    (tmp_path / "recipe.json").write_text("{}")
    assert main(["serve", str(tmp_path), option, ""]) == 2
    assert f"{option} is empty" in capsys.readouterr().err


def test_chat_over_a_hugging_face_directory_says_how_it_can_be_served(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path)]) == 2
    assert "serve it with --engine-only" in capsys.readouterr().err
