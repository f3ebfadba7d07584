"""Schemathesis, in an environment of its own, against the gateway and its own /openapi.json: ``make integration``."""

import asyncio
import os
import random
import re
from pathlib import Path

import pytest

from drift_parts import RecordingEngine
from gateway_cases import FORMAT, Door
from longarc.gateway.server import bound_socket, serving

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / ".venv-schemathesis/bin/schemathesis"
LEAST_CASES = 3000

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not os.access(PROGRAM, os.X_OK),
        reason=".venv-schemathesis is missing: make integration makes it",
    ),
]


async def test_thousands_of_requests_get_what_the_description_says(tmp_path):
    door = Door(RecordingEngine(FORMAT.tokenizer, True, random.Random(1)))
    (tmp_path / "schemathesis.toml").write_text(f'[parameters]\n"path.key" = "{door.key}"\n')
    async with serving(door.app, bound_socket()) as url:
        program = await asyncio.create_subprocess_exec(
            *(PROGRAM, "--config-file", tmp_path / "schemathesis.toml"),
            *("run", f"{url}/openapi.json", "--header", f"Authorization: Bearer {door.key}"),
            *("--seed", "1", "--max-examples", "30", "--continue-on-failure", "--no-color"),
            # What asks for features that the gateway lacks is refused by name, which no schema can say.
            *("--exclude-checks", "positive_data_acceptance"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        )
        told, _ = await program.communicate()
    report = told.decode()
    assert program.returncode == 0, report[-8000:]
    found = re.search(r"(\d+) generated", report)
    assert found is not None, report[-2000:]
    assert int(found[1]) >= LEAST_CASES
    # Both ways of showing the key opened the session, so that it was not 401 and 404 that were tried.
    assert "Authentication failed" not in report
    assert "Missing test data" not in report
    assert door.session.num_turns > 100
