"""The run directory: everything a run knows, in one place that can be copied and resumed.

::

    RUN/recipe.json           the resolved recipe
        environment.json      code, packages, machine and seeds of every start
        metrics.jsonl         one line a step       tensorboard/   the same for TensorBoard
        events.jsonl          what happened, in order
        ledger.sqlite         the trajectories
        lock                  held while a process runs here
        stages/NAME/checkpoints/step-000123/   manifest.json and its files
        stages/NAME/final.json                 the checkpoint the next stage starts from
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from longarc.errors import CheckpointError, ConfigError, ContractError, ResourceError
from longarc.runs.checkpoint import (
    FINAL,
    CheckpointWriter,
    list_checkpoints,
    read_final,
    verify,
)
from longarc.runs.environment import describe_environment
from longarc.runs.files import JsonLines, json_document, lock_holders, write_atomically
from longarc.runs.ledger import Ledger
from longarc.runs.reader import LedgerReader

RECIPE = "recipe.json"
"""Name of the file that makes a directory a run."""

HARMLESS_KEYS = (
    "name",
    "sinks",
    "stages.*.checkpoint_every_steps",
    "stages.*.tasks_per_family_full",
)
"""Recipe keys (patterns) that may change between two starts: they alter names and safety nets, not what is computed."""


_BEFORE_RECIPE = frozenset({"lock", "environment.json", ".environment.json.tmp", f".{RECIPE}.tmp"})
"""What a start that was killed before it wrote the recipe leaves behind."""


class StageDirectory:
    """What one stage has on disk."""

    def __init__(self, path: Path) -> None:
        """Look at ``stages/NAME``; nothing is created yet."""
        self.path = path
        self.checkpoints_path = path / "checkpoints"

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints, oldest first."""
        return list_checkpoints(self.checkpoints_path)

    def latest(self) -> Path | None:
        """Return the newest intact checkpoint, or None; damaged ones are passed over."""
        for checkpoint in reversed(self.checkpoints()):
            try:
                verify(checkpoint)
            except CheckpointError:
                continue
            return checkpoint
        return None

    def final(self) -> Path | None:
        """Return the checkpoint the next stage starts from; None while the stage is not finished."""
        return read_final(self.path)

    def set_final(self, checkpoint: Path) -> None:
        """Mark the stage as finished, with this checkpoint as its result.

        Raises:
            CheckpointError: it is not an intact checkpoint of this stage.
        """
        if checkpoint.parent != self.checkpoints_path:
            raise CheckpointError(f"{checkpoint} is not in {self.checkpoints_path}")
        manifest = verify(checkpoint)
        document = {"checkpoint": checkpoint.name, "policy_version": manifest.policy_version}
        write_atomically(self.path / FINAL, json_document(document))

    def writer(self, *, keep_last: int, clock: Callable[[], float] = time.time) -> CheckpointWriter:
        """Return the writer of this stage's checkpoints."""
        return CheckpointWriter(self.checkpoints_path, keep_last=keep_last, clock=clock)


