"""Programs are found where they are, and what a box has to show of them is exact."""

import json
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from longarc.envs.harnesses import claude_code, codex, mini_swe_agent, openai_agents, opencode
from longarc.envs.harnesses.custom import Custom
from longarc.envs.harnesses.programs import environment_of, find, python
from longarc.errors import ConfigError

ROOT = Path(__file__).parents[4]


def program(path: Path, content: bytes = b"\x7fELF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def environment(path: Path, version: str = "python3.11") -> Path:
    program(path / "bin/python")
    program(path / "bin/mini", b"#!python")
    (path / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (path / f"lib/{version}/site-packages").mkdir(parents=True)
    return path


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A working directory without agents, and a PATH without programs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def test_a_program_is_looked_for_in_agents_first_and_then_on_path(nowhere):
    on_path = program(nowhere / "bin/claude")
    assert claude_code.ClaudeCode().shown == {"/opt/agent/claude": str(on_path)}
    local = program(nowhere / ".agents/claude-code/lib/claude.exe")
    link = nowhere / ".agents/claude-code/node_modules/.bin/claude"
    link.parent.mkdir(parents=True)
    link.symlink_to(local)
    assert claude_code.ClaudeCode().shown == {"/opt/agent/claude": str(local)}
    other = program(nowhere / "other/claude-9")
    given = claude_code.ClaudeCode(program=str(other))
    assert given.shown == {"/opt/agent/claude-9": str(other)}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            claude_code.ClaudeCode,
            "npm install --prefix .agents/claude-code @anthropic-ai/claude-code@",
        ),
        (codex.Codex, "npm install --prefix .agents/codex @openai/codex@"),
        (opencode.Opencode, "npm install --prefix .agents/opencode opencode-ai@"),
        (mini_swe_agent.MiniSweAgent, "pip install mini-swe-agent=="),
        (openai_agents.OpenAiAgents, "pip install openai-agents=="),
    ],
)
def test_a_missing_program_is_an_error_that_says_how_to_install_it(nowhere, make, said):
    with pytest.raises(ConfigError) as told:
        make()
    assert said in str(told.value)
    assert f"make agent-{make.name}" in str(told.value)
    with pytest.raises(ConfigError, match=r"program = '/no/such' of harness .* is no program"):
        make(program="/no/such")


def test_the_versions_are_those_that_the_makefile_installs():
    listed = dict(
        line.split()[::2]
        for line in (ROOT / "scripts/agents.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    for module in (claude_code, codex, opencode, mini_swe_agent, openai_agents):
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        assert module.INSTALL.endswith(listed[name]), name


def test_a_script_where_a_binary_is_needed_is_refused(nowhere):
    script = program(nowhere / "bin/claude", b"#!/usr/bin/env node")
    with pytest.raises(ConfigError, match="is a script, but harness 'claude-code' starts"):
        claude_code.ClaudeCode(program=str(script))


def test_codex_is_started_as_the_binary_behind_its_script(nowhere):
    modules = nowhere / ".agents/codex/node_modules"
    script = program(modules / "@openai/codex/bin/codex.js", b"#!/usr/bin/env node")
    link = modules / ".bin/codex"
    link.parent.mkdir(parents=True)
    link.symlink_to(script)
    with pytest.raises(ConfigError, match="no binary of Codex for Linux"):
        codex.Codex()
    vendor = modules / "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl"
    program(vendor / "bin/codex")
    assert codex.Codex().shown == {"/opt/agent/codex": str(vendor)}


def test_python_programs_are_shown_by_their_packages_and_run_with_the_boxs_own_python(tmp_path):
    venv = environment(tmp_path / "venv")
    installed = python("mini-swe-agent", venv, install="x")
    packages = str(venv / "lib/python3.11/site-packages")
    assert installed.shown["/opt/agent/packages"] == packages
    assert installed.argv[1] == "-I", "nothing of the environment, and nothing for its children"
    other = environment(tmp_path / "other", "python3.99")
    shown = python("mini-swe-agent", other, install="x")
    assert shown.argv[0] == "/opt/agent/python/bin/python"
    assert shown.shown["/opt/agent/python"] == str(other)
    with pytest.raises(ConfigError, match="is no virtual environment"):
        python("mini-swe-agent", tmp_path, install="x")


def test_a_script_that_is_linked_from_elsewhere_belongs_to_its_environment(tmp_path):
    venv = environment(tmp_path / "venv")
    link = tmp_path / "bin/mini"
    link.parent.mkdir()
    link.symlink_to(venv / "bin/mini")
    assert environment_of("mini-swe-agent", link, install="x") == venv
    with pytest.raises(ConfigError, match="is not in a virtual environment"):
        environment_of("mini-swe-agent", program(tmp_path / "bin/alone"), install="x")


def test_a_folder_is_no_program(tmp_path):
    with pytest.raises(ConfigError, match="is no program that can be run"):
        find("codex", "bin/codex", str(tmp_path), on_path=None, install="x")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"command": []}, "needs command"),
        ({"command": ["{python}", "a.py"]}, "needs a venv"),
        ({"command": ["sh"], "venv": "v"}, "a venv such a command"),
        ({"command": ["sh"], "shows": {"a": "/no/such"}}, "no such file or folder"),
    ],
)
def test_a_command_that_cannot_be_run_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        Custom(**settings)


@dataclass(frozen=True)
class Policy:
    """What a harness reads of a served policy."""

    base_url: str = "http://127.0.0.1:42101/s/KEY"
    key: str = "KEY"
    max_context_tokens: int = 10_000
    max_new_tokens: int = 1000


def test_codex_gets_a_configuration_that_points_at_the_gateway_and_says_when_to_compact():
    told = tomllib.loads(codex.config_text(Policy()))
    assert told["model_providers"]["longarc"]["base_url"] == "http://127.0.0.1:42101/s/KEY/v1"
    assert told["model_providers"]["longarc"]["wire_api"] == "responses"
    assert told["model_context_window"] == 10_000
    assert told["model_auto_compact_token_limit"] == 8100
    assert told["analytics"] == {"enabled": False}


def test_opencode_gets_one_provider_with_one_model_and_its_limits():
    told = json.loads(json.dumps(opencode.config(Policy())))
    provider = told["provider"]["longarc"]
    assert provider["options"]["baseURL"] == "http://127.0.0.1:42101/s/KEY/v1"
    assert provider["models"]["longarc"]["limit"] == {"context": 10_000, "output": 1000}
