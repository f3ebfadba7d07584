"""Your own agent: any command that reads a task and talks to one of the chat APIs.

It finds the gateway in the variables that the SDKs read by themselves: OPENAI_BASE_URL and OPENAI_API_KEY,
ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY; and LONGARC_MODEL, _MAX_CONTEXT_TOKENS and _MAX_NEW_TOKENS. What it prints last
counts for nothing: the answer is the policy's last message, unless the program writes one to the file that LONGARC_ANSWER
names.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from longarc.envs.harnesses.programs import PLACE, python
from longarc.envs.harnesses.running import HOME, MODEL, run_program, text_of
from longarc.errors import ConfigError
from longarc.records.ports import HarnessResult, Sandbox, ServedPolicy

_ANSWER: Final = f"{HOME}/answer.txt"
_PROMPT: Final = "{prompt}"
_PYTHON: Final = "{python}"


class Custom:
    """A command of the user's; satisfies ``Harness``."""

    name = "custom"

    def __init__(
        self,
        *,
        command: Sequence[str],
        shows: Mapping[str, str] | None = None,
        venv: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Check what can be checked.

        Args:
            command: program and arguments, as the box has them. ``{prompt}`` stands for the task, which is on standard
                input too; ``{python}`` in the first place for a Python with the packages of ``venv``.
            shows: files and folders of this machine that the box shows, by their name below ``/opt/agent``.
            venv: a virtual environment whose packages ``{python}`` has.
            env: added to the environment.

        Raises:
            ConfigError: the command is empty, or something of it is not there.
        """
        if not command:
            raise ConfigError(
                "harness 'custom' needs command = [...], the program and its arguments"
            )
        if (command[0] == _PYTHON) != (venv is not None):
            raise ConfigError(
                f"harness 'custom' has venv = {venv!r} and command = {list(command)}: a command that begins with "
                f"'{_PYTHON}' needs a venv, and a venv such a command"
            )
        self._argv = tuple(command)
        self._env = dict(env or {})
        self._shown: dict[str, str] = {}
        if venv is not None:
            installed = python(self.name, Path(venv), install=f"python3 -m venv {venv}")
            self._argv = (*installed.argv, *command[1:])
            self._shown |= installed.shown
        for name, path in (shows or {}).items():
            if not os.path.exists(path):
                raise ConfigError(
                    f"harness 'custom' shows {path!r} as {PLACE}/{name}, but there is no such file or folder"
                )
            self._shown[f"{PLACE}/{name}"] = str(Path(path).absolute())

    @property
    def shown(self) -> Mapping[str, str]:
        """What the box has to show."""
        return self._shown

    async def run(
        self, prompt: str, *, policy: ServedPolicy, sandbox: Sandbox, timeout_s: float
    ) -> HarnessResult:
        """Let it work; see ``Harness.run``."""
        done = await run_program(
            sandbox,
            [word.replace(_PROMPT, prompt) for word in self._argv],
            env={
                "OPENAI_BASE_URL": f"{policy.base_url}/v1",
                "OPENAI_API_KEY": policy.key,
                "ANTHROPIC_BASE_URL": policy.base_url,
                "ANTHROPIC_API_KEY": policy.key,
                "LONGARC_MODEL": MODEL,
                "LONGARC_MAX_CONTEXT_TOKENS": str(policy.max_context_tokens),
                "LONGARC_MAX_NEW_TOKENS": str(policy.max_new_tokens),
                "LONGARC_ANSWER": _ANSWER,
                **self._env,
            },
            stdin=prompt,
            timeout_s=timeout_s,
        )
        try:
            answer = text_of(await sandbox.read(_ANSWER))
        except OSError:
            answer = None  # it wrote none
        return HarnessResult(run=done, answer=answer)
