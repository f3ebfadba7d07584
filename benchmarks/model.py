"""How fast the parts of a model's training are, each beside what PyTorch or a plain loop offers; one thread.

* Muon Split: an optimizer step over all matrices of ``longarc-nano``, each attention head and each expert
  by itself, against ``torch.optim.Muon`` with every one of these matrices as a parameter. Both get the same
  gradients, and the script ends with an error where they move a matrix differently by more than the
  bf16 explains in which ``torch.optim.Muon`` iterates. A second row has the same loop in fp32.
* IndexShare: what one indexer for the four layers of ``longarc-nano`` saves (model_sharing.py).
* Sparse attention at length (model_sparse.py) and the projection with GLM-5's vocabulary (model_projection.py).

The sides of a Muon row take turns, and the best of the repeats counts. Usage:
python benchmarks/model.py [--only muon sparse projection] [--repeats 15] [--quick]
"""

import argparse
import os
import sys
import time
from collections.abc import Callable

import torch
from common import Table, positive
from model_projection import projection_rows
from model_sharing import sharing_rows
from model_sparse import sparse_rows
from torch import Tensor, nn

from longarc.config.model import GlmMoeDsaConfig
from longarc.config.training import MuonDtype, OptimizerConfig
from longarc.models.build import build_model
from longarc.trainer.muon import orthogonalise, update_scale
from longarc.trainer.optim import MuonAdamW
from longarc.trainer.optim_rules import MuonRule, parameter_rule

PARTS = ("muon", "sparse", "projection")
MUON_BAR = 3.0
BF16_DIFFERENCE = 0.05
"""Largest part of its way by which bf16 may lead a matrix astray; 0.02 was found."""


def best_s(repeats: int, *measures: Callable[[], float]) -> list[float]:
    """Run the measures in turns and return the shortest time of each [s]."""
    times = [[measure() for measure in measures] for _ in range(repeats)]
    return [min(column) for column in zip(*times, strict=True)]


class MuonSides:
    """The matrices of one model, three times: in its parameters, and twice as parameters of their own."""

    def __init__(self, dtype: MuonDtype) -> None:
        """Build them; ``dtype`` is what our iteration computes in."""
        config, optimizer = GlmMoeDsaConfig(), OptimizerConfig(muon_dtype=dtype)
        self._is_half = dtype == "bfloat16"
        model = build_model(config, seed=0)
        self._optimizer = optimizer
        self._generator = torch.Generator().manual_seed(0)
        self._split: list[tuple[nn.Parameter, MuonRule]] = []
        for name, parameter in model.named_parameters():
            rule = parameter_rule(name, tuple(parameter.shape), config, use_muon=True)
            parameter.requires_grad_(isinstance(rule, MuonRule))
            if isinstance(rule, MuonRule):
                self._split.append((parameter, rule))
        self._ours = MuonAdamW(model, config, optimizer)
        self.own = [matrix for p, rule in self._split for matrix in matrices(p, rule)]
        self.single = [nn.Parameter(matrix.clone()) for matrix in self.own]
        self.looped = [matrix.clone() for matrix in self.own]
        self._momenta = [torch.zeros_like(matrix) for matrix in self.own]
        self._theirs = torch.optim.Muon(
            self.single,
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            momentum=optimizer.momentum,
            adjust_lr_fn="match_rms_adamw",
        )

    def draw_gradients(self) -> None:
        """Give all sides the same new gradients."""
        for parameter, _ in self._split:
            parameter.grad = torch.randn(parameter.shape, generator=self._generator)
        self.grads = [
            matrix
            for parameter, rule in self._split
            for matrix in matrices(parameter.grad, rule)  # type: ignore[arg-type]
        ]
        for matrix, grad in zip(self.single, self.grads, strict=True):
            matrix.grad = grad.clone()

    def split_s(self) -> float:
        self.draw_gradients()  # for the other two as well, whose turn comes after this one
        started = time.perf_counter()
        self._ours.step(self._optimizer.lr)
        return time.perf_counter() - started

    def torch_s(self) -> float:
        started = time.perf_counter()
        self._theirs.step()
        return time.perf_counter() - started

    def loop_s(self) -> float:
        """Do in fp32, matrix by matrix, what the other sides do."""
        lr, decay, mu = (
            self._optimizer.lr,
            self._optimizer.weight_decay,
            self._optimizer.momentum,
        )
        started = time.perf_counter()
        for matrix, grad, momentum in zip(self.looped, self.grads, self._momenta, strict=True):
            momentum.mul_(mu).add_(grad)
            update = orthogonalise(grad.add(momentum, alpha=mu)[None])[0]
            matrix.mul_(1 - lr * decay).add_(update, alpha=-lr * update_scale(*matrix.shape))
        return time.perf_counter() - started

    def check(self) -> None:
        """Take one step on each side and compare how the matrices moved."""
        before = [matrix.clone() for matrix in self.own]
        self.split_s(), self.torch_s(), self.loop_s()
        for name, others, limit in (
            ("torch.optim.Muon", self.single, BF16_DIFFERENCE),
            ("the loop in fp32", self.looped, BF16_DIFFERENCE if self._is_half else 1e-3),
        ):
            worst = max(
                ((other.detach() - own).norm() / (own - start).norm()).item()
                for start, own, other in zip(before, self.own, others, strict=True)
            )
            if worst > limit:
                sys.exit(f"{name} moves a matrix differently, by {worst:.2g} of its way")


def matrices(tensor: Tensor, rule: MuonRule) -> list[Tensor]:
    """Return every matrix that is orthogonalised by itself, as a view."""
    blocks = tensor.detach().view(rule.num_blocks, sum(rule.rows), tensor.shape[-1])
    return [matrix for part in blocks.split(list(rule.rows), dim=1) for matrix in part]


def muon_rows(table: Table, repeats: int) -> None:
    """Measure Muon Split in the reference's arithmetic, and in that of torch.optim.Muon, which is always bf16."""
    dtypes: tuple[MuonDtype, ...] = ("auto", "bfloat16")
    for dtype in dtypes:
        sides = MuonSides(dtype)
        sides.check()
        split, by_torch, looped = best_s(repeats, sides.split_s, sides.torch_s, sides.loop_s)
        figure = f"Muon Split over {len(sides.own)} matrices of nano, muon_dtype {dtype} [steps/s]"
        table.row(
            f"{figure}, peer torch.optim.Muon",
            f"{1 / split:.1f}",
            peer=f"{1 / by_torch:.1f}",
            ratio=by_torch / split,
            bar=f"ratio >= {MUON_BAR}",
            holds=by_torch >= MUON_BAR * split,
        )
        table.row(
            f"{figure}, peer the same loop in fp32",
            f"{1 / split:.1f}",
            peer=f"{1 / looped:.1f}",
            ratio=looped / split,
        )


def main() -> None:
    """Print the table and how many bars hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
    parser.add_argument(
        "--repeats", type=positive, default=15, help="turns of each side of Muon; the best counts"
    )
    parser.add_argument("--quick", action="store_true", help="one turn each: does it run at all?")
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    torch.set_num_threads(1)
    print(f"one thread, best of {repeats}, load average {os.getloadavg()[0]:.1f}")
    table = Table()
    if "muon" in options.only:
        muon_rows(table, repeats)
    if "sharing" in options.only:
        sharing_rows(table, best_s, repeats)
    if "sparse" in options.only:
        sparse_rows(table, num_repeats=1 if options.quick else 3, is_quick=options.quick)
    if "projection" in options.only:
        projection_rows(table, num_threads=1, num_repeats=1, is_quick=options.quick)
    table.close()


if __name__ == "__main__":
    main()
