"""The gateway on one core, before an engine that has sampled already, beside rllm-model-gateway and the litellm proxy.

Gateway on the first core; engine stub and load generator share the second. Every session's texts are its own.

* saturation: 16 clients, closed loop, bodies of 26 KB in the mean (sessions of 20 turns that grow from 20 to 33 KB).
* open loop: 100 turns a second are due whatever became of those before; latency counts from then, and what the
  same load takes at the stub without a gateway is subtracted, quantile from quantile.
* large: one client, 300 messages, 1.1 MB; processor time of the gateway for each request after the first.
* memory: resident bytes that an idle session of 8,000 tokens adds.
* streaming: 1,024 sessions of 20 turns, 100 turns a second in total.

A gateway that answers anything but the engine's text, or with a wrong status, fails its row.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from common import Table, positive
from gateway_traffic import Traffic, traffic

from longarc.tokens.tokenizer import Tokenizer

HERE = Path(__file__).parent
CORES = sorted(os.sched_getaffinity(0))
GATEWAY_CORE, LOAD_CORE = CORES[0], CORES[-1]
KEY = "bench"
LEAST_PER_S, MOST_P50_MS, MOST_P99_MS = 400, 3.0, 15.0
MOST_LARGE_MS, MOST_IDLE_KIB, MOST_FIRST_MS = 6.0, 64.0, 50.0


@dataclass
class Bench:
    """What the parts share."""

    arguments: argparse.Namespace
    scratch: Path
    tokenizer: Tokenizer
    stub_port: int
    table: Table = field(default_factory=Table)

    def load(self, target: "Target", made: Traffic, **job: Any) -> dict[str, Any]:
        """Run the load generator on its core."""
        paths = []
        for index, body in enumerate(made.bodies):
            path = self.scratch / f"body-{index}"
            path.write_bytes(body)
            paths.append(str(path))
        job |= {"port": target.port, "pid": target.pid, "bodies": paths}
        job.setdefault("reply", json.dumps(made.reply, ensure_ascii=False)[1:-1])
        (self.scratch / "job.json").write_text(json.dumps(job))
        done = subprocess.run(
            _pinned(LOAD_CORE, HERE / "gateway_load_worker.py", self.scratch / "job.json"),
            stdout=subprocess.PIPE,
            check=True,
        )
        return json.loads(done.stdout)


@dataclass
class Target:
    """A gateway that runs, or the stub itself."""

    name: str
    port: int
    pid: int

    def sessions(self, count: int) -> list[tuple[str, str]]:
        """Return path and key of new sessions."""
        if self.name == "longarc":
            with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", trust_env=False) as client:
                return [self._minted(client) for _ in range(count)]
        if self.name == "rllm-model-gateway":
            stem = f"{time.time_ns()}"
            return [(f"/sessions/{stem}-{i}/v1/chat/completions", KEY) for i in range(count)]
        return [("/v1/chat/completions", KEY)] * count

    def memory_bytes(self) -> int:
        """Return its resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _minted(self, client: httpx.Client) -> tuple[str, str]:
        reply = client.post("/admin/sessions", headers={"authorization": f"Bearer {KEY}"}, json={})
        reply.raise_for_status()
        return "/v1/chat/completions", reply.json()["key"]

    def num_wrong(self, reply_ids: Sequence[int]) -> int:
        """Return how many sampled tokens in the segments of all sessions are not the engine's."""
        wrong = 0
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", headers=headers, trust_env=False, timeout=60
        ) as client:
            for state in client.get("/admin/sessions").json()["sessions"]:
                lines = client.get(f"/admin/sessions/{state['session_id']}/segments").text
                for line in lines.splitlines():
                    segment = json.loads(line)
                    sampled = [
                        token
                        for token, is_sampled in zip(
                            segment["token_ids"], segment["is_sampled"], strict=True
                        )
                        if is_sampled
                    ]
                    count = len(sampled) // len(reply_ids)
                    wrong += sampled != list(reply_ids) * count
        return wrong


def _pinned(core: int, script: Path, *arguments: object) -> list[str]:
    return ["taskset", "-c", str(core), sys.executable, str(script), *map(str, arguments)]


