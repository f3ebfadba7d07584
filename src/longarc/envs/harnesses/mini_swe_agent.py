"""mini-swe-agent: one tool, ``bash``, over chat completions that are not streamed.

A reply without a call is answered with an error and left out of the history, so each opens a branch of its own. The
task ends with ``echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT``; what that command prints behind the first line is the answer.
"""

import json
from pathlib import Path
from typing import Final

from longarc.envs.harnesses.program_harness import ProgramHarness
from longarc.envs.harnesses.programs import Installed, environment_of, python
from longarc.envs.harnesses.running import HOME, MODEL, run_program
from longarc.records.ports import HarnessResult, Sandbox, ServedPolicy

INSTALL: Final = "python3 -m venv .agents/mini-swe-agent && .agents/mini-swe-agent/bin/pip install mini-swe-agent==2.4.6"
_RECORD: Final = f"{HOME}/mini.traj.json"


class MiniSweAgent(ProgramHarness):
    """The ``mini`` program. ``arguments`` are e.g. ``["-c", "agent.step_limit=20"]``."""

    name = "mini-swe-agent"
    install = INSTALL
    local = "bin/mini"
    on_path = "mini"

    async def run(
        self, prompt: str, *, policy: ServedPolicy, sandbox: Sandbox, timeout_s: float
    ) -> HarnessResult:
        """Let it work; see ``Harness.run``."""
        settings = {
            "model.model_kwargs.api_base": f"{policy.base_url}/v1",
            "model.model_kwargs.api_key": policy.key,
        }
        configs = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
        options = [part for config in ("mini.yaml", *configs) for part in ("-c", config)]
        done = await run_program(
            sandbox,
            [
                *self._installed.argv,
                *(
                    "minisweagent.run.mini",
                    "--yolo",
                    "--exit-immediately",
                    "--model",
                    f"openai/{MODEL}",
                ),
                *("--cost-limit", "0", "--output", _RECORD, *options),
                *self._arguments,
                *("--task", prompt),
            ],
            env={
                "MSWEA_CONFIGURED": "true",
                "MSWEA_SILENT_STARTUP": "1",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "4",
                # Without it each start looks for a price list on the network.
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
            timeout_s=timeout_s,
        )
        return HarnessResult(run=done, answer=await _submission(sandbox))

    def _installed_as(self, program: Path) -> Installed:
        environment = environment_of(self.name, program, install=self.install)
        return python(self.name, environment, install=self.install)


async def _submission(sandbox: Sandbox) -> str | None:
    """Return what was submitted, which no message of the policy holds."""
    try:
        record = json.loads(await sandbox.read(_RECORD))
    except (OSError, ValueError):
        return None  # it ended before it wrote one
    info = record.get("info") if isinstance(record, dict) else None
    if not isinstance(info, dict) or info.get("exit_status") != "Submitted":
        return None
    return str(info.get("submission", ""))
