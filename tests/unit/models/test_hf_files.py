"""Directories of many files, and the forms that matrices have in them."""

import json
import re
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from longarc.errors import CheckpointError, ConfigError, ContractError, ResourceError
from longarc.models import hf_files
from longarc.models.build import build_model
from longarc.models.hf_weights import load_pretrained_dir, named_tensors, save_pretrained_dir
from longarc.models.layout import Layout
from longarc.models.projection import project_logits
from model_cases import sharpened, small_glm, small_llama
from peak_memory import measured_alone, peak_bytes

GATE = "model.layers.1.mlp.experts.4.gate_proj.weight"


def states_are_equal(left, right):
    left, right = left.state_dict(), right.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def rewritten(directory, change):
    """Change the tensors of the one file of a directory."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_large_model_is_cut_into_shards_with_an_index(decoder, tmp_path):
    save_pretrained_dir(decoder, tmp_path, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    for path in files:
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 20_000
        assert {index["weight_map"][name] for name in tensors} == {path.name}
    tensors = named_tensors(decoder)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert states_are_equal(load_pretrained_dir(tmp_path), decoder)


SHARDS = {"max_shard_bytes": 20_000}


@pytest.mark.parametrize("before", [{}, SHARDS, {"max_shard_bytes": 15_000}])
@pytest.mark.parametrize("after", [{}, SHARDS])
def test_a_model_that_was_there_before_is_replaced(tmp_path, before, after):
    old, new = (build_model(small_llama(), seed=seed) for seed in (0, 1))
    save_pretrained_dir(old, tmp_path, **before)
    save_pretrained_dir(new, tmp_path, **after)
    assert states_are_equal(load_pretrained_dir(tmp_path), new)
    save_pretrained_dir(new, tmp_path / "fresh", **after)
    fresh = {path.name for path in (tmp_path / "fresh").iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == fresh | {"fresh"}


def test_what_belongs_to_something_else_stays(llama, tmp_path):
    names = {"adapter_model.safetensors", "tokenizer.json"}
    for name in names:
        (tmp_path / name).write_text("mine")
    save_pretrained_dir(llama, tmp_path)
    assert all((tmp_path / name).read_text() == "mine" for name in names)


def test_a_model_stays_until_the_new_one_is_complete(tmp_path, monkeypatch):
    old, new = (build_model(small_llama(), seed=seed) for seed in (0, 1))
    save_pretrained_dir(old, tmp_path, **SHARDS)
    written = []

    def save(tensors, path, metadata):
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(path)
        save_file(tensors, path, metadata)

    monkeypatch.setattr(hf_files, "save_file", save)
    names = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(ResourceError, match="No space left"):
        save_pretrained_dir(new, tmp_path, **SHARDS)
    assert {path.name for path in tmp_path.iterdir()} == names
    assert states_are_equal(load_pretrained_dir(tmp_path), old)


@pytest.mark.parametrize("options", [{}, SHARDS])
def test_no_moment_of_writing_leaves_a_mixture(tmp_path, monkeypatch, options):
    """Old weights, as few as there may be, never lie beside new ones under a config or an index."""
    old, new = (build_model(small_llama(), seed=seed) for seed in (0, 1))
    save_pretrained_dir(old, tmp_path, **SHARDS)
    replace, num_moments = hf_files.os.replace, 0

    def stopped(*paths):
        nonlocal num_moments
        num_moments += 1
        with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
            load_pretrained_dir(tmp_path)
        replace(*paths)

    monkeypatch.setattr(hf_files.os, "replace", stopped)
    save_pretrained_dir(new, tmp_path, **options)
    assert num_moments == len(list(tmp_path.iterdir()))
    assert states_are_equal(load_pretrained_dir(tmp_path), new)


def test_an_index_that_promises_too_much_is_refused(llama, tmp_path):
    save_pretrained_dir(llama, tmp_path, max_shard_bytes=20_000)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"holds 'model.norm.weight', but it does not"):
        load_pretrained_dir(tmp_path)


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"weight_map": 3}', "[" * 200_000])
def test_a_damaged_index_is_refused(llama, tmp_path, content):
    save_pretrained_dir(llama, tmp_path, max_shard_bytes=20_000)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load_pretrained_dir(tmp_path)


def test_a_missing_shard_is_refused(llama, tmp_path):
    save_pretrained_dir(llama, tmp_path, max_shard_bytes=20_000)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name} cannot be read"):
        load_pretrained_dir(tmp_path)


def test_a_tensor_in_two_files_without_an_index_is_refused(llama, tmp_path):
    save_pretrained_dir(llama, tmp_path)
    stray = tmp_path / "model-00001-of-00002.safetensors"
    save_file({"model.norm.weight": torch.ones(32)}, stray)
    with pytest.raises(
        CheckpointError, match=r"'model.norm.weight' is in model-0.* and in model\."
    ):
        load_pretrained_dir(tmp_path)


def test_what_lies_beside_a_model_is_not_read(llama, tmp_path):
    save_pretrained_dir(llama, tmp_path)
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "adapter_model.safetensors")
    assert states_are_equal(load_pretrained_dir(tmp_path), llama)


def test_weights_of_any_name_are_read_where_no_other_are(llama, tmp_path):
    save_pretrained_dir(llama, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert states_are_equal(load_pretrained_dir(tmp_path), llama)


@pytest.mark.parametrize("place", ["../one/model.safetensors", "{}/one/model.safetensors", ""])
def test_an_index_reaches_no_other_directory(llama, tmp_path, place):
    save_pretrained_dir(llama, tmp_path / "one")
    save_pretrained_dir(llama, tmp_path / "many", max_shard_bytes=20_000)
    path = tmp_path / "many" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = place.format(tmp_path)
    path.write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"which is no file of .*a shard lies beside its index"
    ):
        load_pretrained_dir(tmp_path / "many")


def test_files_are_mapped_anew_now_and_then(glm, tmp_path, monkeypatch):
    monkeypatch.setattr(hf_files, "MAPPED_BYTES", 1000)
    save_pretrained_dir(glm, tmp_path)
    assert states_are_equal(load_pretrained_dir(tmp_path), glm)


def test_fused_experts_are_written_and_read(glm, tmp_path):
    save_pretrained_dir(glm, tmp_path, experts="fused")
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.1.mlp.experts.gate_up_proj"].shape == (6, 48, 32)
    assert tensors["model.layers.1.mlp.experts.down_proj"].shape == (6, 32, 24)
    assert states_are_equal(load_pretrained_dir(tmp_path), glm)


def test_fused_experts_of_another_number_are_refused(glm, tmp_path):
    save_pretrained_dir(glm, tmp_path, experts="fused")
    name = "model.layers.1.mlp.experts.down_proj"
    rewritten(tmp_path, lambda t: t.update({name: torch.zeros(7, 32, 24)}))
    with pytest.raises(
        CheckpointError, match=r"experts.down_proj' has shape \[7, 32, 24\].*needs \[6, 32, 24\]"
    ):
        load_pretrained_dir(tmp_path)


@pytest.mark.parametrize(("dtype", "found"), [(torch.int8, "I8"), (torch.float8_e5m2, "F8_E5M2")])
def test_a_dtype_that_means_something_else_is_refused(llama, tmp_path, dtype, found):
    save_pretrained_dir(llama, tmp_path)
    rewritten(tmp_path, lambda t: t.update({"model.norm.weight": torch.ones(32).to(dtype)}))
    with pytest.raises(
        CheckpointError, match=rf"'model.norm.weight' has dtype {found}.*F64 or F32 or BF16 or F16"
    ):
        load_pretrained_dir(tmp_path)


def fp8_directory(model, directory, *, block=(16, 24)):
    """Write a model whose projections are FP8 with one scale per block; return the exact values."""
    save_pretrained_dir(model, directory)
    exact = {}

    def quantise(tensors):
        for name in list(tensors):
            if not name.endswith("_proj.weight") or "weights_proj" in name:
                continue
            weight = tensors[name]
            rows, columns = weight.shape
            blocks = (-(-rows // block[0]), -(-columns // block[1]))
            scales = torch.rand(blocks, generator=torch.Generator().manual_seed(1)) + 0.5
            stretched = scales.repeat_interleave(block[0], 0)[:rows]
            stretched = stretched.repeat_interleave(block[1], 1)[:, :columns]
            codes = (weight / stretched).to(torch.float8_e4m3fn)
            tensors[name], tensors[f"{name}_scale_inv"] = codes, scales
            exact[name] = codes.float() * stretched

    rewritten(directory, quantise)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    path.write_text(json.dumps(config))
    return exact


def test_fp8_blocks_are_dequantised(glm, tmp_path):
    exact = fp8_directory(glm, tmp_path)
    loaded = named_tensors(load_pretrained_dir(tmp_path))
    assert len(exact) > 20
    for name, value in exact.items():
        assert torch.equal(loaded[name], value), name


def test_fp8_without_its_scales_is_refused(glm, tmp_path):
    fp8_directory(glm, tmp_path)
    rewritten(tmp_path, lambda t: t.pop(f"{GATE}_scale_inv"))
    with pytest.raises(
        CheckpointError, match=r"4.gate_proj.weight_scale_inv' of dtype F32 and shape \[2, 2\]"
    ):
        load_pretrained_dir(tmp_path)


def test_fp8_without_a_block_in_the_config_is_refused(glm, tmp_path):
    fp8_directory(glm, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="does not say which blocks share a scale"):
        load_pretrained_dir(tmp_path)


def test_fp8_vectors_are_refused(glm, tmp_path):
    fp8_directory(glm, tmp_path)
    vector = torch.ones(32).to(torch.float8_e4m3fn)
    rewritten(tmp_path, lambda t: t.update({"model.norm.weight": vector}))
    with pytest.raises(
        CheckpointError, match=r"'model.norm.weight' of shape \[32\] .*only matrices"
    ):
        load_pretrained_dir(tmp_path)


def test_fp8_scales_of_another_shape_are_refused(glm, tmp_path):
    fp8_directory(glm, tmp_path)
    rewritten(tmp_path, lambda t: t.update({f"{GATE}_scale_inv": torch.ones(1, 2)}))
    with pytest.raises(CheckpointError, match=r"scale_inv' has shape \[1, 2\].*needs \[2, 2\]"):
        load_pretrained_dir(tmp_path)


def logits(model, *, int4_group_size=None):
    ids = torch.randint(0, 64, (100,), generator=torch.Generator().manual_seed(8))
    output = model(ids, Layout.documents([60, 40]), int4_group_size=int4_group_size)
    return project_logits(output.hidden, model.output_weight)


@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exported_int4_gives_the_logits_of_the_training_forward(
    tmp_path, native, dtype, monkeypatch
):
    monkeypatch.setenv("LONGARC_NATIVE", native)
    model = sharpened(build_model(small_glm(), seed=3, dtype=dtype))
    save_pretrained_dir(model, tmp_path, experts="int4", int4_group_size=8)
    trained = logits(model, int4_group_size=8)
    assert torch.equal(logits(load_pretrained_dir(tmp_path, dtype=dtype)), trained)
    assert not torch.equal(logits(model), trained)


def test_exported_int4_is_an_eighth_and_idempotent(glm, tmp_path):
    save_pretrained_dir(glm, tmp_path / "a", experts="int4", int4_group_size=8)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    assert tensors[f"{GATE}_packed"].shape == (24, 4)
    assert tensors[f"{GATE}_packed"].dtype == torch.int32
    assert tensors[f"{GATE}_scale"].shape == (24, 4)
    assert tensors[f"{GATE}_scale"].dtype == torch.bfloat16
    assert tensors[f"{GATE}_shape"].tolist() == [24, 32]
    again = load_pretrained_dir(tmp_path / "a")
    save_pretrained_dir(again, tmp_path / "b", experts="int4", int4_group_size=8)
    others = load_file(tmp_path / "b" / "model.safetensors")
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


@pytest.mark.parametrize("native", ["1", "0"])
def test_gradients_of_rounded_experts_reach_the_weights(glm, native, monkeypatch):
    """Straight through: the gradient of a weight is that of the value it was rounded to."""
    monkeypatch.setenv("LONGARC_NATIVE", native)
    logits(glm, int4_group_size=8).square().sum().backward()
    through = {n: p.grad.clone() for n, p in glm.named_parameters() if p.grad is not None}
    rounded = build_model(glm.config, seed=0)
    rounded.load_state_dict(glm.state_dict())
    with torch.no_grad():
        for name, tensor in named_tensors(rounded).items():
            if ".experts." in name:
                values = int4_values(tensor)
                tensor.copy_(values)
    logits(rounded).square().sum().backward()
    for name, parameter in rounded.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, through[name]), name


def int4_values(weight):
    """The rule of `longarc.algos.int4`, written out once more."""
    groups = weight.bfloat16().float().reshape(-1, 8)
    scale = (groups.abs().max(dim=1, keepdim=True).values * torch.tensor(1 / 7)).clamp(min=1e-5)
    return ((groups / scale).round().bfloat16() * scale.bfloat16()).reshape(weight.shape).float()


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("packed", torch.zeros(24, 5, dtype=torch.int32), r"\[24, 5\].*needs \[24, 4\]"),
        (
            "packed",
            torch.zeros(24, 4, dtype=torch.int64),
            r"packed' has dtype I64.*I32 is expected",
        ),
        ("scale", torch.zeros(24, 2, dtype=torch.bfloat16), r"\[24, 2\].*needs \[24, 4\]"),
        ("scale", torch.zeros(24, 4), r"scale' has dtype F32.*BF16 is expected"),
        ("scale", None, r"lacks the tensor .*scale' of dtype BF16 and shape \[24, 4\]"),
        ("shape", torch.tensor([24, 64]), r"shape' .* says \[24, 64\].*needs \[24, 32\]"),
    ],
)
def test_int4_tensors_that_do_not_fit_are_refused(glm, tmp_path, part, value, message):
    save_pretrained_dir(glm, tmp_path, experts="int4", int4_group_size=8)

    def change(tensors):
        tensors.pop(f"{GATE}_{part}")
        if value is not None:
            tensors[f"{GATE}_{part}"] = value

    rewritten(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained_dir(tmp_path)


def test_the_config_of_an_int4_model_names_all_that_was_not_rounded(tmp_path):
    model = build_model(small_glm(num_nextn_predict_layers=1), seed=0)
    save_pretrained_dir(model, tmp_path, experts="int4", int4_group_size=8)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    patterns = [pattern.removeprefix("re:") for pattern in config["ignore"]]
    for name, tensor in named_tensors(model).items():
        if tensor.dim() == 2 and "embed_tokens" not in name:  # which is no linear layer
            module = name.removesuffix(".weight")
            is_ignored = any(re.match(pattern, module) for pattern in patterns)
            assert is_ignored == (".experts." not in name), name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_without_a_code_are_not_exported(glm, tmp_path, value):
    glm.model.layers[1].mlp.experts.down_proj.data[2, 3, 5] = value
    with pytest.raises(
        ContractError, match=r"experts\.2\.down_proj\.weight' holds numbers that are"
    ):
        save_pretrained_dir(glm, tmp_path, experts="int4", int4_group_size=8)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("group_size", [0, 7, 48])
def test_int4_without_experts_or_whole_groups_is_refused(llama, glm, tmp_path, group_size):
    target = tmp_path / "new"
    with pytest.raises(ConfigError, match="llama model has no routed experts"):
        save_pretrained_dir(llama, target, experts="int4")
    said = (
        rf"groups of {group_size} .*experts.0.*weight', whose rows have (32|24); choose .* divides"
    )
    with pytest.raises(ConfigError, match=said):
        save_pretrained_dir(glm, target, experts="int4", int4_group_size=group_size)
    with pytest.raises(ContractError, match="a llama model has none"):
        logits(llama, int4_group_size=8)
    assert not target.exists()


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq"}, "'gptq'.* is not supported"),
        ({"quant_method": "fp8"}, "weight_block_size=.* is not supported"),
        *(
            ({"quant_method": "fp8", "weight_block_size": block}, "supported: two positive numbers")
            for block in ([0, 128], [128, -1], [128], "ab", [True, 1], [1.5, 2], [[1], 2], 128)
        ),
        *(
            (damaged, "quantization_config in config.json is damaged")
            for damaged in ([1], "fp8", 3)
        ),
        *(
            (
                {"quant_method": "compressed-tensors", "format": "pack-quantized"} | damaged,
                "quantization_config in config.json is damaged",
            )
            for damaged in (
                {"config_groups": [1]},
                {"config_groups": {"g": [1]}},
                {"config_groups": {"g": {"weights": [1]}}},
                {"config_groups": {"g": {"weights": {"group_size": "many"}}}},
            )
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 8, "group_size": 8}}},
            },
            "'num_bits': 8.* is not supported",
        ),
    ],
)
def test_a_quantisation_that_cannot_be_read_is_refused(glm, tmp_path, quantization, message):
    save_pretrained_dir(glm, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization})
    )
    with pytest.raises(ConfigError, match=message):
        load_pretrained_dir(tmp_path)


@pytest.mark.parametrize("content", ["[]", "3", '"x"', "null"])
def test_a_config_that_is_no_object_is_refused(glm, tmp_path, content):
    save_pretrained_dir(glm, tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config.json holds a JSON \w+, but"):
        load_pretrained_dir(tmp_path)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ([1], r"rope_parameters=\[1\] in config.json is no object"),
        ("default", "rope_parameters='default' in config.json is no object"),
        ({"rope_theta": "wide"}, "(?s)does not describe a model that can be built.*rope_theta"),
    ],
)
def test_rotary_settings_of_a_wrong_type_are_refused(glm, tmp_path, rope, message):
    save_pretrained_dir(glm, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": rope}))
    with pytest.raises(ConfigError, match=message):
        load_pretrained_dir(tmp_path)


def peaks_of_files(directory):
    """Return the size of a model, and the peaks of writing and of reading it [bytes]."""
    config = small_llama(hidden_size=512, intermediate_size=2048, num_hidden_layers=12)
    model = build_model(config, seed=0)
    size = sum(parameter.nbytes for parameter in model.parameters())
    save = peak_bytes(partial(save_pretrained_dir, model, directory, max_shard_bytes=1 << 25))
    del model
    load = peak_bytes(lambda: load_pretrained_dir(directory))
    return {"size": size, "save": save, "load": load}


def test_neither_writing_nor_reading_makes_a_second_copy(tmp_path):
    peaks = measured_alone(peaks_of_files, str(tmp_path))
    assert peaks["size"] > 180e6
    assert peaks["save"] < 0.2 * peaks["size"]
    assert peaks["load"] < 1.3 * peaks["size"]