@contextlib.contextmanager
def _process(
    argv: Sequence[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    with open(log, "w") as file:
        process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE if environment is None else file,
            stderr=file,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _stub(scratch: Path, made: Traffic) -> Iterator[int]:
    job = {"port": 0, "ids": made.reply_ids, "text": made.reply, "max_context_tokens": 1 << 20}
    (scratch / "stub.json").write_text(json.dumps(job))
    argv = _pinned(LOAD_CORE, HERE / "gateway_stub_worker.py", scratch / "stub.json")
    with _process(argv, scratch / "stub.log") as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["port"]


@contextlib.contextmanager
def _ours(bench: Bench) -> Iterator[Target]:
    sessions = tempfile.mkdtemp(dir=bench.scratch)
    argv = [
        *("taskset", "-c", str(GATEWAY_CORE), sys.executable, "-m", "longarc", "gateway"),
        *(str(bench.arguments.model), "--upstream", f"http://127.0.0.1:{bench.stub_port}"),
        *("--chat-format", "chatml", "--sessions", sessions, "--port", "0", "--admin-key", KEY),
        *("--max-context-tokens", str(1 << 20)),
    ]
    os.environ["LONGARC_ENGINE_KEY"] = KEY
    with _process(argv, bench.scratch / "gateway.log") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "address=" not in line:
            sys.exit(f"the gateway did not start: {(bench.scratch / 'gateway.log').read_text()}")
        port = int(line.partition("address=")[2].split()[0].rpartition(":")[2])
        yield Target("longarc", port, process.pid)


@contextlib.contextmanager
def _rllm(bench: Bench, python: Path) -> Iterator[Target]:
    argv = [
        *("taskset", "-c", str(GATEWAY_CORE), str(python), "-m", "rllm_model_gateway"),
        *("--port", "18801", "--store", "memory", "--log-level", "ERROR"),
        *("--worker", f"http://127.0.0.1:{bench.stub_port}/v1"),
    ]
    with _process(argv, bench.scratch / "rllm.log", {"PYTHONPATH": ""}) as process:
        _until_up("http://127.0.0.1:18801/health", bench.scratch / "rllm.log")
        yield Target("rllm-model-gateway", 18801, process.pid)


@contextlib.contextmanager
def _litellm(bench: Bench, python: Path) -> Iterator[Target]:
    config = bench.scratch / "litellm.yaml"
    config.write_text(
        "model_list:\n- model_name: stub\n  litellm_params:\n    model: hosted_vllm/stub\n"
        f"    api_base: http://127.0.0.1:{bench.stub_port}/v1\n    api_key: k\n"
        f"litellm_settings:\n  telemetry: false\ngeneral_settings:\n  master_key: {KEY}\n"
    )
    argv = [
        *("taskset", "-c", str(GATEWAY_CORE), str(python.parent / "litellm"), "--config"),
        *(str(config), "--port", "18802", "--host", "127.0.0.1"),
    ]
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "PYTHONPATH": ""}
    with _process(argv, bench.scratch / "litellm.log", environment) as process:
        _until_up("http://127.0.0.1:18802/health/liveliness", bench.scratch / "litellm.log")
        yield Target("litellm proxy", 18802, process.pid)


def _until_up(url: str, log: Path) -> None:
    ends_s = time.monotonic() + 90
    while time.monotonic() < ends_s:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, trust_env=False).is_success:
                return
        time.sleep(0.3)
    sys.exit(f"{url} did not answer within 90 s: {log.read_text()[-2000:]}")


def _quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def _spread(values: Sequence[float], unit: str = "") -> str:
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    return f"{middle:.2f} [{ordered[0]:.2f} .. {ordered[-1]:.2f}]{unit}"


def _agent(bench: Bench) -> Traffic:
    return traffic(
        bench.tokenizer, num_turns=20, num_opening=13, message_chars=1250, observation_chars=330
    )


def _saturation(bench: Bench, target: Target, made: Traffic) -> tuple[list[float], int]:
    """Return answers a second of each repeat, and errors."""
    rates, errors = [], 0
    seconds = bench.arguments.seconds
    for _ in range(bench.arguments.repeats):
        found = bench.load(
            target,
            made,
            mode="closed",
            clients=16,
            duration_s=seconds,
            sessions=target.sessions(int(seconds * 100)),
        )
        rates.append(found["num_answers"] / found["wall_s"])
        errors += found["num_errors"]
        _complain(target, found)
    return rates, errors


