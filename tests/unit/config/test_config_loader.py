from typing import Annotated, Literal

import pytest
from pydantic import Field, model_validator

from longarc.config.loader import load_settings, parse_override, validated
from longarc.config.recipe import Recipe
from longarc.config.settings import Settings
from longarc.errors import ConfigError


class Optimizer(Settings):
    """How weights move."""

    lr: float = Field(0.1, gt=0)
    """Rate."""
    betas: list[float] = Field(default_factory=lambda: [0.9, 0.95])
    """Decays."""


class Sft(Settings):
    """Fine-tuning."""

    kind: Literal["sft"] = "sft"
    """Which."""
    num_steps: int = Field(ge=1)
    """Length [optimizer steps]."""
    optimizer: Optimizer = Optimizer()
    """How."""


class Rl(Settings):
    """Reinforcement."""

    kind: Literal["rl"] = "rl"
    """Which."""
    num_steps: int = 3
    """Length [optimizer steps]."""
    max_lag_steps: int = 0
    """Lag [optimizer steps]."""
    push_every_steps: int = 1
    """Push [optimizer steps]."""

    @model_validator(mode="after")
    def _lag(self):
        if self.max_lag_steps < self.push_every_steps - 1:
            raise ValueError(f"max_lag_steps={self.max_lag_steps} is too small; raise it")
        return self


class Whole(Settings):
    """A recipe in small."""

    name: str
    """Name."""
    note: str | None = None
    """Free text."""
    scale: int | str = 1
    """Either."""
    stages: dict[str, Annotated[Sft | Rl, Field(discriminator="kind")]] = Field(
        default_factory=dict
    )
    """Stages."""


def load(tmp_path, text, *overrides):
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return load_settings(Whole, path, overrides=overrides)


def problem(tmp_path, text, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


TWO = 'name = "x"\n[stages.warm]\nkind = "sft"\nnum_steps = 5\n[stages.act]\nkind = "rl"\n'


def test_stages_keep_the_order_of_the_file(tmp_path):
    assert list(load(tmp_path, TWO).stages) == ["warm", "act"]


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("stages.warm.num_steps=9", lambda w: w.stages["warm"].num_steps, 9),
        ("stages.warm.optimizer.lr = 1e-3", lambda w: w.stages["warm"].optimizer.lr, 1e-3),
        (
            "stages.warm.optimizer.betas=[0.5, 0.6]",
            lambda w: w.stages["warm"].optimizer.betas,
            [0.5, 0.6],
        ),
        ("name=plain words", lambda w: w.name, "plain words"),
        ('name="3"', lambda w: w.name, "3"),
        ("name=2024-01-01", lambda w: w.name, "2024-01-01"),
        ("name=a=b", lambda w: w.name, "a=b"),
        ('stages.more={kind="rl", num_steps=2}', lambda w: w.stages["more"].num_steps, 2),
    ],
)
def test_an_override_reaches_its_place(tmp_path, override, read, value):
    assert read(load(tmp_path, TWO, override)) == value


def test_an_override_enters_a_list_by_position(tmp_path):
    text = TWO + "[stages.warm.optimizer]\nbetas = [0.1, 0.2]\n"
    assert load(tmp_path, text, "stages.warm.optimizer.betas.1=0.7").stages[
        "warm"
    ].optimizer.betas == [0.1, 0.7]
    assert "is a list of 2" in problem(tmp_path, text, "stages.warm.optimizer.betas.2=0.7")


def test_the_last_override_wins(tmp_path):
    assert load(tmp_path, TWO, "name=a", "name=b").name == "b"


def test_settings_without_a_file_come_from_overrides_alone():
    assert load_settings(Whole, overrides=["name=x"]).name == "x"


