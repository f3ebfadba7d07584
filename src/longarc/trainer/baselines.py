"""Running means as baselines: what rollouts of a family earned lately, for those that have no group to compare with.

The history is state of the trainer, so it stands in its checkpoints: a resumed run compares with the same numbers.
"""

import json
from collections.abc import Iterator, Sequence
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

    def advantages(
        self, families: Sequence[str], rewards: Sequence[Sequence[float]]
    ) -> list[list[float]]:
        """Return the advantages of a whole step, and remember its rewards for the steps after it.

        In the first step of a family its rollouts are compared with each other.

        Args:
            families: of each group.
            rewards: of each group's rollouts.
        """
        of_family: dict[str, list[float]] = {}
        for family, own in zip(families, rewards, strict=True):
            of_family.setdefault(family, []).extend(own)
        found: dict[str, Iterator[float]] = {}
        for family, own in of_family.items():
            values, self._history[family] = running_mean_advantages(
                own, self._history.get(family, ()), window=self._window
            )
            found[family] = iter(values.tolist())
        return [
            [next(found[family]) for _ in own]
            for family, own in zip(families, rewards, strict=True)
        ]

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
