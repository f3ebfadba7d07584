"""Gradients from several processes of one thread each: two cores do nearly twice the work of one.

::

    rank 0 (the trainer's process)           rank 1, 2, ...
      split the documents ---- pipe ---->      own shard -> gradients -> own part of the memory
      own shard -> .grad                       |
      .grad += gradients, by rank <-- sums ----+
      divide, clip, update in place            (sees the new weights: they are in the same memory)

* Small tensors do not fill two threads of one operator, and Python threads share one interpreter lock.
* Same documents, same number of processes: bit-identical gradients, because shards and the order of
  addition depend on nothing else.
* A worker holds no state worth saving, so it is killed and not asked when the pool closes.
"""

import contextlib
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Generic, TypeAlias

import torch
from torch import Tensor, nn

from longarc.errors import ConfigError, ContractError, LongArcError, ResourceError, boundary
from longarc.models.build import build_model
from longarc.models.critic import Critic, build_critic
from longarc.models.decoder_base import Decoder
from longarc.trainer import shared_memory
from longarc.trainer.child import SPAWN, ctrl_c_held, death_of, enter_child, with_origin
from longarc.trainer.gradients import Gradients, M, Objective, S
from longarc.trainer.packing import D, split_documents

KEYS_PER_ROW = {"dense": 260.0, "sparse": 5000.0}
"""Keys of a query that take as long as the rest of a token; measured with longarc-nano, only balances."""


class GradientPool:
    """The processes that compute gradients beside this one; :meth:`open` is a ``GradientSource``."""

    def __init__(self, num_processes: int) -> None:
        """Start nothing yet.

        Args:
            num_processes: this process included; 1 computes everything here.
        """
        self._num_workers = num_processes - 1
        self._workers: list[_Worker] = []
        self._num_opened = 0

    def start(self) -> None:
        """Start the workers unless they run; they load their libraries while this process goes on."""
        while len(self._workers) < self._num_workers:
            self._workers.append(_Worker(rank=len(self._workers) + 1))

    def open(
        self, model: M, objective: Objective[M, D, S], *, beside: bool = False
    ) -> Gradients[D, S]:
        """Move the model's tensors to shared memory and let every worker build the same model on it.

        Args:
            model: whose weights the workers then read.
            objective: what is learned.
            beside: keep what was opened before; without, the workers forget it and its memory goes.

        Raises:
            ResourceError: a worker died, or there is no memory.
            ConfigError: the objective cannot be sent to a process.
        """
        objective.select_parameters(model)
        self.start()
        self._num_opened += 1
        return _ParallelGradients(
            model, objective, self._workers, number=self._num_opened, beside=beside
        )

    def close(self) -> None:
        """End the workers; :meth:`start` can start others."""
        for worker in self._workers:
            worker.kill()
        self._workers = []


class _ParallelGradients(Generic[M, D, S]):
    """Adds the gradients of all shards to the ``.grad`` of one model."""

    def __init__(
        self,
        model: M,
        objective: Objective[M, D, S],
        workers: Sequence["_Worker"],
        *,
        number: int,
        beside: bool,
    ) -> None:
        self._model = model
        self._objective = objective
        self._workers = workers
        self._number = number
        self._trained = _trained(model)
        task = _Task(build=_same_model(model), objective=objective)
        opening = _Opening(number=number, beside=beside, task=task.pickled() if workers else b"")
        with boundary(ResourceError, "cannot get shared memory for the gradient processes"):
            descriptor = shared_memory.new_file(_memory_bytes(model, num_workers=len(workers)))
        try:
            memory = shared_memory.map_file(descriptor)
            _move_weights(model, memory, is_source=True)
            for worker in workers:
                worker.ask(opening, descriptor)
        finally:
            os.close(descriptor)
        self._places = [_gradient_places(model, memory, rank=worker.rank) for worker in workers]
        _raise_first([worker.answer("opening a model") for worker in workers])

    def __call__(self, documents: Sequence[D], step: int) -> S:
        own, *others = split_documents(
            documents,
            num_shards=1 + len(self._workers),
            micro_batch_tokens=self._objective.micro_batch_tokens,
            keys_per_row=KEYS_PER_ROW[self._objective.attention],
        )
        for worker, shard in zip(self._workers, others, strict=True):
            worker.ask(_Shard(number=self._number, documents=shard, step=step))
        try:
            sums = self._objective.add_gradients(self._model, own, step)
        finally:  # an answer that nobody reads would be taken for that of the next step
            answers = [worker.answer(f"step {step}") for worker in self._workers]
        for computed, places in zip(_raise_first(answers), self._places, strict=True):
            self._add(computed.has_gradient, places)
            sums.add(computed.sums)
        return sums

    def _add(self, has_gradient: Sequence[bool], places: Sequence[Tensor]) -> None:
        for parameter, is_there, place in zip(self._trained, has_gradient, places, strict=True):
            if not is_there:
                continue
            if parameter.grad is None:
                parameter.grad = place.clone()
            else:
                parameter.grad.add_(place)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What a worker computes gradients of."""

    build: Callable[[], nn.Module]
    """Makes the same model, with any weights."""
    objective: Objective[Any, Any, Any]

    def pickled(self) -> bytes:
        """Pickle once for all workers, and before any of them is asked.

        Raises:
            ConfigError: the objective has parts that cannot be pickled.
        """
        # Not multiprocessing's pickler: it would give every tensor of a teacher a file descriptor.
        with boundary(ConfigError, f"cannot send the objective to a gradient process ({_HINT})"):
            return pickle.dumps(self)

    @classmethod
    def unpickled(cls, pickled: bytes) -> "_Task":
        with boundary(ConfigError, f"a gradient process cannot load the objective ({_HINT})"):
            task: _Task = pickle.loads(pickled)
        return task


_HINT = "a loss has to stand in a module under its own name, or else set threads = 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opening:
    """Asks a worker to build a model on the memory whose file descriptor follows."""

    number: int
    """What later requests call it."""
    beside: bool
    """Whether the worker keeps the models it has."""
    task: bytes
    """Pickled apart: a worker that cannot load it still takes the descriptor, and answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """Asks a worker for the gradients of its documents."""

    number: int
    """Of the opening."""
    documents: Sequence[Any]
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Computed:
    """A worker's answer; the gradients are in the memory."""

    sums: Any
    """What the objective summed; None after an opening."""
    has_gradient: Sequence[bool]
    """Which of the trained parameters the shard reached."""


