import gc
import os
import weakref
from pathlib import Path
from threading import Event, Timer

import pytest
import torch

from longarc.config.training import ActivationConfig, chosen_layers
from longarc.errors import ConfigError, ContractError, ResourceError
from longarc.models import offload
from longarc.models.activations import Activations
from longarc.models.build import build_model
from longarc.models.indexer import Indexer
from longarc.models.layout import Layout, Span
from model_cases import sharpened, small_glm, small_llama
from peak_memory import measured_alone, peak_bytes

POLICIES = {
    "all recomputed": {"recomputed_layers": "all"},
    "every second recomputed": {"recomputed_layers": 2},
    "selected recomputed": {"recomputed_layers": (1, 2)},
    "all offloaded": {"offloaded_layers": "all"},
    "one offloaded, one recomputed": {"offloaded_layers": (0,), "recomputed_layers": (1,)},
    "both": {"offloaded_layers": "all", "recomputed_layers": "all"},
}
LAYOUT = Layout((Span(60), Span(40, 0), Span(30, 0), Span(50)))


@pytest.fixture(autouse=True)
def everything_is_worth_offloading(monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)


@pytest.fixture(autouse=True)
def every_directory_counts_as_a_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(offload, "MOUNTS", tmp_path / "no mounts")


def gradients(model, config, *, passes=1, **options):
    """Return the gradients of a loss on hidden states and indexer, summed over passes."""
    ids = torch.randint(0, 64, (180,), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    with Activations(config) as activations:
        for _ in range(passes):
            output = model(ids, LAYOUT, activations=activations, **options)
            weights = torch.linspace(-1, 1, output.hidden.numel()).view_as(output.hidden)
            loss = (output.hidden * weights.to(output.hidden.dtype)).sum()
            (loss + output.indexer_loss_sum).backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }, output.expert_counts


def are_equal(left, right):
    (left, left_counts), (right, right_counts) = left, right
    return (
        torch.equal(left_counts, right_counts)
        and left.keys() == right.keys()
        and all(torch.equal(left[name], right[name]) for name in left)
    )


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize(
    "options",
    [
        {"attention": "sparse", "indexer_loss": "sparse"},
        {"attention": "sparse"},
        {"attention": "dense", "indexer_loss": "warmup"},
    ],
    ids=["sparse and indexer", "sparse", "warm-up"],
)
def test_gradients_are_those_of_keeping_everything_bit_for_bit(
    indexed, policy, native, options, monkeypatch
):
    monkeypatch.setenv("LONGARC_NATIVE", native)
    kept = gradients(indexed, ActivationConfig(), **options)
    assert any("indexer" in name for name in kept[0]) == ("indexer_loss" in options)
    assert are_equal(kept, gradients(indexed, ActivationConfig(**policy), **options))


@pytest.mark.parametrize(("layers", "num_selections"), [((1, 2), 2), ((0, 2, 4), 3), ("all", 4)])
def test_a_layer_without_an_indexer_is_recomputed_with_what_it_was_given(
    shared_glm, monkeypatch, layers, num_selections
):
    selections = []
    select = Indexer.select
    monkeypatch.setattr(
        Indexer, "select", lambda *call: selections.append(select(*call)) or selections[-1]
    )
    given = []
    shared_glm.model.layers[2].register_forward_pre_hook(lambda *call: given.append(call[1][2]))
    options = {"attention": "sparse", "indexer_loss": "sparse"}
    gradients(shared_glm, ActivationConfig(recomputed_layers=layers), **options)
    assert len(selections) == num_selections
    assert len(given) == 2
    assert given[1].rows.data_ptr() == given[0].rows.data_ptr() == selections[0].data_ptr()


def test_a_selection_goes_to_the_file_with_the_rest(shared_glm):
    held = []
    shared_glm.model.layers[0].register_forward_hook(
        lambda *call: held.append(weakref.ref(call[-1].selection.rows))
    )
    ids = torch.randint(0, 64, (180,), generator=torch.Generator().manual_seed(1))
    config = ActivationConfig(offloaded_layers="all", recomputed_layers="all")
    with Activations(config) as activations:
        output = shared_glm(ids, LAYOUT, indexer_loss="sparse", activations=activations)
        gc.collect()
        assert held[0]() is None
        (output.hidden.sum() + output.indexer_loss_sum).backward()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_bfloat16_model_keeps_its_gradients_too(policy):
    model = sharpened(build_model(small_glm(), seed=3, dtype=torch.bfloat16))
    options = {"attention": "sparse", "indexer_loss": "sparse"}
    kept = gradients(model, ActivationConfig(), **options)
    assert are_equal(kept, gradients(model, ActivationConfig(**policy), **options))


def test_several_passes_use_one_file_after_one_another(glm):
    config = ActivationConfig(offloaded_layers="all")
    assert are_equal(gradients(glm, ActivationConfig(), passes=3), gradients(glm, config, passes=3))


