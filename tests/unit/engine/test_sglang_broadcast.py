"""A broadcast to another process that joins the group as SGLang's side does."""

import multiprocessing

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from fake_engine_servers import FakeSglang
from longarc.engine.server_process import free_port
from longarc.engine.sglang_weights import GROUP, BroadcastTransport, join_group


def receive(address, shapes, queue):
    """What a rank of SGLang does: join, and take each tensor in the announced order."""
    group = join_group(address, rank=1, world_size=2, backend="gloo")
    received = [torch.empty(shape) for shape in shapes]
    for tensor in received:
        dist.broadcast(tensor, src=0, group=group)
    queue.put([tensor.tolist() for tensor in received])
    dist.destroy_process_group(group)


async def test_every_rank_receives_the_tensors_in_the_order_they_are_announced(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"b": torch.arange(3.0), "a": torch.ones(2, 2)}, path)
    address = f"127.0.0.1:{free_port()}"
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    rank = context.Process(target=receive, args=(address, [(2, 2), (3,)], queue))
    rank.start()
    fake = FakeSglang()
    transport = BroadcastTransport(
        fake.http(), device="cpu", num_ranks=1, address=address, backend="gloo"
    )
    try:
        answer = await transport.send(str(path), policy_version=3, flush_cache=True)
        assert answer["success"]
        assert queue.get(timeout=60) == [[[1.0, 1.0], [1.0, 1.0]], [0.0, 1.0, 2.0]]
    finally:
        transport.close()
        rank.join(timeout=60)
    body = fake.body("/update_weights_from_distributed")
    assert body["names"] == ["a", "b"]
    assert body["dtypes"] == ["float32", "float32"]
    assert body["shapes"] == [[2, 2], [3]]
    assert (body["group_name"], body["weight_version"]) == (GROUP, "3")
    meeting = fake.body("/init_weights_update_group")
    assert (meeting["rank_offset"], meeting["world_size"]) == (1, 2)
