"""Numbers on the command line, refused where they are read."""

import argparse

from longarc.records.sampling import MIN_TEMPERATURE


def positive_int(text: str) -> int:
    """Read a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def temperature(text: str) -> float:
    """Read a temperature that can be sampled with."""
    number = float(text)
    if number != 0 and not MIN_TEMPERATURE <= number < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{number} is not a temperature; 0 is, or {MIN_TEMPERATURE} and more"
        )
    return number


def share(text: str) -> float:
    """Read a share, above 0 and at most 1."""
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{number} is not a share; more than 0 and at most 1 is")
    return number


def port(text: str) -> int:
    """Read a port number, 0 included."""
    number = int(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{number} is not a port; 0 to 65535 are")
    return number


def seconds(text: str) -> float:
    """Read a finite time of at least 0."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{number} is not a time; 0 and more seconds are")
    return number