@pytest.mark.parametrize(
    ("text", "overrides", "parts"),
    [
        (TWO + "[stages.warm.optimzer]\n", (), ["stages.warm.optimzer: unknown key", "did you mean stages.warm.optimizer?"]),
        (TWO.replace("num_steps", "lr"), (), ["stages.warm.lr: unknown key; did you mean stages.warm.optimizer.lr?"]),
        (TWO.replace("num_steps = 5", ""), (), ["stages.warm.num_steps: required"]),
        (TWO + 'zzz = 1\n', (), ["stages.act.zzz: unknown key; allowed are kind, num_steps, max_lag_steps"]),
        (TWO, ("stages.warm.num_steps=0",), ["stages.warm.num_steps (from --set 'stages.warm.num_steps=0') = 0", "greater than or equal to 1"]),
        (TWO, ("stages.act.push_every_steps=4",), ["stages.act: max_lag_steps=0 is too small; raise it"]),
        (TWO.replace('"rl"', '"rll"'), (), ["stages.act: kind = 'rll' is not one of", "did you mean 'rl'?"]),
        (TWO.replace('kind = "rl"', ""), (), ["stages.act: 'kind' is missing; choose one of"]),
        (TWO.replace('"x"', "3"), (), ["name = 3: should be a valid string"]),
        (TWO, ("scale=[1]",), ["scale", "should be a valid integer"]),
        ("stages = 3\n", (), ["2 bad settings", "name: required", "stages = 3"]),
        ("name = = 1", (), ["is not TOML", "line 1, column 8"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place_and_the_way_out(tmp_path, text, overrides, parts):
    message = problem(tmp_path, text, *overrides)
    for part in parts:
        assert part in message
    assert "recipe.toml" in message


def test_all_mistakes_are_told_at_once(tmp_path):
    message = problem(tmp_path, TWO + "nmae = 1\n", "stages.warm.num_steps=no", "name=[1]")
    assert "3 bad settings" in message


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("name", "write --set a.b=VALUE"),
        ("=3", "write --set a.b=VALUE"),
        ("a..b=3", "write --set a.b=VALUE"),
        ("a=[1,", "is not a TOML value"),
        ('a="x', "is not a TOML value"),
        ("a=1\nb=2", "one value per --set"),
    ],
)
def test_a_malformed_override_says_how_to_write_it(override, message):
    with pytest.raises(ConfigError, match=message):
        parse_override(override)


def test_an_override_through_a_value_is_refused(tmp_path):
    assert "name is 'x', which has no keys" in problem(tmp_path, TWO, "name.first=1")


def test_a_missing_file_names_what_there_is(tmp_path):
    (tmp_path / "quickstart.toml").write_text("")
    with pytest.raises(
        ConfigError, match=r"there is no file .*quickstar.toml; there is quickstart.toml"
    ):
        load_settings(Whole, tmp_path / "quickstar.toml")


def test_files_that_cannot_be_text_are_config_errors(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 8\)"):
        load_settings(Whole, tmp_path / "binary.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings(Whole, tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '[stages.a]\nkind = "sft"\nnum_steps = true',
            "stages.a.num_steps = True: should be a number",
        ),
        (
            '[stages.a]\nkind = "sft"\nnum_steps = "10"',
            "stages.a.num_steps = '10': should be a number",
        ),
        (
            '[stages.a]\nkind = "sft"\nnum_steps = 1\n[stages.a.optimizer]\nbetas = [0.9, "0.95"]',
            "stages.a.optimizer.betas.1 = '0.95': should be a number",
        ),
    ],
)
def test_a_word_or_a_boolean_is_no_number(tmp_path, text, said):
    assert said in problem(tmp_path, f'name = "x"\n{text}')


def test_a_number_is_no_boolean_and_a_word_of_the_command_line_is_named(tmp_path):
    text = 'name = "x"\n[stages.a]\nkind = "sft"\nnum_steps = 1'
    said = problem(tmp_path, text, 'stages.a.num_steps="7"')
    assert "stages.a.num_steps (from --set " in said
    with pytest.raises(ConfigError, match=r"engine\.eager = 1: should be true or false"):
        validated(
            Recipe,
            {
                "name": "x",
                "engine": {"kind": "vllm", "python": "p", "eager": 1},
                "stages": {"a": {"kind": "pretrain", "num_steps": 1}},
            },
            source="recipe",
        )


def test_a_whole_number_may_be_written_as_a_fraction_is(tmp_path):
    text = 'name = "x"\nscale = "7"\n[stages.a]\nkind = "sft"\nnum_steps = 1e3'
    read = load(tmp_path, text)
    assert (read.scale, read.stages["a"].num_steps) == ("7", 1000)
