"""Trajectories in files: LongArc's own JSON lines, ATIF documents, run directories; read and written.

A directory is looked through for files named like trajectories (``trajectory.json`` of a Harbor trial,
``*.trajectory.json``, ``trajectories.jsonl``), because much else that is JSON lies beside them. A file that is
named itself may be called anything.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final
from urllib.parse import quote

from longarc.errors import ConfigError, ContractError, ResourceError, boundary
from longarc.records.trajectory import Trajectory
from longarc.runs.atif import trajectory_to_atif
from longarc.runs.atif_import import trajectories_from_atif
from longarc.runs.directory import RECIPE, RunDirectory
from longarc.runs.files import new_directory, replacing
from longarc.runs.record_form import check_form
from longarc.runs.record_json import (
    FORMAT,
    to_json_line,
    trajectory_from_json,
    trajectory_to_json,
)

_SUFFIXES: Final = (".json", ".jsonl")
_MAX_NAME_CHARS: Final = 160
_ATIF_SUFFIX: Final = ".trajectory.json"


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file, of the files below a directory by name, or of a run's ledger, in order.

    Args:
        path: ``.json`` holds one document, ``.jsonl`` one a line, each ATIF or LongArc's own.

    Raises:
        ConfigError: there is nothing, or nothing that is named like a trajectory.
        ContractError: a file is damaged or holds something else; it is named, with the line.
        ResourceError: a file cannot be read.
    """
    if (path / RECIPE).is_file():
        with closing(RunDirectory.look(path).read_ledger()) as ledger:
            yield from ledger.trajectories()
        return
    for file, name in _files(path):
        yield from _read_file(file, name=name)


def json_lines(trajectories: Iterable[Trajectory]) -> Iterator[str]:
    """Yield a line of LongArc's own JSON for each trajectory; nothing is lost."""
    for trajectory in trajectories:
        yield to_json_line(trajectory_to_json(trajectory))


def atif_lines(trajectories: Iterable[Trajectory], *, with_prompt_ids: bool) -> Iterator[str]:
    """Yield a line of ATIF for each trajectory; see ``trajectory_to_atif``."""
    for trajectory in trajectories:
        yield to_json_line(trajectory_to_atif(trajectory, with_prompt_ids=with_prompt_ids))


def write_lines(path: Path, lines: Iterable[str]) -> int:
    """Write a file of lines, whole or not at all; return how many.

    Raises:
        ResourceError: the disk is full or the place is not writable; a file that was there is untouched.
    """
    number = 0
    with replacing(path) as file:
        for line in lines:
            file.write(line.encode() + b"\n")
            number += 1
    return number


def write_atif(
    directory: Path, trajectories: Iterable[Trajectory], *, with_prompt_ids: bool
) -> int:
    """Write an ATIF document for each trajectory into a new directory, all or none; return how many.

    Raises:
        ConfigError: the directory holds something already.
        ResourceError: the disk is full or the place is not writable.
    """
    number = 0
    with new_directory(directory):
        for trajectory in trajectories:
            document = trajectory_to_atif(trajectory, with_prompt_ids=with_prompt_ids)
            file = directory / f"{_file_name(trajectory.id)}{_ATIF_SUFFIX}"
            with file.open("x", encoding="ascii") as out:
                out.write(f"{to_json_line(document)}\n")
            number += 1
    return number


def _file_name(trajectory_id: str) -> str:
    """Return a file name that no other id has."""
    name = quote(trajectory_id, safe="", errors="surrogatepass")
    if name.startswith("."):
        name = f"%2E{name[1:]}"  # else it would be hidden
    if len(name) <= _MAX_NAME_CHARS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"{name[:_MAX_NAME_CHARS]}~{digest}"


def _files(path: Path) -> list[tuple[Path, str]]:
    """Return the files to read, each with the name of what in it has none."""
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise ConfigError(
                f"{path} is no trajectory file: .json holds one document, .jsonl one a line"
            )
        return [(path, _stem(path.name))]
    if not path.is_dir():
        raise ConfigError(
            f"there is no {path}; give a file (.json, .jsonl), a directory of them, or a run"
        )
    found = sorted(
        file
        for file in path.rglob("*traject*")
        if file.suffix in _SUFFIXES and file.is_file() and not file.name.startswith(".")
    )
    if not found:
        raise ConfigError(
            f"{path} has no file whose name holds 'trajectory' or 'trajectories' and ends in .json or .jsonl, and it is no "
            f"run; name the files themselves"
        )
    return [(file, _stem(file.relative_to(path).as_posix())) for file in found]


def _stem(name: str) -> str:
    return name.removesuffix(_ATIF_SUFFIX).removesuffix(".json").removesuffix(".jsonl")


def _read_file(path: Path, *, name: str) -> Iterator[Trajectory]:
    try:
        with path.open("rb") as file:
            if path.suffix == ".json":
                yield from _read(file.read(), name=name, where=str(path))
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield from _read(line, name=f"{name}/{number}", where=f"{path}, line {number}")
    except OSError as error:
        raise ResourceError(f"cannot read {path}: {error.strerror or error}") from error


def _read(data: bytes, *, name: str, where: str) -> tuple[Trajectory, ...]:
    with boundary(ContractError, f"{where} is no JSON"):
        value = json.loads(data)
    try:
        if isinstance(value, dict) and value.get("format") == FORMAT:
            check_form(value)
            return (trajectory_from_json(value),)
        return trajectories_from_atif(value, name=name)
    except ContractError as error:
        raise ContractError(f"{where}: {error}") from error
