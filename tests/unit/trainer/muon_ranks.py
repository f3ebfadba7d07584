"""What the ranks of test_owned_muon.py do, each in a process with one thread."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from trainer_fixtures import TINY, TINY_LLAMA, tiny_model

from longarc.config.model import GlmMoeDsaConfig
from longarc.config.training import OptimizerConfig
from longarc.errors import ContractError
from longarc.models.build import build_model
from longarc.trainer import owned_muon
from longarc.trainer.child import SPAWN, enter_child
from longarc.trainer.optim import MuonAdamW
from longarc.trainer.optim_rules import MuonRule
from longarc.trainer.owned_muon import OwnedMuon

NANO = GlmMoeDsaConfig()
CONFIG = OptimizerConfig(lr=0.05, weight_decay=0.1)
NUM_STEPS = 4
TIMEOUT_S = 120


def gradients_of(step, model):
    """Whole gradients, the same on every rank; one matrix has none in one step."""
    generator = torch.Generator().manual_seed(step)
    drawn = {
        name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()
    }
    if step == 1:
        drawn["model.layers.0.self_attn.o_proj.weight"] = None
    return drawn


def train(model, optimizer, steps):
    """Take steps from gradients that do not depend on the weights."""
    for step in steps:
        for name, grad in gradients_of(step, model).items():
            parameter = model.get_parameter(name)
            if grad is not None and isinstance(parameter, DTensor):
                grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
            parameter.grad = grad
        optimizer.step(0.05 / (1 + step))


def whole_weights(model):
    """Return all weights, gathered."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def shard(model, mesh, placements_of):
    """Turn every parameter into a DTensor."""
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = placements_of(f"{module_name}.{name}", parameter)
            placed = distribute_tensor(parameter.detach(), mesh, placements)
            module.register_parameter(name, nn.Parameter(placed))
    return model


