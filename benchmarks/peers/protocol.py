"""How a peer's process talks to the benchmark that started it: a job, then a line of JSON for each answer."""

import json
import os
import sys
from pathlib import Path
from typing import IO, Any


def open_job() -> tuple[dict[str, Any], IO[str]]:
    """Return the job that the command line names, and where answers go.

    What the libraries print goes to stderr from now on: it does not belong among the answers.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return json.loads(Path(sys.argv[1]).read_text()), answers


def answer(answers: IO[str], values: dict[str, Any]) -> None:
    """Send one answer."""
    print(json.dumps(values), file=answers, flush=True)
