"""Muon Split beside AdamW: one optimizer over all trained parameters of a model.

Muon replaces the momentum of a matrix by the nearest orthogonal one, so that every direction moves
equally fast; Split does it per attention head and per expert, so that a strong head does not
drown a weak one. Matrices of one shape are orthogonalised together.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longarc.config.model import ModelConfig
from longarc.config.training import OptimizerConfig
from longarc.errors import CheckpointError, ContractError
from longarc.models.threads import set_compute_threads
from longarc.trainer.optim_rules import AdamWRule, MuonRule, parameter_rule

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration; Muon (Jordan et al.), GLM-4.5."""
NUM_ITERATIONS = 5
UPDATE_RMS = 0.2
"""Root mean square of a full-rank update, that of AdamW in practice; Moonlight (arXiv:2502.16982)."""
_CHUNK_ELEMENTS = 1 << 17
"""Matrices are iterated in chunks that stay in the second-level cache; twice as fast as all at once."""


def orthogonalise(matrices: Float[Tensor, "n a b"]) -> Float[Tensor, "n a b"]:
    """Return the nearest (semi-)orthogonal matrices, approximately: singular values in [0.7, 1.2].

    Five steps of ``X <- (a I + b G + c G^2) X`` with ``G = X X^T`` on the wide orientation, in the
    dtype given (fp32 on a CPU).
    """
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalise(matrices.mT).mT
    return _orthogonalise_wide([matrices], map)[0]


def _orthogonalise_wide(
    stacks: Sequence[Tensor], run: Callable[..., Iterable[Tensor]]
) -> list[Tensor]:
    """Orthogonalise stacks of wide matrices; ``run`` is ``map`` or that of a pool, with the same result."""
    chunks = [_scaled_chunks(stack) for stack in stacks]
    done = iter(run(_iterated, chain.from_iterable(chunks)))
    return [torch.cat([next(done) for _ in own]) for own in chunks]