def _open_loop(
    bench: Bench, target: Target, made: Traffic, rate: float = 100
) -> tuple[list[float], list[float], int]:
    """Return p50 and p99 of each repeat [ms], and errors."""
    p50, p99, errors = [], [], 0
    for _ in range(bench.arguments.repeats):
        num_turns = int(rate * bench.arguments.seconds)
        found = bench.load(
            target,
            made,
            mode="open",
            rate=rate,
            num_turns=num_turns,
            at_once=64,
            sessions=target.sessions(num_turns // 20 + 64),
        )
        p50.append(1e3 * _quantile(found["latencies_s"], 0.5))
        p99.append(1e3 * _quantile(found["latencies_s"], 0.99))
        errors += found["num_errors"]
        _complain(target, found)
    return p50, p99, errors


def _complain(target: Target, found: dict[str, Any]) -> None:
    if found["num_errors"]:
        print(f"  {target.name}: {found['num_errors']} errors, such as {found['errors'][0]}")


def _large(bench: Bench, target: Target) -> list[float]:
    """Return processor time of each request after the first [ms], of each repeat."""
    made = traffic(
        bench.tokenizer, num_turns=20, num_opening=299, message_chars=3500, observation_chars=3500
    )
    print(f"  large bodies: {len(made.bodies[0])} to {len(made.bodies[-1])} bytes")
    used = []
    for _ in range(bench.arguments.repeats):
        sessions = target.sessions(1)
        first = bench.load(
            target, _only(made, 0, 1), mode="closed", clients=1, duration_s=60, sessions=sessions
        )
        rest = bench.load(
            target, _only(made, 1, 20), mode="closed", clients=1, duration_s=60, sessions=sessions
        )
        _complain(target, first)
        _complain(target, rest)
        used.append(1e3 * rest["processor_s"] / max(1, rest["num_answers"]))
    return used


def _only(made: Traffic, first: int, last: int) -> Traffic:
    return Traffic(made.bodies[first:last], made.reply, made.reply_ids, made.first)


def _idle_kib(bench: Bench, target: Target) -> float:
    """Return what an idle session of 8,000 tokens adds to the resident memory [KiB]."""
    made = traffic(
        bench.tokenizer, num_turns=20, num_opening=3, message_chars=2000, observation_chars=900
    )
    count = 1 + bench.arguments.idle_sessions
    before = 0
    for number in (64, count):  # the first ones warm the allocator
        before = target.memory_bytes()
        bench.load(
            target,
            made,
            mode="closed",
            clients=16,
            duration_s=600,
            sessions=target.sessions(number),
        )
    return (target.memory_bytes() - before) / count / 1024


def _streaming(bench: Bench, target: Target) -> tuple[dict[str, Any], int]:
    """Return what 1,024 streaming sessions saw, and wrong tokens in their segments."""
    made = traffic(
        bench.tokenizer,
        num_turns=20,
        num_opening=3,
        message_chars=1000,
        observation_chars=330,
        stream=True,
    )
    found = bench.load(
        target,
        made,
        mode="open",
        rate=100,
        num_turns=bench.arguments.streaming_turns * 1024,
        reply=made.reply,
        first=made.first,
        sessions=target.sessions(1024),
    )
    _complain(target, found)
    return found, target.num_wrong(made.reply_ids)


def _rate_rows(bench: Bench, peers: Sequence[Target], ours: Target) -> None:
    made = _agent(bench)
    sizes = [len(body) for body in made.bodies]
    print(
        f"  bodies: {sum(sizes) / len(sizes) / 1000:.1f} KB in the mean, {sizes[0]} to {sizes[-1]} bytes"
    )
    direct = Target("stub", bench.stub_port, os.getpid())
    base50, base99, _ = _open_loop(bench, direct, made)
    rates, errors = _saturation(bench, ours, made)
    p50, p99, open_errors = _open_loop(bench, ours, made)
    added50 = [value - min(base50) for value in p50]
    added99 = [value - min(base99) for value in p99]
    wrong = ours.num_wrong(made.reply_ids)
    has_failed = bool(errors or open_errors or wrong)
    theirs: list[tuple[Target, list[float], list[float], list[float]]] = []
    for peer in peers:
        peer_rates, _ = _saturation(bench, peer, made)
        peer50, peer99, _ = _open_loop(bench, peer, made)
        theirs.append((peer, peer_rates, peer50, peer99))
    for index, (figure, own, bar, holds) in enumerate(
        (
            (
                "chat requests/s, 16 clients, 26 KB bodies",
                rates,
                f">= {LEAST_PER_S}",
                min(rates) >= LEAST_PER_S,
            ),
            (
                "added p50 at 100 requests/s, ms",
                added50,
                f"<= {MOST_P50_MS}",
                max(added50) <= MOST_P50_MS,
            ),
            (
                "added p99 at 100 requests/s, ms",
                added99,
                f"<= {MOST_P99_MS}",
                max(added99) <= MOST_P99_MS,
            ),
        )
    ):
        bench.table.row(figure, _spread(own), bar=bar, holds=holds and not has_failed)
        for peer, *values in theirs:
            base = (0.0, min(base50), min(base99))[index]
            seen = [value - base for value in values[index]]
            middle = sorted(seen)[len(seen) // 2]
            bench.table.row(
                f"  beside {peer.name}",
                _spread(own),
                peer=_spread(seen),
                ratio=sorted(own)[len(own) // 2] / middle if middle else None,
            )
    bench.table.row(
        "tokens in the segments of these sessions that the engine did not sample",
        str(wrong),
        bar="0",
        holds=wrong == 0,
    )


def _parts(bench: Bench, stack: contextlib.ExitStack) -> None:
    arguments = bench.arguments
    ours = stack.enter_context(_ours(bench))
    peers: list[Target] = []
    if "rates" in arguments.parts:
        python = Path(arguments.peers_python)
        if python.exists():
            peers = [
                stack.enter_context(_rllm(bench, python)),
                stack.enter_context(_litellm(bench, python)),
            ]
        else:
            print(f"  no peers: {python} is missing (make gateways)")
        _rate_rows(bench, peers, ours)
    if "large" in arguments.parts:
        used = _large(bench, ours)
        bench.table.row(
            "processor time of a 300-message, 1.1 MB request after the first, ms",
            _spread(used),
            bar=f"<= {MOST_LARGE_MS}",
            holds=max(used) <= MOST_LARGE_MS,
        )
    if "memory" in arguments.parts:
        with _ours(bench) as fresh:
            kib = _idle_kib(bench, fresh)
        bench.table.row(
            "resident memory of an idle session of 8,000 tokens, KiB",
            f"{kib:.1f}",
            bar=f"<= {MOST_IDLE_KIB}",
            holds=kib <= MOST_IDLE_KIB,
        )
    if "streaming" in arguments.parts:
        with _ours(bench) as fresh:
            found, wrong = _streaming(bench, fresh)
        expected = bench.arguments.streaming_turns * 1024
        lost = expected - found["num_answers"]
        first = 1e3 * _quantile(found["firsts_s"], 0.99)
        bench.table.row(
            "streamed turns of 1,024 sessions with an error, or with text lost or reordered",
            f"{lost} of {expected}",
            bar="0",
            holds=lost == 0,
        )
        bench.table.row(
            "tokens in their segments that the engine did not sample",
            str(wrong),
            bar="0",
            holds=wrong == 0,
        )
        bench.table.row(
            "time to the first token, p99, ms",
            f"{first:.2f}",
            bar=f"<= {MOST_FIRST_MS:.0f}",
            holds=first <= MOST_FIRST_MS,
        )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--peers-python", default=".venv-gateways/bin/python")
    parser.add_argument("--repeats", type=positive, default=3, help="of each timing")
    parser.add_argument("--seconds", type=positive, default=10, help="of each timing")
    parser.add_argument("--idle-sessions", type=positive, default=300, help="of the memory row")
    parser.add_argument("--streaming-turns", type=positive, default=20, help="of each session")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("rates", "large", "memory", "streaming"),
        default=("rates", "large", "memory", "streaming"),
    )
    parser.add_argument("--quick", action="store_true", help="small, to see whether it runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats, arguments.seconds = 1, 2
        arguments.idle_sessions, arguments.streaming_turns = 64, 1
    print(
        f"gateway on core {GATEWAY_CORE}, stub and load on core {LOAD_CORE}; {arguments.repeats} repeat(s): "
        f"median [least .. most]; load average {os.getloadavg()[0]:.1f}"
    )
    tokenizer = Tokenizer.load(arguments.model)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        made = traffic(
            tokenizer, num_turns=1, num_opening=1, message_chars=100, observation_chars=100
        )
        port = stack.enter_context(_stub(Path(scratch), made))
        bench = Bench(arguments, Path(scratch), tokenizer, port)
        _parts(bench, stack)
    return 0 if bench.table.close() else 1


if __name__ == "__main__":
    raise SystemExit(main())
