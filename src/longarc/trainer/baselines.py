"""Running means as baselines: what rollouts of a family earned lately, for those that have no group to compare with.

The history is state of the trainer, so it stands in its checkpoints: a resumed run compares with the same numbers.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from longarc.algos.advantages import running_mean_advantages
from longarc.errors import CheckpointError, ResourceError, boundary

BASELINES_FILE = "baselines.json"


class RunningBaselines:
    """The last rewards of each family; all rollouts of a step are compared with those of the steps before."""

    def __init__(self, window: int) -> None:
        """Remember ``window`` rewards [rollouts] of each family."""
        self._window = window
        self._history: dict[str, tuple[float, ...]] = {}
        self._step: dict[str, list[float]] = {}

    def advantages(self, family: str, rewards: Sequence[float]) -> list[float]:
        """Return the advantages of a group, and remember its rewards for the steps after this one.

        In the first step of a family there is nothing to compare with but the group itself.
        """
        result, _ = running_mean_advantages(
            rewards, self._history.get(family, ()), window=self._window
        )
        self._step.setdefault(family, []).extend(rewards)
        return [float(value) for value in result.tolist()]

    def end_step(self) -> None:
        """Let the rewards of this step become history."""
        for family, rewards in self._step.items():
            known = self._history.get(family, ())
            self._history[family] = (*known, *rewards)[-self._window :]
        self._step = {}

    def save(self, directory: str) -> None:
        """Write the history into an existing directory.

        Raises:
            ResourceError: the disk is full or not writable.
        """
        with boundary(ResourceError, f"cannot write the checkpoint {directory}"):
            text = json.dumps(self._history, sort_keys=True)
            (Path(directory) / BASELINES_FILE).write_text(text + "\n")

    def load(self, directory: str) -> None:
        """Continue from what :meth:`save` wrote.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        with boundary(
            CheckpointError,
            f"checkpoint {directory} has no readable {BASELINES_FILE}; resume from an earlier one",
        ):
            history = json.loads((Path(directory) / BASELINES_FILE).read_text())
            self._history = {
                str(family): tuple(float(reward) for reward in rewards)
                for family, rewards in history.items()
            }
