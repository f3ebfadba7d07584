"""What the benchmarks share: the table they print, the processes of peers and the models they are measured on."""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from longarc.config.model import LlamaConfig

LLAMA = LlamaConfig(
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
    intermediate_size=688,
)
"""Five million parameters in a shape that every library has."""

DEEP_LLAMA = LlamaConfig(
    hidden_size=192,
    num_hidden_layers=12,
    num_attention_heads=3,
    num_key_value_heads=1,
    intermediate_size=512,
)
"""Five million parameters in the proportions of SmolLM2-135M: deep and thin, a third of its width."""

SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    rope_theta=1e5,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
"""The shape of SmolLM2-135M; speed does not depend on what the weights are."""


def positive(text: str) -> int:
    """Read a number of things there has to be one of, as ``type`` of an option."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """Read a number that may be 0, a seed say, as ``type`` of an option."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is not at least {least}")
    return number


def processor_s() -> float:
    """Return the processor time [s] of this process and of those that share its gradients."""
    ticks = 0
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user and system
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def processor_s_of_others() -> float:
    """Return the processor time [s] that all processes but this one have had since the machine started."""
    first = Path("/proc/stat").read_text().splitlines()[0].split()
    user, nice, system, _idle, _waiting, *interrupts = map(int, first[1:9])
    used = user + nice + system + sum(interrupts)
    return used / os.sysconf("SC_CLK_TCK") - time.process_time()


class Table:
    """Prints ``figure | ours | peer | ratio | bar`` row by row, and last how many bars hold."""

    def __init__(self) -> None:
        self._num_bars = self._num_held = 0
        print("figure | ours | peer | ratio | bar", flush=True)

    def row(
        self,
        figure: str,
        ours: str,
        *,
        peer: str = "-",
        ratio: float | None = None,
        bar: str = "-",
        holds: bool | None = None,
    ) -> None:
        """Print one row.

        Args:
            figure: what was measured, with its unit.
            ours: the value of LongArc.
            peer: the value of what it is compared with.
            ratio: ours over peer.
            bar: what must be reached.
            holds: whether it is; None where the row has no bar. What could not be measured does not hold.
        """
        self._num_bars += holds is not None
        self._num_held += bool(holds)
        shown = "-" if ratio is None else f"{ratio:.2f}"
        missed = "   MISSED" if holds is False else ""
        print(f"{figure} | {ours} | {peer} | {shown} | {bar}{missed}", flush=True)

    def close(self) -> bool:
        """Print the last line; return whether every bar holds."""
        print(f"bars: {self._num_held} of {self._num_bars} hold", flush=True)
        return self._num_held == self._num_bars


class PeerProcess:
    """A peer in a process of its own, which answers a line with a line of JSON."""

    def __init__(self, name: str, python: str | Path, script: Path, job: dict[str, Any]) -> None:
        """Start it and wait until it is ready.

        Args:
            name: for messages.
            python: the interpreter of the peer's environment.
            script: what it runs; gets the path of the job.
            job: anything JSON; ``num_threads`` are its compute threads, ``scratch`` an existing directory.
        """
        path = Path(job["scratch"]) / f"{script.stem}-{job['num_threads']}.json"
        path.write_text(json.dumps(job))
        # make lets waiting threads sleep for the sake of LongArc's own processes; peers are faster without.
        environment = {n: value for n, value in os.environ.items() if n != "OMP_WAIT_POLICY"}
        self._name = name
        self._process = subprocess.Popen(
            [str(python), str(script), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "OMP_NUM_THREADS": str(job["num_threads"])},
        )
        try:
            self.ready = self._read()
            """What it said first."""
        except BaseException:
            self.__exit__()
            raise

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(
                f"the process of {self._name} ended with {self._process.wait()}; its words are above"
            )
        reply: dict[str, Any] = json.loads(line)
        return reply
