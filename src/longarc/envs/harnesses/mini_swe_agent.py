"""mini-swe-agent: one tool, ``bash``, over chat completions that are not streamed.

A reply without a call is answered with an error and left out of the history, so each opens a branch of its own. The
task ends with ``echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT``; what that command prints behind the first line is the answer.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Final

from longarc.envs.harnesses.programs import environment_of, find, python
from longarc.envs.harnesses.running import HOME, MODEL, run_program
from longarc.records.ports import HarnessResult, Sandbox, ServedPolicy

INSTALL: Final = "python3 -m venv .agents/mini-swe-agent && .agents/mini-swe-agent/bin/pip install mini-swe-agent==2.4.6"
_RECORD: Final = f"{HOME}/mini.traj.json"


class MiniSweAgent:
    """The ``mini`` program; satisfies ``Harness``."""

    name = "mini-swe-agent"

    def __init__(self, *, program: str | None = None, arguments: Sequence[str] = ()) -> None:
        """Find the program.

        Args:
            program: its ``mini`` script; None looks for it.
            arguments: added to the command, e.g. ``["-c", "agent.step_limit=20"]``.

        Raises:
            ConfigError: it is not installed.
        """
        script = find(self.name, "bin/mini", program, on_path="mini", install=INSTALL)
        environment = environment_of(self.name, script, install=INSTALL)
        self._installed = python(self.name, environment, install=INSTALL)
        self._arguments = tuple(arguments)

    @property
    def shown(self) -> Mapping[str, str]:
        """What the box has to show."""
        return self._installed.shown

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