def run_ranks(root, *, sizes, state):
    """Run groups of these sizes, ascending, one after another in the same processes.

    Each group goes on from the state that the one before leaves; whoever hangs is killed, and that is an error.

    Args:
        root: receives a directory for each size.
        sizes: ranks of each group.
        state: file that the first group goes on from.
    """
    for size in sizes:
        (Path(root) / str(size)).mkdir()
    processes = [
        SPAWN.Process(target=_process, args=(rank, str(root), sizes, state, os.getpid()))
        for rank in range(max(sizes))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def _process(rank, root, sizes, state, parent_pid):
    enter_child(parent_pid, num_threads=1)
    for size in sizes:
        directory = f"{root}/{size}"
        if rank < size:
            # Rank 0 comes from the group before, so nobody reads a state that is not written yet.
            meeting = f"file://{directory}/meet"
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
            _rank(rank, size, directory, state)
            dist.destroy_process_group()
        state = f"{directory}/state.safetensors"


def _rank(rank, num_ranks, directory, state_file):
    results = {
        "whole": _whole(),
        "in_small_buckets": _in_small_buckets(),
        "sharded": _sharded(num_ranks),
        "mixed": _mixed(num_ranks),
        "resumed": _resumed(state_file),
        "fsdp": _fsdp(rank, num_ranks),
        "refused": _refused(rank),
        "nano_momentum_bytes": _nano_momentum_bytes(),
    }
    state = results["whole"].pop("state")
    if rank == 0:
        save_file(state, f"{directory}/state.safetensors")
    torch.save(results, f"{directory}/{rank}.pt")


def _optimizer(model, config=TINY):
    return MuonAdamW(model, config, CONFIG, process_group=dist.group.WORLD)


def _whole():
    model = tiny_model()
    optimizer = _optimizer(model)
    train(model, optimizer, range(2))
    state = {name: value.clone() for name, value in optimizer.state_dict().items()}
    train(model, optimizer, range(2, NUM_STEPS))
    return {
        "weights": whole_weights(model),
        "state": state,
    }


def _in_small_buckets():
    before, owned_muon.BUCKET_ELEMENTS = owned_muon.BUCKET_ELEMENTS, 2000
    try:
        model = tiny_model()
        optimizer = _optimizer(model)
        num_buckets = len(optimizer._muon._buckets)
        train(model, optimizer, range(NUM_STEPS))
    finally:
        owned_muon.BUCKET_ELEMENTS = before
    return {"weights": whole_weights(model), "num_buckets": num_buckets}


def _sharded(num_ranks):
    """Rows over all ranks: whole experts stay together, some heads do not."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    model = shard(tiny_model(), mesh, lambda name, p: [Shard(0)])
    optimizer = _optimizer(model)
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    resumed = shard(tiny_model(), mesh, lambda name, p: [Shard(0)])
    with torch.no_grad():
        for name, parameter in resumed.named_parameters():
            parameter.to_local().copy_(model.get_parameter(name).to_local())
    states = [state]
    dist.broadcast_object_list(states)  # as if each rank had read the first one's file
    optimizer = _optimizer(resumed)
    optimizer.load_state_dict(states[0])
    train(resumed, optimizer, range(2, NUM_STEPS))
    return {
        "weights": whole_weights(resumed),
        "num_keys": len(state),
    }


def _mixed(num_ranks):
    """Two mesh axes: copies beside shards, and shards of rows and columns."""
    mesh = init_device_mesh("cpu", (2, num_ranks // 2))

    def placements(name, parameter):
        if "o_proj" in name or name.endswith("experts.down_proj"):
            return [Shard(0), Shard(parameter.ndim - 1)]
        if "kv_b_proj" in name:
            return [Replicate(), Replicate()]
        return [Replicate(), Shard(0)]

    model = shard(tiny_model(), mesh, placements)
    train(model, _optimizer(model), range(NUM_STEPS))
    return {"weights": whole_weights(model)}


def _resumed(state_file):
    """Continue after two steps from a state of another number of ranks."""
    model = tiny_model()
    train(model, MuonAdamW(model, TINY, CONFIG), range(2))
    optimizer = _optimizer(model)
    optimizer.load_state_dict(load_file(state_file))
    optimizer.reset()
    forgotten = not any(value.any() for value in optimizer.state_dict().values())
    optimizer.load_state_dict(load_file(state_file))
    train(model, optimizer, range(2, NUM_STEPS))
    return {"weights": whole_weights(model), "forgotten": forgotten}


def two_layers():
    """A model that FSDP2 can run: what is tested is the optimizer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20, bias=False), nn.ReLU(), nn.Linear(20, 7))


def inputs_of(step):
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(step))


def _fsdp(rank, num_ranks):
    model = two_layers()
    fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
    optimizer = _optimizer(model, TINY_LLAMA)
    for step in range(3):
        own = inputs_of(step).chunk(num_ranks)[rank]
        model(own).square().mean().backward()  # FSDP2 averages over the ranks
        optimizer.step(0.05)
        optimizer.zero_grad()
    return {"weights": whole_weights(model)}


def _nano_momentum_bytes():
    optimizer = _optimizer(build_model(NANO, seed=0), NANO)
    return sum(stack.nbytes for bucket in optimizer._muon._buckets for stack in bucket.momenta)


def _refused(rank):
    """Return what is said where the ranks do not train the same, and where one is left out."""
    model = tiny_model()
    if rank == 1:
        model.get_parameter("model.layers.0.self_attn.o_proj.weight").requires_grad_(False)
    messages = []
    try:
        _optimizer(model)
    except ContractError as error:
        messages.append(str(error))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = shard(tiny_model(), mesh, lambda name, p: [Shard(0)])
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][rank]
    for process_group in (None, alone):
        try:
            MuonAdamW(sharded, TINY, CONFIG, process_group=process_group)
        except ContractError as error:
            messages.append(str(error))
    for dtype, rows in ((torch.bfloat16, (4,)), (torch.float32, (2, 2))):
        odd = rank == 1
        weight = nn.Parameter(torch.zeros(4, 4, dtype=dtype if odd else torch.float32))
        rule = MuonRule(num_blocks=1, rows=rows if odd else (4,))
        try:
            OwnedMuon(
                {"w": (weight, rule)},
                momentum=0.9,
                weight_decay=0.0,
                process_group=dist.group.WORLD,
            )
        except ContractError as error:
            messages.append(str(error))
    return messages