def test_a_recomputed_layer_runs_twice_and_others_once(glm):
    runs = []
    for index, layer in enumerate(glm.model.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: runs.append(index))
    gradients(glm, ActivationConfig(recomputed_layers=(0, 2)))
    assert sorted(runs) == [0, 0, 1, 2, 2]


def test_a_recomputed_layer_routes_to_the_same_experts_with_the_same_weights(glm):
    routes = []
    glm.model.layers[1].mlp.gate.register_forward_hook(lambda *call: routes.append(call[-1]))
    gradients(glm, ActivationConfig(recomputed_layers="all"))
    (chosen, weights), (chosen_again, weights_again) = routes
    assert torch.equal(chosen, chosen_again)
    assert torch.equal(weights, weights_again)


def peaks_of_a_deep_model(directory):
    """Return the peak [bytes] of forward and backward with each policy; 24 layers keep 4 MB each."""
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 24}
    model = build_model(small_llama(**shape), seed=0)
    ids, layout = torch.zeros(512, dtype=torch.long), Layout.documents([128] * 4)

    def step(**policy):
        with Activations(ActivationConfig(**policy)) as activations:
            model(ids, layout, activations=activations).hidden.sum().backward()

    step()  # allocates gradients and scratch memory
    offloads = {"offloaded_layers": "all", "offload_directory": directory}
    return {
        "kept": peak_bytes(step),
        "recomputed": peak_bytes(lambda: step(recomputed_layers="all")),
        "offloaded": peak_bytes(lambda: step(**offloads)),
        "both": peak_bytes(lambda: step(**offloads, recomputed_layers="all")),
    }


def test_recomputed_and_offloaded_layers_need_a_fraction_of_the_memory(tmp_path):
    peaks = measured_alone(peaks_of_a_deep_model, str(tmp_path))
    assert peaks["kept"] > 90e6
    assert peaks["recomputed"] < peaks["kept"] / 4
    assert peaks["offloaded"] < peaks["kept"] / 4
    assert peaks["both"] < peaks["kept"] / 5


def test_layers_are_chosen_by_word_number_and_list():
    assert chosen_layers("none", 5) == set()
    assert chosen_layers("all", 5) == {0, 1, 2, 3, 4}
    assert chosen_layers(2, 5) == {0, 2, 4}
    assert chosen_layers((4, 1), 5) == {1, 4}


@pytest.mark.parametrize("value", ["some", 0, 1, -2, [], [-1], True, 1.5, ["a"], None])
def test_what_chooses_no_layers_is_refused(value):
    with pytest.raises(ValueError, match="chooses no layers; write"):
        ActivationConfig(recomputed_layers=value)


def test_a_directory_that_nothing_uses_is_refused():
    with pytest.raises(ValueError, match="offload_directory='/x' is not used"):
        ActivationConfig(offload_directory="/x")


def test_a_layer_that_the_model_lacks_is_refused(llama):
    with pytest.raises(ConfigError, match=r"recomputed_layers: layer 2 .* layers 0\.\.1"):
        gradients(llama, ActivationConfig(recomputed_layers=(2,)))


def test_a_missing_directory_is_refused(llama, tmp_path):
    config = ActivationConfig(offloaded_layers="all", offload_directory=str(tmp_path / "none"))
    with pytest.raises(ResourceError, match=r"cannot offload activations to .*none"):
        gradients(llama, config)


def test_a_backward_after_the_end_is_refused(llama):
    with Activations(ActivationConfig(offloaded_layers="all")) as activations:
        output = llama(torch.zeros(180, dtype=torch.long), LAYOUT, activations=activations)
    with pytest.raises(ContractError, match="inside the `with Activations"):
        output.hidden.sum().backward()


def test_a_backward_after_another_forward_is_refused(llama):
    with Activations(ActivationConfig(offloaded_layers="all")) as activations:
        ids = torch.zeros(180, dtype=torch.long)
        first = llama(ids, LAYOUT, activations=activations)
        llama(ids, LAYOUT, activations=activations)
        with pytest.raises(ContractError, match="before the next forward"):
            first.hidden.sum().backward()


def test_a_pass_without_gradients_writes_nothing(llama):
    with Activations(ActivationConfig(offloaded_layers="all")) as activations, torch.no_grad():
        llama(torch.zeros(180, dtype=torch.long), LAYOUT, activations=activations)
        assert activations._file is None


def test_a_retained_graph_can_be_read_again(llama):
    with Activations(ActivationConfig(offloaded_layers="all")) as activations:
        ids = torch.zeros(180, dtype=torch.long)
        output = llama(ids, LAYOUT, activations=activations)
        grads = [
            torch.autograd.grad(
                output.hidden.sum(), list(llama.parameters()), retain_graph=True, allow_unused=True
            )
            for _ in range(2)
        ]
    for first, second in zip(*grads, strict=True):
        assert (first is None and second is None) or torch.equal(first, second)


def test_a_change_in_place_of_a_saved_tensor_is_refused(tmp_path):
    file = offload.OffloadFile(str(tmp_path))
    layer = torch.nn.Linear(8, 8)
    x = torch.randn(64, 8)
    with file.offloaded(layer):
        y = layer(x)
        x += 1
    with pytest.raises(ContractError, match="changed in place"):
        y.sum().backward()
    file.close()
    assert list(tmp_path.iterdir()) == []


