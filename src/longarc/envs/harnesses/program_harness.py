"""What the harnesses of installed programs share: the program is found when the recipe is read, and shown to each box."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from longarc.envs.harnesses.programs import Installed, find, native
from longarc.records.ports import HarnessResult, Sandbox, ServedPolicy


class ProgramHarness(ABC):
    """A program that is started with a command of its own; satisfies ``Harness``."""

    name: ClassVar[str]
    install: ClassVar[str]
    """The command that installs the program."""
    local: ClassVar[str]
    """Where it lies below its folder in ``.agents``."""
    on_path: ClassVar[str]
    """Its name on PATH."""

    def __init__(self, *, program: str | None = None, arguments: Sequence[str] = ()) -> None:
        """Find the program.

        Args:
            program: its path; None looks for it.
            arguments: added to the command.

        Raises:
            ConfigError: it is not installed.
        """
        found = find(self.name, self.local, program, on_path=self.on_path, install=self.install)
        self._installed = self._installed_as(found)
        self._arguments = tuple(arguments)

    @property
    def shown(self) -> Mapping[str, str]:
        """What the box has to show."""
        return self._installed.shown

    @abstractmethod
    async def run(
        self, prompt: str, *, policy: ServedPolicy, sandbox: Sandbox, timeout_s: float
    ) -> HarnessResult:
        """Let it work; see ``Harness.run``."""

    def _installed_as(self, program: Path) -> Installed:
        """Return what a box has to show for it; here, one binary."""
        return native(self.name, program, install=self.install)
