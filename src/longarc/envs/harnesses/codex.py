"""Codex: OpenAI Responses, always streamed; thread and window stand in its headers.

Its first request is some 50 KB. ``x-codex-window-id`` counts compactions, ``x-codex-parent-thread-id`` names who started
a sub-agent.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from longarc.envs.harnesses.program_harness import ProgramHarness
from longarc.envs.harnesses.programs import PLACE, Installed, is_binary
from longarc.envs.harnesses.running import HOME, MODEL, run_program
from longarc.errors import ConfigError
from longarc.records.ports import HarnessResult, Sandbox, ServedPolicy

INSTALL: Final = "npm install --prefix .agents/codex @openai/codex@0.171.0"
_CONFIG: Final = f"{HOME}/.codex/config.toml"
_KEY: Final = "LONGARC_SESSION_KEY"
_COMPACTS_AT: Final = 0.9
"""Share of the context at which it writes a summary, as it does by itself for models that it knows."""


class Codex(ProgramHarness):
    """The ``codex`` program. ``arguments`` are e.g. ``["-c", "model_reasoning_effort=\\"low\\""]``."""

    name = "codex"
    install = INSTALL
    local = "node_modules/.bin/codex"
    on_path = "codex"

    async def run(
        self, prompt: str, *, policy: ServedPolicy, sandbox: Sandbox, timeout_s: float
    ) -> HarnessResult:
        """Let it work; see ``Harness.run``."""
        done = await run_program(
            sandbox,
            [
                *self._installed.argv,
                *("exec", "--skip-git-repo-check", "--ephemeral", "--color", "never"),
                "--dangerously-bypass-approvals-and-sandbox",
                *self._arguments,
                "-",
            ],
            env={_KEY: policy.key},
            files={_CONFIG: config_text(policy)},
            stdin=prompt,
            timeout_s=timeout_s,
        )
        return HarnessResult(run=done)

    def _installed_as(self, program: Path) -> Installed:
        return _installed(program.resolve())


def config_text(policy: ServedPolicy) -> str:
    """Return the program's configuration file."""
    room = policy.max_context_tokens
    top = {
        "model": MODEL,
        "model_provider": "longarc",
        "model_context_window": room,
        "model_auto_compact_token_limit": int(_COMPACTS_AT * (room - policy.max_new_tokens)),
        "web_search": "disabled",
        "check_for_update_on_startup": False,
    }
    provider = {
        "name": "LongArc",
        "base_url": f"{policy.base_url}/v1",
        "env_key": _KEY,
        "wire_api": "responses",
        "request_max_retries": 2,
        "stream_max_retries": 2,
    }
    tables: dict[str, Mapping[str, object]] = {
        "": top,
        "analytics": {"enabled": False},
        "model_providers.longarc": provider,
    }
    lines: list[str] = []
    for name, values in tables.items():
        lines += [f"[{name}]"] if name else []
        # These strings, numbers and booleans are spelled alike in JSON and in TOML.
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _installed(program: Path) -> Installed:
    """Return the binary behind the package's script, with what lies beside it."""
    if is_binary(program):
        binary = program
    else:
        scope = program.parent.parent.parent
        places = [
            *scope.glob("codex-linux-*/vendor/*/bin/codex"),
            *program.parent.parent.glob("node_modules/@openai/codex-linux-*/vendor/*/bin/codex"),
        ]
        if not places:
            raise ConfigError(
                f"beside {program} there is no binary of Codex for Linux; install it anew: `{INSTALL}`"
            )
        binary = places[0]
    return Installed(
        argv=(f"{PLACE}/codex/bin/{binary.name}",),
        shown={f"{PLACE}/codex": str(binary.parent.parent)},
    )
