"""Muon Split beside AdamW: one optimizer over all trained parameters of a model.

With a process group, several ranks share the work: each matrix has one owner (owned_muon.py).
"""

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from longarc.config.model import ModelConfig
from longarc.config.training import OptimizerConfig
from longarc.errors import CheckpointError, ContractError
from longarc.models.threads import set_compute_threads
from longarc.trainer.muon import Muon, MuonPart, Run
from longarc.trainer.optim_rules import AdamWRule, MuonRule, parameter_rule

_AdamGroup: TypeAlias = tuple[AdamWRule, DeviceMesh | None]
"""What is updated in one call: parameters of one rule on one mesh."""


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
        process_group: ProcessGroup | None = None,
    ) -> None:
        """Assign each trained parameter to Muon or AdamW.

        Args:
            model: its ``requires_grad`` flags decide what is trained. Parameters are whole, or
                DTensors (as FSDP2 makes them) over the ranks of ``process_group``.
            model_config: gives the head sizes for the split.
            config: rates and momenta.
            num_threads: threads that orthogonalise; the result does not depend on them.
            process_group: the ranks that hold this model, whole or in shards. Their gradients must be
                summed over the ranks already. Momentum and orthogonalisation of each matrix are then
                one rank's. None: this process alone.

        Raises:
            ContractError: nothing requires a gradient; or a parameter is spread over ranks and there
                is no process group, or one that does not hold all of it.
        """
        self._config = config
        self._process_group = process_group
        self._matrices: dict[str, tuple[nn.Parameter, MuonRule]] = {}
        self._adamw: dict[str, nn.Parameter] = {}
        groups: dict[_AdamGroup, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in sorted(model.named_parameters()):
            if not parameter.requires_grad:
                continue
            rule = parameter_rule(
                name, tuple(parameter.shape), model_config, use_muon=config.use_muon
            )
            mesh = _mesh(parameter)
            if mesh is not None and process_group is None:
                raise ContractError(
                    f"parameter {name} is spread over ranks, and the optimizer was given no process "
                    f"group; give it the group of all ranks that hold the model"
                )
            if isinstance(rule, MuonRule):
                self._matrices[name] = (parameter, rule)
            else:
                self._adamw[name] = parameter
                groups[rule, mesh].append(parameter)
        if not self._matrices and not self._adamw:
            raise ContractError("no parameter requires a gradient, so there is nothing to train")
        self._adam = self._build_adam(groups)
        self._muon = self._build_muon(num_threads)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Everything this optimizer updates."""
        return [p for p, _ in self._matrices.values()] + list(self._adamw.values())

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
        if self._matrices:
            self._muon.step(lr)

    def reset(self) -> None:
        """Forget all moments, as after weights went to the engine (GLM-5, section 4.1.1)."""
        self._muon.reset()
        if self._adam is not None:
            self._adam.state.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Return all moments by flat name; what a bit-exact resume needs.

        With a process group, all ranks must call this together; its first rank gets everything,
        in the form that any number of ranks can load, and the others nothing.
        """
        state = {f"momentum.{name}": value for name, value in self._muon.momenta().items()}
        if self._adam is not None:
            for name, parameter in self._adamw.items():
                for key, value in self._adam.state.get(parameter, {}).items():
                    state[f"{key}.{name}"] = _whole(value)
        is_first = self._process_group is None or self._process_group.rank() == 0
        return state if is_first else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the moments of :meth:`state_dict`; with a process group, each rank gets all of them.

        Raises:
            CheckpointError: the state is of another set of parameters.
        """
        moments: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, value in state.items():
            kind, _, name = key.partition(".")
            moments[name][kind] = value
        self._check_names(moments)
        self._muon.load_momenta({name: moments[name]["momentum"] for name in self._matrices})
        if self._adam is not None:
            self._adam.state.clear()
            for name, parameter in self._adamw.items():
                if name in moments:
                    self._adam.state[parameter] = {
                        kind: _placed_like(parameter, value)
                        for kind, value in moments[name].items()
                    }

    def _build_muon(self, num_threads: int) -> MuonPart:
        run: Run = map
        if num_threads > 1:
            run = ThreadPoolExecutor(
                num_threads,
                thread_name_prefix="muon",
                initializer=set_compute_threads,  # each computes alone
                initargs=(1,),
            ).map
        config = self._config
        if self._process_group is None:
            return Muon(
                self._matrices,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                dtype=config.muon_dtype,
                run=run,
            )
        # Here, because DTensor takes a second to import, and most trainers have no other rank.
        from longarc.trainer.owned_muon import OwnedMuon

        return OwnedMuon(
            self._matrices,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            dtype=config.muon_dtype,
            process_group=self._process_group,
            run=run,
        )

    def _build_adam(
        self, groups: Mapping["_AdamGroup", list[nn.Parameter]]
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
                for (rule, _), parameters in groups.items()
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            fused=True,
        )

    def _check_names(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        has_momentum = {name for name, kinds in moments.items() if "momentum" in kinds}
        missing = sorted(set(self._matrices) - has_momentum)
        unknown = sorted(set(moments) - set(self._matrices) - set(self._adamw))
        unknown += sorted(has_momentum & set(self._adamw))
        if missing or unknown:
            raise CheckpointError(
                f"optimizer state does not fit this model: Muon's momentum is missing for "
                f"{missing[:3]}, and there are moments of no use for {unknown[:3]}; it was saved for "
                f"other trained parameters or with another use_muon. Resume with the same model, stage "
                f"and use_muon, or start the stage again from its weights."
            )


def _mesh(tensor: Tensor) -> DeviceMesh | None:
    """Return the ranks that a DTensor is spread over, without importing DTensor; else None."""
    mesh: DeviceMesh | None = getattr(tensor, "device_mesh", None)
    return mesh


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _placed_like(parameter: nn.Parameter, moment: Tensor) -> Tensor:
    """Copy the part of a whole moment that this rank holds of the parameter; a count is kept whole."""
    mesh = _mesh(parameter)
    if mesh is None or moment.shape != parameter.shape:
        return moment.clone()
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    # No rank is the source: each has the whole, and takes its part without asking.
    return distribute_tensor(moment.clone(), mesh, parameter.placements, src_data_rank=None)