class RunDirectory:
    """One run on disk, locked while it is open for writing."""

    def __init__(self, path: Path, *, lock: int | None, clock: Callable[[], float]) -> None:
        """Use ``create``, ``resume`` or ``look``."""
        self.path = path
        self._lock = lock
        self._clock = clock
        self._events: JsonLines | None = None

    # ----------------------------------------------------------------- opening

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        recipe: Mapping[str, Any],
        seeds: Mapping[str, int],
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """Start a run in a new or empty directory.

        Args:
            path: where.
            recipe: the resolved recipe, JSON.
            seeds: every seed the run starts from, by purpose.
            clock: wall clock [seconds since the epoch].

        Raises:
            ConfigError: there is a run already, or another process uses the directory.
            ResourceError: the place is not writable.
        """
        run = cls._locked(path, clock)
        try:
            others = sorted({p.name for p in path.iterdir()} - _BEFORE_RECIPE)
            if others and RECIPE in others:
                raise ConfigError(
                    f"{path} holds a run already: continue it with --resume, or give another --run-dir"
                )
            if others:
                raise ConfigError(
                    f"{path} is not empty ({', '.join(others[:3])} ...): give a new directory"
                )
            run._record_start(seeds)
            # Last, because it is what makes the directory a run.
            write_atomically(path / RECIPE, json_document(recipe))
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def resume(
        cls,
        path: Path,
        *,
        recipe: Mapping[str, Any],
        seeds: Mapping[str, int],
        harmless: Sequence[str] = HARMLESS_KEYS,
        read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """Continue a run with the recipe it was started with.

        Args:
            path: where.
            recipe: the resolved recipe, JSON.
            seeds: every seed the run starts from, by purpose.
            harmless: patterns of dotted keys that may have changed.
            read: makes of the recorded recipe what is compared: options that are newer than the run at their
                defaults, and none that are gone. The file stays as it was written.
            clock: wall clock [seconds since the epoch].

        Raises:
            ConfigError: there is no run, its recipe differs (the message shows how), or another
                process uses the directory.
            ContractError: ``recipe.json`` is damaged.
        """
        if not (path / RECIPE).is_file():
            raise ConfigError(
                f"{path} holds no run to resume: it has no {RECIPE}. Start it without --resume."
            )
        run = cls._locked(path, clock)
        try:
            changes = recipe_changes(read(run.recipe()), orjson.loads(orjson.dumps(recipe)))
            refused = {key: c for key, c in changes.items() if not _is_harmless(key, harmless)}
            if refused:
                raise ConfigError(
                    f"{path} was started with another recipe:\n{format_changes(refused)}\n"
                    "Take the changes back, or start a new run directory. "
                    f"Only these keys may change: {', '.join(harmless)}"
                )
            run._record_start(seeds)
            if changes:
                run.event("recipe_changed", changes={k: list(v) for k, v in changes.items()})
                write_atomically(path / RECIPE, json_document(recipe))
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def hold(cls, path: Path, *, clock: Callable[[], float] = time.time) -> Self:
        """Open a run for writing without starting it again.

        Raises:
            ConfigError: there is no run, or another process uses the directory.
        """
        cls.look(path)
        return cls._locked(path, clock)

    @classmethod
    def look(cls, path: Path) -> Self:
        """Open a run for reading, also while another process runs it.

        Raises:
            ConfigError: there is no run.
        """
        if not (path / RECIPE).is_file():
            raise ConfigError(
                f"{path} is not a run directory: it has no {RECIPE}; longarc runs list shows what runs there are"
            )
        return cls(path, lock=None, clock=time.time)

    @classmethod
    def _locked(cls, path: Path, clock: Callable[[], float]) -> Self:
        try:
            path.mkdir(parents=True, exist_ok=True)
            handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ResourceError(
                f"cannot use run directory {path}: {error.strerror}; give a --run-dir that can be written to"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(handle)
            raise ConfigError(
                f"{path} is in use by process {holder}: wait for it, stop it, or give another --run-dir"
            ) from error
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        return cls(path, lock=handle, clock=clock)

    def _record_start(self, seeds: Mapping[str, int]) -> None:
        starts = [*self.environments(), describe_environment(seeds=seeds, clock=self._clock)]
        write_atomically(self.path / "environment.json", json_document({"starts": starts}))

    # ---------------------------------------------------------------- contents

    def recipe(self) -> dict[str, Any]:
        """Return the resolved recipe.

        Raises:
            ContractError: the file is damaged.
        """
        return _read_object(self.path / RECIPE)

    def environments(self) -> list[dict[str, Any]]:
        """Return what the run was made with, one entry a start."""
        path = self.path / "environment.json"
        return list(_read_object(path)["starts"]) if path.exists() else []

    @property
    def metrics_path(self) -> Path:
        """Where the metrics are, as JSON lines."""
        return self.path / "metrics.jsonl"

    @property
    def ledger_path(self) -> Path:
        """Where the trajectory ledger is."""
        return self.path / "ledger.sqlite"

    def open_ledger(self) -> Ledger:
        """Open the ledger for writing; the run directory must be open for writing."""
        if self._lock is None:
            raise ContractError(f"{self.path} is open for reading only: the ledger has one writer")
        return Ledger.open(self.ledger_path, clock=self._clock)

    def read_ledger(self) -> LedgerReader:
        """Open the ledger for reading."""
        return LedgerReader.open_read_only(self.ledger_path)

    def stage(self, name: str) -> StageDirectory:
        """Return what one stage has on disk."""
        return StageDirectory(self.path / "stages" / name)

    def stages(self) -> list[str]:
        """Return the names of the stages that have written something, in the recipe's order."""
        found = {path.name for path in (self.path / "stages").glob("*") if path.is_dir()}
        order = list(self.recipe().get("stages", {}))
        return sorted(
            found, key=lambda name: (order.index(name) if name in order else len(order), name)
        )

    def event(self, kind: str, **fields: Any) -> None:
        """Append one event: what happened, with ids for those who search."""
        if self._events is None:
            self._events = JsonLines(self.path / "events.jsonl")
        self._events.append({"time_s": self._clock(), "event": kind, **fields})

    def running_in(self) -> int | None:
        """Return the process that runs here now; None where there is none, or Linux does not tell."""
        return next(iter(lock_holders(self.path / "lock")), None)

    def discard_unused(self) -> bool:
        """Make room for another start where this one has left nothing: no file of a stage, step or trajectory.

        The ledger has to be closed. A run that has anything stays as it is.

        Returns:
            Whether the directory is free again.
        """
        if self._lock is None:
            raise ContractError(f"{self.path} is open for reading only: nothing is removed from it")
        if self._has_results():
            return False
        if self._events is not None:
            self._events.close()
            self._events = None
        (self.path / RECIPE).unlink(missing_ok=True)  # first: from here on it is no run
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()
        return True

    def _has_results(self) -> bool:
        if any(path.is_file() for path in (self.path / "stages").rglob("*")):
            return True
        if self.metrics_path.is_file() and self.metrics_path.stat().st_size:
            return True
        if not self.ledger_path.is_file():
            return False
        with self.read_ledger() as ledger:
            return bool(ledger.stages())

    def close(self) -> None:
        """Release the lock; may be called twice."""
        if self._events is not None:
            self._events.close()
            self._events = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def find_runs(root: Path) -> list[Path]:
    """Return the run directories at or directly below ``root``, by name."""
    candidates = [root, *sorted(root.glob("*"))]
    return [path for path in candidates if (path / RECIPE).is_file()]


# -------------------------------------------------------------------------- recipes

ABSENT = "(not set)"
"""Stands for a key that one of two recipes does not have."""


def recipe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return ``{dotted key: (old value, new value)}`` for every leaf that differs.

    The order of stages is part of a recipe, so it is compared too.
    """
    before, after = dict(_leaves(old)), dict(_leaves(new))
    keys = list(dict.fromkeys([*before, *after]))
    changes = {
        key: (before.get(key, ABSENT), after.get(key, ABSENT))
        for key in keys
        if before.get(key, ABSENT) != after.get(key, ABSENT)
    }
    orders = [list(recipe.get("stages") or {}) for recipe in (old, new)]
    if orders[0] != orders[1]:
        changes["stages (order)"] = (orders[0], orders[1])
    return changes


def format_changes(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return a diff for people, one line a key."""
    return "\n".join(f"  {key}: {old!r} -> {new!r}" for key, (old, new) in changes.items())


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_harmless(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ContractError(f"{path} is damaged: {error}. Restore it from a copy.") from error
    if not isinstance(data, dict):
        raise ContractError(f"{path} is damaged: it holds a {type(data).__name__}, not an object")
    return data