_Answer: TypeAlias = _Computed | LongArcError


class _Worker:
    """One process, as the parent sees it."""

    def __init__(self, rank: int) -> None:
        """Start it. It dies with the *thread* that calls this, which is what the kernel watches."""
        self.rank = rank
        self._connection, child_end = SPAWN.Pipe()
        self._process = SPAWN.Process(
            target=_serve,
            args=(child_end, rank, os.getpid()),
            name=f"longarc-gradients-{rank}",
            daemon=True,
        )
        with ctrl_c_held():
            self._process.start()
        # Only the child may hold its end, or its death would not end the pipe.
        child_end.close()

    def ask(self, request: _Opening | _Shard, descriptor: int | None = None) -> None:
        """Send a request, with a file descriptor behind it; a dead worker is found by `answer`."""
        with contextlib.suppress(OSError):
            self._connection.send(request)
            if descriptor is not None:
                send_handle(self._connection, descriptor, self._process.pid)

    def answer(self, during: str) -> _Answer:
        """Wait for the answer to the oldest request.

        Raises:
            ResourceError: the worker died.
        """
        try:
            answer: _Answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            raise death_of(self._process, "a gradient process", during=during) from error
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _raise_first(answers: Sequence[_Answer]) -> list[_Computed]:
    computed = []
    for answer in answers:
        if isinstance(answer, LongArcError):
            raise answer
        computed.append(answer)
    return computed


def _same_model(model: Decoder | Critic) -> Callable[[], nn.Module]:
    """Return what builds a model of these shapes in another process."""
    if isinstance(model, Critic):
        return partial(build_critic, model.config, dtype=model.dtype)
    return partial(build_model, model.config, seed=0, dtype=model.output_weight.dtype)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _memory_bytes(model: nn.Module, *, num_workers: int) -> int:
    weights = shared_memory.num_bytes([*model.parameters(), *model.buffers()])
    return weights + num_workers * shared_memory.num_bytes(_trained(model))


def _move_weights(model: nn.Module, memory: Tensor, *, is_source: bool) -> None:
    """Let parameters and buffers live at the beginning of the memory.

    Args:
        model: keeps its parameter objects.
        memory: bytes.
        is_source: whether the model's values are copied there, or those there are the model's.
    """
    tensors = [*model.parameters(), *model.buffers()]
    with torch.no_grad():
        for tensor, place in zip(tensors, shared_memory.views(memory, tensors), strict=True):
            if is_source:
                place.copy_(tensor)
            tensor.data = place


def _gradient_places(model: nn.Module, memory: Tensor, *, rank: int) -> list[Tensor]:
    """Return where a worker writes the gradients of the trained parameters."""
    trained = _trained(model)
    start = _memory_bytes(model, num_workers=rank - 1)
    return shared_memory.views(memory[start:], trained)


def _serve(connection: Connection, rank: int, parent_pid: int) -> None:
    """Run in the worker: answer requests until the parent is gone."""
    enter_child(parent_pid, num_threads=1)
    replicas: dict[int, _Replica] = {}
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            request: _Opening | _Shard = connection.recv()
            answer: _Answer
            try:
                with boundary(ContractError, f"gradient process {rank} failed"):
                    if isinstance(request, _Opening):
                        if not request.beside:
                            replicas.clear()  # their memory goes before there is more
                        descriptor = recv_handle(connection)
                        replicas[request.number] = _Replica(request.task, descriptor, rank=rank)
                        del request  # a copy of all teachers
                        answer = _Computed(sums=None, has_gradient=())
                    else:
                        replica = replicas.get(request.number)
                        if replica is None:
                            raise ContractError(
                                f"model {request.number} was forgotten when another one was opened; open "
                                f"models that are trained together beside each other"
                            )
                        answer = replica.compute(request)
            except LongArcError as error:
                answer = with_origin(error, f"gradient process {rank}")
            connection.send(answer)


class _Replica:
    """The model in a worker: weights that are read, gradients that are written."""

    def __init__(self, pickled: bytes, descriptor: int, *, rank: int) -> None:
        try:
            task = _Task.unpickled(pickled)
            memory = shared_memory.map_file(descriptor)
        finally:
            os.close(descriptor)
        self._objective = task.objective
        self._model = task.build()
        self._objective.select_parameters(self._model)
        _move_weights(self._model, memory, is_source=False)
        self._trained = _trained(self._model)
        self._places = _gradient_places(self._model, memory, rank=rank)

    def compute(self, shard: _Shard) -> _Computed:
        """Write the gradients of the shard to this worker's place."""
        for parameter in self._trained:
            parameter.grad = None
        sums = self._objective.add_gradients(self._model, shard.documents, shard.step)
        for parameter, place in zip(self._trained, self._places, strict=True):
            if parameter.grad is not None:
                place.copy_(parameter.grad)
        return _Computed(sums=sums, has_gradient=[p.grad is not None for p in self._trained])
