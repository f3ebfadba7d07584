"""One way to the log-probabilities in a process of its own: says for each line it reads how long a step took.

The process starts with hidden states and weight in memory; a step is forward and backward of the summed loss.
"""

import ctypes
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longarc.models.projection import token_logprobs


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor, *, with_entropy: bool) -> Tensor:
    """What one writes without thinking of memory."""
    if not with_entropy:
        return F.cross_entropy(hidden @ weight.mT, targets, reduction="sum")
    table = (hidden @ weight.mT).log_softmax(dim=1)
    with torch.no_grad():
        (table.exp() * table).sum(dim=1)
    return -table.gather(1, targets[:, None]).sum()


def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor, *, with_entropy: bool) -> Tensor:
    """What LongArc does."""
    return -token_logprobs(hidden, weight, targets, with_entropy=with_entropy)[0].sum()


def resident_bytes(field: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` of this process."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["num_threads"])
    ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 16)  # what is freed goes back to the kernel
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(job["tokens"], job["hidden"], generator=generator, requires_grad=True)
    weight = (0.02 * torch.randn(job["vocab"], job["hidden"], generator=generator)).requires_grad_()
    targets = torch.randint(0, job["vocab"], (job["tokens"],), generator=generator)
    loss = plain_loss if job["name"] == "plain" else chunked_loss
    print(json.dumps({"ready": True}), flush=True)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = resident_bytes("VmRSS")
    for _ in sys.stdin:
        hidden.grad = weight.grad = None
        started = time.perf_counter()
        value = loss(hidden, weight, targets, with_entropy=job["with_entropy"])
        value.backward()
        elapsed_s = time.perf_counter() - started
        answer = {
            "time_s": elapsed_s,
            "peak_bytes": resident_bytes("VmHWM") - before - hidden.nbytes - weight.nbytes,
            "loss": value.item(),
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
