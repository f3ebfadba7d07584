"""The OpenAI Agents SDK: a small agent with one tool, ``bash``, over chat completions or Responses.

The SDK is a library and no program, so this starts an agent of its own (``openai_agents_program.py``, which runs in the
box with the SDK and nothing of LongArc). Your own agent over the SDK is harness ``custom``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from longarc.envs.harnesses.programs import environment_of, find, python
from longarc.envs.harnesses.running import HOME, MODEL, run_program
from longarc.errors import ConfigError
from longarc.records.ports import HarnessResult, Sandbox, ServedPolicy

INSTALL: Final = "python3 -m venv .agents/openai-agents && .agents/openai-agents/bin/pip install openai-agents==0.24.0"
_PROGRAM: Final = f"{HOME}/agent.py"
_APIS: Final = ("chat", "responses")


class OpenAiAgents:
    """An agent over the SDK; satisfies ``Harness``."""

    name = "openai-agents"

    def __init__(
        self, *, program: str | None = None, instructions: str = "", api: str = "responses"
    ) -> None:
        """Find the SDK.

        Args:
            program: a ``python`` of the virtual environment that has it; None looks for it.
            instructions: of the agent, in place of those it has.
            api: ``chat`` or ``responses``.

        Raises:
            ConfigError: it is not installed, or there is no such API.
        """
        if api not in _APIS:
            raise ConfigError(
                f"api = {api!r} of harness {self.name!r}: choose one of {list(_APIS)}"
            )
        found = find(self.name, "bin/python", program, on_path=None, install=INSTALL)
        environment = environment_of(self.name, found, install=INSTALL)
        self._installed = python(self.name, environment, install=INSTALL)
        self._instructions = instructions
        self._api = api

    @property
    def shown(self) -> Mapping[str, str]:
        """What the box has to show."""
        return self._installed.shown

    async def run(
        self, prompt: str, *, policy: ServedPolicy, sandbox: Sandbox, timeout_s: float
    ) -> HarnessResult:
        """Let it work; see ``Harness.run``."""
        source = Path(__file__).with_name("openai_agents_program.py").read_text()
        done = await run_program(
            sandbox,
            [*self._installed.argv, _PROGRAM, self._api, MODEL, self._instructions],
            env={
                "OPENAI_BASE_URL": f"{policy.base_url}/v1",
                "OPENAI_API_KEY": policy.key,
                "OPENAI_AGENTS_DISABLE_TRACING": "1",
            },
            files={_PROGRAM: source},
            stdin=prompt,
            timeout_s=timeout_s,
        )
        return HarnessResult(run=done)