class Layer(torch.nn.Module):
    """A layer as `Activations` calls it."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, hidden, _step, _selection):
        return torch.nn.functional.gelu(self.linear(hidden))


def mlp():
    return torch.nn.ModuleList(Layer() for _ in range(3))


def forward(activations, layers):
    hidden = torch.ones(64, 8)
    for layer in activations.managed(layers):
        hidden = layer(hidden, None, None)
    return hidden.sum()


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_a_directory_in_memory_is_refused(tmp_path, monkeypatch, kind):
    device = tmp_path.stat().st_dev
    mounts = (
        "24 1 0:22 / /proc rw,relatime - proc proc rw\n"
        f"36 35 {os.major(device)}:{os.minor(device)} / /a\\040b rw shared:1 master:2 - {kind} none rw\n"
    )
    monkeypatch.setattr(offload, "MOUNTS", tmp_path / "mountinfo")
    (tmp_path / "mountinfo").write_text(mounts)
    with pytest.raises(ResourceError, match=rf"is a {kind}.*set activations.offload_directory"):
        offload.OffloadFile(str(tmp_path))
    (tmp_path / "mountinfo").write_text(mounts.replace(kind, "xfs"))
    offload.OffloadFile(str(tmp_path)).close()


@pytest.mark.skipif(not Path("/dev/shm").is_mount(), reason="no /dev/shm")
def test_shared_memory_is_no_disk(monkeypatch):
    monkeypatch.setattr(offload, "MOUNTS", Path("/proc/self/mountinfo"))
    with pytest.raises(ResourceError, match="/dev/shm: it is a tmpfs"):
        offload.OffloadFile("/dev/shm")


def test_a_read_that_nothing_waited_for_is_over_before_the_next_pass(tmp_path, monkeypatch):
    """A gradient of the last layer alone has the layer before it read ahead."""
    layers, read = mlp(), offload._read
    may_go_on, ended = Event(), []

    def slow(*request):
        if ended:  # the second: what is read ahead
            assert may_go_on.wait(20)
        ended.append(read(*request))
        return ended[-1]

    monkeypatch.setattr(offload, "_read", slow)
    config = ActivationConfig(offloaded_layers="all", offload_directory=str(tmp_path))
    with Activations(config) as activations:
        torch.autograd.grad(forward(activations, layers), list(layers[2].parameters()))
        assert len(ended) == 1
        Timer(0.1, may_go_on.set).start()
        activations._file.restart()
        assert len(ended) == 2
        forward(activations, layers).backward()
    assert all(parameter.grad is not None for parameter in layers.parameters())


def test_a_disk_slower_than_the_model_does_not_fill_the_memory(tmp_path, monkeypatch):
    """A layer is written only after the one before it is: the thread ends a write when somebody waits for it."""
    is_awaited, write, await_writing = (
        Event(),
        offload._write,
        offload._OffloadedLayer.await_writing,
    )
    requests = []

    def slow(*request):
        assert is_awaited.wait(20)
        is_awaited.clear()
        return write(*request)

    def awaited(layer):
        is_awaited.set()
        await_writing(layer)

    def submit(layer):
        assert all(written.done() for written in requests)
        requests.append(layer._file.submit(slow, layer._chunks))
        layer._writing = requests[-1]

    monkeypatch.setattr(offload._OffloadedLayer, "await_writing", awaited)
    monkeypatch.setattr(offload._OffloadedLayer, "write", submit)
    config = ActivationConfig(offloaded_layers="all", offload_directory=str(tmp_path))
    with Activations(config) as activations:
        forward(activations, mlp())
        is_awaited.set()  # for the last layer, which no other follows
    assert len(requests) == 3


def test_a_file_that_is_too_short_is_refused_and_not_read_for_ever(tmp_path):
    config = ActivationConfig(offloaded_layers="all", offload_directory=str(tmp_path))
    layers = mlp()
    with Activations(config) as activations:
        loss = forward(activations, layers)
        activations._file._newest.await_writing()
        activations._file._file.truncate(100)
        with pytest.raises(ResourceError, match=r"cannot read .* ends \d+ bytes too early"):
            loss.backward()


@pytest.mark.parametrize(
    ("call", "message"),
    [("pwrite", "cannot offload 2048 bytes to .*full"), ("preadv", "cannot read offloaded .*full")],
)
def test_a_disk_that_fails_fails_one_pass_and_not_the_next(tmp_path, monkeypatch, call, message):
    def full(*_):
        raise OSError(28, "disk is full")

    layers = mlp()
    config = ActivationConfig(offloaded_layers="all", offload_directory=str(tmp_path))
    with Activations(config) as activations:
        with monkeypatch.context() as broken:
            broken.setattr(offload.os, call, full)
            with pytest.raises(ResourceError, match=message):
                forward(activations, layers).backward()
        forward(activations, layers).backward()
    assert all(parameter.grad is not None for parameter in layers.parameters())
