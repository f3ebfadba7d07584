"""Numbers on the command line, refused where they are read."""

import argparse

from longarc.records.sampling import MIN_TEMPERATURE


def positive_int(text: str) -> int:
    """Read a whole number of at least 1."""
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def natural_int(text: str) -> int:
    """Read a whole number of at least 0."""
    number = _whole(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is not at least 0")
    return number


def temperature(text: str) -> float:
    """Read a temperature that can be sampled with."""
    number = _number(text)
    if number != 0 and not MIN_TEMPERATURE <= number < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{number} is not a temperature; 0 is, or {MIN_TEMPERATURE} and more"
        )
    return number


def share(text: str) -> float:
    """Read a share, above 0 and at most 1."""
    number = _number(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{number} is not a share; more than 0 and at most 1 is")
    return number


def port(text: str) -> int:
    """Read a port number, 0 included."""
    number = _whole(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{number} is not a port; 0 to 65535 are")
    return number


def seconds(text: str) -> float:
    """Read a finite time of at least 0."""
    number = _number(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{number} is not a time; 0 and more seconds are")
    return number


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number; write its digits, as in 1000000"
        ) from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; write it as in 0.5") from error
