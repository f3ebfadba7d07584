"""Three ways from a published weight file into SGLang; as its documentation has them, never run against it.

::

    disk          file --------------------------------------> the server reads it (a directory names it)
    tensor        file -> GPU of this process --handles------> the server copies (same GPU)
    distributed   file -> GPU of this process --broadcast----> each of the server's ranks (process group)
"""

import asyncio
import base64
import contextlib
import io
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing  # noqa: F401 - teaches ForkingPickler how tensors are shared
from safetensors.torch import load_file
from torch import Tensor

from longarc.config.engine_clients import SglangConfig
from longarc.engine.http_json import HttpJson
from longarc.engine.sglang import WeightTransport
from longarc.errors import EngineError, boundary

GROUP = "longarc_weights"
"""Name of the process group of a broadcast."""


@contextlib.contextmanager
def transport_of(
    config: SglangConfig, http: HttpJson, model_directory: Path
) -> Iterator[WeightTransport]:
    """Make the transport that a recipe asks for."""
    if config.update_from == "tensor":
        yield TensorTransport(http, device=config.device, num_ranks=config.num_ranks)
    elif config.update_from == "distributed":
        assert config.group_address is not None
        transport = BroadcastTransport(
            http,
            device=config.device,
            num_ranks=config.num_ranks,
            address=config.group_address,
            backend="nccl",
        )
        try:
            yield transport
        finally:
            transport.close()
    else:
        with tempfile.TemporaryDirectory(prefix="longarc-sglang-") as directory:
            yield DiskTransport(http, model_directory=model_directory, directory=Path(directory))


class DiskTransport:
    """The server reads the published file itself."""

    def __init__(self, http: HttpJson, *, model_directory: Path, directory: Path) -> None:
        """Name files in ``directory``, beside copies of what ``model_directory`` says of the model."""
        self._http, self._model, self._directory = http, model_directory, directory

    async def send(self, path: str, *, policy_version: int, flush_cache: bool) -> Any:
        """Let the server read the file through a directory that looks like a checkpoint of Hugging Face."""
        place = self._directory / f"v{policy_version}"
        await asyncio.to_thread(self._prepare, place, path)
        try:
            return await self._http.post(
                "/update_weights_from_disk",
                {
                    "model_path": str(place),
                    "weight_version": str(policy_version),
                    "flush_cache": flush_cache,
                    "abort_all_requests": False,
                },
            )
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _prepare(self, place: Path, path: str) -> None:
        with boundary(EngineError, f"making {place}"):
            place.mkdir(exist_ok=True)
            for described in self._model.glob("*.json"):
                if not described.name.endswith(".index.json"):
                    shutil.copy(described, place)
            (place / "model.safetensors").symlink_to(Path(path).resolve())


class TensorTransport:
    """The server opens handles of tensors that this process holds on the same GPU."""

    def __init__(self, http: HttpJson, *, device: str, num_ranks: int) -> None:
        self._http, self._device, self._num_ranks = http, device, num_ranks

    async def send(self, path: str, *, policy_version: int, flush_cache: bool) -> Any:
        """Share the tensors until the server has answered; each rank takes its own part of them."""
        tensors = await asyncio.to_thread(_read, path, self._device)
        with boundary(EngineError, "sharing weights with SGLang"):
            # A handle is opened once, so each rank gets its own.
            payloads = [_pickled(list(tensors.items())) for _ in range(self._num_ranks)]
        return await self._http.post(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": payloads,
                "weight_version": str(policy_version),
                "flush_cache": flush_cache,
                "abort_all_requests": False,
            },
        )


class BroadcastTransport:
    """The server's ranks receive each tensor over a process group in which this process is rank 0."""

    def __init__(
        self, http: HttpJson, *, device: str, num_ranks: int, address: str, backend: str
    ) -> None:
        """Broadcast from ``device`` to ``num_ranks`` ranks, which meet at ``address`` (``host:port``)."""
        self._http = http
        self._device = device
        self._num_ranks = num_ranks
        self._address = address
        self._backend = backend
        self._group: Any = None

    async def send(self, path: str, *, policy_version: int, flush_cache: bool) -> Any:
        """Announce the tensors and broadcast them, in the order of their names."""
        tensors = await asyncio.to_thread(_read, path, self._device)
        if self._group is None:
            await self._meet()
        body = {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": GROUP,
            "weight_version": str(policy_version),
            "flush_cache": flush_cache,
            "abort_all_requests": False,
        }
        # The server answers when it has received all, so both have to go on at the same time.
        return await _both(
            self._http.post("/update_weights_from_distributed", body),
            asyncio.to_thread(self._broadcast, list(tensors.values())),
        )

    def close(self) -> None:
        """Leave the process group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    async def _meet(self) -> None:
        host, _, port = self._address.rpartition(":")
        body = {
            "master_address": host,
            "master_port": int(port),
            "rank_offset": 1,
            "world_size": self._num_ranks + 1,
            "group_name": GROUP,
            "backend": self._backend,
        }
        answer = await _both(
            self._http.post("/init_weights_update_group", body),
            asyncio.to_thread(self._join),
        )
        if not answer.get("success"):
            raise EngineError(f"SGLang did not join the process group at {self._address}: {answer}")

    def _join(self) -> None:
        self._group = join_group(
            self._address, rank=0, world_size=self._num_ranks + 1, backend=self._backend
        )

    def _broadcast(self, tensors: list[Tensor]) -> None:
        with boundary(EngineError, "broadcasting weights to SGLang"):
            for tensor in tensors:
                dist.broadcast(tensor, src=0, group=self._group)


def join_group(address: str, *, rank: int, world_size: int, backend: str) -> Any:
    """Join a process group beside the default one, as SGLang's side makes it.

    torch has no public call for a group that is not part of the default one; SGLang and others use this helper,
    and both sides must name the store alike. Remove when ``torch.distributed`` offers one.

    Raises:
        EngineError: the others did not come, or torch's helper has changed.
    """
    with boundary(EngineError, f"joining the process group at {address}"):
        c10d: Any = dist.distributed_c10d
        store, rank, world_size = next(c10d.rendezvous(f"tcp://{address}", rank, world_size))
        group, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            c10d.Backend(backend),
            c10d.PrefixStore(GROUP, store),
            group_name=GROUP,
            timeout=c10d.default_pg_timeout,
        )
        c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
        return group


async def _both(answer: Any, work: Any) -> Any:
    """Await both and return what the first gives; the first error wins."""
    try:
        async with asyncio.TaskGroup() as tasks:
            answered = tasks.create_task(answer)
            tasks.create_task(work)
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    return answered.result()


def _read(path: str, device: str) -> dict[str, Tensor]:
    with boundary(EngineError, f"reading weights from {path}"):
        return dict(sorted(load_file(path, device=device).items()))


def _pickled(named: list[tuple[str, Tensor]]) -> str:
    """Pickle handles of tensors as SGLang's ``MultiprocessingSerializer`` reads them."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(named)
    return base64.b64encode(buffer.getvalue()).decode()
