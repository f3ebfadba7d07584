"""Ctrl-C and SIGTERM as an event that a command can wait for."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def stopping_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """Let SIGINT and SIGTERM set ``stop``; a second one ends the process at once."""
    loop = asyncio.get_running_loop()

    def ask(received: signal.Signals) -> None:
        if stop.is_set():
            signal.signal(received, signal.SIG_DFL)
            signal.raise_signal(received)
        stop.set()

    signals = (signal.SIGINT, signal.SIGTERM)
    for received in signals:
        loop.add_signal_handler(received, ask, received)
    try:
        yield
    finally:
        for received in signals:
            loop.remove_signal_handler(received)
