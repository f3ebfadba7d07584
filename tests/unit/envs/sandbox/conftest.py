"""Boxes for the sandbox tests; where the machine cannot make any, the tests say why they are skipped."""

import asyncio
import os
from pathlib import Path

import pytest

from longarc.envs.sandbox.backend import BwrapBackend, SandboxCapabilities
from longarc.records.ports import SandboxSpec

FILES = {"notes/a.txt": b"alpha\n", "b.txt": b"beta\n"}


@pytest.fixture(scope="session")
def capabilities() -> SandboxCapabilities:
    async def look() -> SandboxCapabilities:
        backend = BwrapBackend()
        try:
            return await backend.probe()
        finally:
            await backend.close()

    found = asyncio.run(look())
    if not found.is_usable:
        pytest.skip(f"no sandbox on this machine: {found.problem}")
    return found


@pytest.fixture
async def backend(capabilities):
    backend = BwrapBackend(max_boxes=8)
    yield backend
    await backend.close()


@pytest.fixture
async def box(backend):
    box = await backend.create(SandboxSpec(files=FILES))
    yield box
    await box.close()


@pytest.fixture
def processes_with():
    """Return the ids of all processes of the machine whose command line contains a marker."""

    def find(marker: str) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if marker.encode() in command:
                    found.append(int(entry.name))
        return found

    return find
