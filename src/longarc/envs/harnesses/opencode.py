"""opencode: chat completions, streamed; a title is asked for beside the work, and sub-agents have sessions of their own."""

import json
from typing import Final

from longarc.envs.harnesses.program_harness import ProgramHarness
from longarc.envs.harnesses.running import HOME, MODEL, run_program
from longarc.envs.sandbox.layout import WORKSPACE
from longarc.records.ports import HarnessResult, Sandbox, ServedPolicy

INSTALL: Final = "npm install --prefix .agents/opencode opencode-ai@1.18.33"
_CONFIG: Final = f"{HOME}/.config/opencode/opencode.json"
_PROVIDER: Final = "longarc"


class Opencode(ProgramHarness):
    """The ``opencode`` program. ``arguments`` follow ``opencode run``, e.g. ``["--agent", "plan"]``."""

    name = "opencode"
    install = INSTALL
    local = "node_modules/.bin/opencode"
    on_path = "opencode"

    async def run(
        self, prompt: str, *, policy: ServedPolicy, sandbox: Sandbox, timeout_s: float
    ) -> HarnessResult:
        """Let it work; see ``Harness.run``."""
        done = await run_program(
            sandbox,
            [
                *self._installed.argv,
                *("run", "--pure", "--dir", WORKSPACE, "--model", f"{_PROVIDER}/{MODEL}"),
                *self._arguments,
            ],
            env={
                "OPENCODE_DISABLE_AUTOUPDATE": "1",
                # A list of models from the network; the one below is all there is.
                "OPENCODE_DISABLE_MODELS_FETCH": "1",
                "OPENCODE_DISABLE_SHARE": "1",
                "OPENCODE_PERMISSION": json.dumps({"*": "allow"}),
            },
            files={_CONFIG: json.dumps(config(policy))},
            stdin=prompt,
            timeout_s=timeout_s,
        )
        return HarnessResult(run=done)


def config(policy: ServedPolicy) -> dict[str, object]:
    """Return the program's configuration."""
    model = {
        "name": MODEL,
        "tool_call": True,
        "limit": {"context": policy.max_context_tokens, "output": policy.max_new_tokens},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "LongArc",
        "options": {"baseURL": f"{policy.base_url}/v1", "apiKey": policy.key},
        "models": {MODEL: model},
    }
    return {"autoupdate": False, "share": "disabled", "provider": {_PROVIDER: provider}}
