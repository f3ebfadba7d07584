"""One model over one long sequence in a process of its own: time, peak memory, and the indexer's part of the time.

Says for each line it reads how long a pass took. The process has run a short sequence before; the peak is what the
resident memory rises above that.
"""

import ctypes
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longarc.config.model import GlmMoeDsaConfig
from longarc.models.build import build_model
from longarc.models.hf_config import config_to_hf
from longarc.models.indexer import Indexer
from longarc.models.layout import Layout

SHORT_TOKENS = 512
COMPARED_TOKENS = 256
"""Tokens that see at most index_topk keys: nothing is selected for them, so both sides compute the same."""


class Stopwatch:
    """Adds up the time spent in wrapped functions."""

    total_s = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            result = function(*args, **kwargs)
            self.total_s += time.process_time() - started
            return result

        return timed


def our_model(
    config: GlmMoeDsaConfig, watch: Stopwatch
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return LongArc's model, its indexer frozen, and what computes hidden states."""
    model = build_model(config, seed=0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." not in name)
    for name in ("project", "select"):
        setattr(Indexer, name, watch.wrap(getattr(Indexer, name)))
    return model, lambda ids: model(ids, Layout.documents([len(ids)])).hidden


def their_model(
    config: GlmMoeDsaConfig, *, is_sparse: bool
) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return transformers' model: the same weights with its sparse attention, or MLA of that size with SDPA."""
    import transformers

    values = config_to_hf(config, dtype="float32")
    if is_sparse:
        model = transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**values))
        model.load_state_dict(build_model(config, seed=0).state_dict())
    else:
        model = transformers.Glm4MoeLiteForCausalLM(transformers.Glm4MoeLiteConfig(**values))
    for module in model.modules():  # it always takes 1e-6 here
        if type(module).__name__.endswith("RMSNorm"):
            module.variance_epsilon = config.rms_norm_eps
    return model, lambda ids: model.model(ids[None], use_cache=False).last_hidden_state[0]


def resident_bytes(field: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` of this process."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["num_threads"])
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(-3, 1 << 16)  # what is freed goes back to the kernel
    watch = Stopwatch()
    config = GlmMoeDsaConfig(**job["config"])
    model, hidden_of = (
        our_model(config, watch)
        if job["name"] == "ours"
        else their_model(config, is_sparse=job["name"] == "transformers")
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (job["tokens"],), generator=generator)

    def run(tokens: Tensor) -> Tensor:
        with torch.set_grad_enabled(job["trains"]):
            hidden = hidden_of(tokens)
        if job["trains"]:
            hidden.square().mean().backward()
            model.zero_grad(set_to_none=False)
        return hidden.detach()

    run(ids[:SHORT_TOKENS])
    libc.malloc_trim(0)
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        watch.total_s = 0.0
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before = resident_bytes("VmRSS")
        started = time.process_time()
        hidden = run(ids)
        answer = {
            "time_s": time.process_time() - started,
            "peak_bytes": resident_bytes("VmHWM") - before,
            "indexer_s": watch.total_s,
            "norm": hidden[:COMPARED_TOKENS].double().norm().item(),
        }
        del hidden
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