def _scaled_chunks(stack: Tensor) -> tuple[Tensor, ...]:
    scaled = stack / torch.linalg.matrix_norm(stack, keepdim=True).clamp_min(1e-7)
    chunks: tuple[Tensor, ...] = scaled.split(
        max(1, _CHUNK_ELEMENTS // (stack.shape[1] * stack.shape[2]))
    )
    return chunks


def _iterated(chunk: Tensor) -> Tensor:
    a, b, c = NEWTON_SCHULZ
    for _ in range(NUM_ITERATIONS):
        gram = torch.bmm(chunk, chunk.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=1, dim2=2).add_(a)
        chunk = torch.bmm(polynomial, chunk)
    return chunk


class MuonAdamW:
    """Updates the parameters that require gradients when it is built; frozen ones are not in it.

    Frozen means absent: a parameter that is merely without gradient would still decay.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: ModelConfig,
        config: OptimizerConfig,
        *,
        num_threads: int = 1,
    ) -> None:
        """Assign each trained parameter to Muon or AdamW.

        Args:
            model: its ``requires_grad`` flags decide what is trained.
            model_config: gives the head sizes for the split.
            config: rates and momenta.
            num_threads: threads that orthogonalise; the result does not depend on them.

        Raises:
            ContractError: nothing requires a gradient.
        """
        self._config = config
        self._muon: dict[str, tuple[nn.Parameter, MuonRule]] = {}
        self._adamw: dict[str, nn.Parameter] = {}
        groups: dict[AdamWRule, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in sorted(model.named_parameters()):
            if not parameter.requires_grad:
                continue
            rule = parameter_rule(
                name, tuple(parameter.shape), model_config, use_muon=config.use_muon
            )
            if isinstance(rule, MuonRule):
                self._muon[name] = (parameter, rule)
            else:
                self._adamw[name] = parameter
                groups[rule].append(parameter)
        if not self._muon and not self._adamw:
            raise ContractError("no parameter requires a gradient, so there is nothing to train")
        self._momentum = {name: torch.zeros_like(p) for name, (p, _) in self._muon.items()}
        self._adam = self._build_adam(groups)
        self._run: Callable[..., Iterable[Tensor]] = map
        if num_threads > 1:
            self._run = ThreadPoolExecutor(
                num_threads,
                thread_name_prefix="muon",
                initializer=set_compute_threads,  # each computes alone
                initargs=(1,),
            ).map

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Everything this optimizer updates."""
        return [p for p, _ in self._muon.values()] + list(self._adamw.values())

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, lr: float) -> None:
        """Update every parameter from its gradient with the rate ``lr``."""
        if self._adam is not None:
            for group in self._adam.param_groups:
                group["lr"] = lr * group["lr_scale"]
            self._adam.step()
        if self._muon:
            self._muon_step(lr)

    def reset(self) -> None:
        """Forget all moments, as after weights went to the engine (GLM-5, section 4.1.1)."""
        for momentum in self._momentum.values():
            momentum.zero_()
        if self._adam is not None:
            self._adam.state.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Return all moments by flat name; what a bit-exact resume needs."""
        state = {f"momentum.{name}": value for name, value in self._momentum.items()}
        if self._adam is not None:
            for name, parameter in self._adamw.items():
                for key, value in self._adam.state.get(parameter, {}).items():
                    state[f"{key}.{name}"] = value
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the moments of :meth:`state_dict`.

        Raises:
            CheckpointError: the state is of another set of parameters.
        """
        moments: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, value in state.items():
            kind, _, name = key.partition(".")
            moments[name][kind] = value
        self._check_names(moments)
        for name, momentum in self._momentum.items():
            momentum.copy_(moments[name]["momentum"])
        if self._adam is not None:
            self._adam.state.clear()
            for name, parameter in self._adamw.items():
                if name in moments:
                    self._adam.state[parameter] = {k: v.clone() for k, v in moments[name].items()}

    def _build_adam(
        self, groups: Mapping[AdamWRule, list[nn.Parameter]]
    ) -> torch.optim.AdamW | None:
        config = self._config
        if not groups:
            return None
        return torch.optim.AdamW(
            [
                {
                    "params": parameters,
                    "weight_decay": config.weight_decay if rule.is_decayed else 0.0,
                    "lr_scale": config.embedding_lr_scale if rule.is_embedding else 1.0,
                }
                for rule, parameters in groups.items()
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            fused=True,
        )

    def _check_names(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        missing = sorted(set(self._momentum) - set(moments))
        unknown = sorted(set(moments) - set(self._momentum) - set(self._adamw))
        if missing or unknown:
            raise CheckpointError(
                f"optimizer state does not fit this model: missing {missing[:3]}, unknown "
                f"{unknown[:3]}; it was saved for other trained parameters. Resume with the same "
                f"model and stage, or start the stage again from its weights."
            )

    @torch.no_grad()
    def _muon_step(self, lr: float) -> None:
        """Momentum, orthogonalise by shape, decay, add."""
        momentum = list(self._momentum.values())
        parameters: list[Tensor] = [p for p, _ in self._muon.values()]
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        torch._foreach_mul_(momentum, self._config.momentum)
        torch._foreach_add_(momentum, grads)
        nesterov = torch._foreach_add(grads, momentum, alpha=self._config.momentum)

        torch._foreach_mul_(parameters, 1.0 - lr * self._config.weight_decay)
        by_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for (parameter, rule), update in zip(self._muon.values(), nesterov, strict=True):
            for target, source in zip(
                _matrices(parameter, rule), _matrices(update, rule), strict=True
            ):
                if target.shape[1] > target.shape[2]:
                    target, source = target.mT, source.mT
                by_shape[target.shape[1], target.shape[2]].append((target, source))
        stacks = [torch.cat([source for _, source in pairs]) for pairs in by_shape.values()]
        orthogonal = _orthogonalise_wide(stacks, self._run)
        for ((_, long_side), pairs), stacked in zip(by_shape.items(), orthogonal, strict=True):
            scale = UPDATE_RMS * math.sqrt(long_side)
            pieces = torch.split(stacked, [len(source) for _, source in pairs])
            for (target, _), piece in zip(pairs, pieces, strict=True):
                target.add_(piece, alpha=-lr * scale)


def _matrices(tensor: Tensor, rule: MuonRule) -> list[Tensor]:
    """Return views [num_blocks, rows, columns], one for each kind of matrix in a block."""
    blocks = tensor.view(rule.num_blocks, sum(rule.rows), tensor.shape[-1])
    return list(torch.split(blocks, list(rule.rows), dim=1))
