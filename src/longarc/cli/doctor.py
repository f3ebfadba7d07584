"""Is this machine ready?

One line a check: ok, warn (slower, or a part is not available) or fail (training cannot run), each
of the last two with what to do. Exit code 1 where anything fails.
"""

import argparse

from longarc.cli._exit import ExitCode

SUMMARY = "check whether this machine is ready"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run every check and print it."""
    from dataclasses import asdict

    from longarc.cli._checks import every_check
    from longarc.cli._runs import print_json

    checks = every_check()
    if arguments.json:
        print_json([asdict(check) for check in checks])
    else:
        for check in checks:
            print(f"{check.status:<5} {check.name}: {check.detail}")
            if check.fix and check.status != "ok":
                print(f"      fix: {check.fix}")
    return ExitCode.FAILED if any(check.status == "fail" for check in checks) else ExitCode.OK
