"""`longarc models import`: a ChatGLM directory becomes one of GlmForCausalLM."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from chatglm_cases import CONFIG, random_tensors, write
from longarc.cli.main import main
from longarc.models.elders.chatglm_config import read_chatglm_config
from longarc.models.elders.chatglm_files import convert_chatglm_dir
from longarc.models.elders.chatglm_weights import glm_state_dict
from peak_memory import measured_alone, peak_bytes


def read(directory):
    return {
        name: tensor
        for path in directory.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def assert_same(tensors, expected):
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())


def test_a_directory_is_imported(tmp_path, capsys):
    tensors = random_tensors()
    source, target = write(tmp_path / "chatglm", tensors), tmp_path / "glm"
    assert main(["models", "import", str(source), str(target)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{target}: config.json, model.safetensors"
    assert_same(read(target), glm_state_dict(read_chatglm_config(CONFIG), tensors))
    config = json.loads((target / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("glm", "bfloat16")
    assert (config["eos_token_id"], config["pad_token_id"]) == (2, None)
    assert main(["models", "info", str(target)]) == 0


def test_shards_hold_what_one_file_would(tmp_path):
    tensors = random_tensors()
    source, target = write(tmp_path / "chatglm", tensors), tmp_path / "glm"
    convert_chatglm_dir(source, target, max_shard_bytes=10_000)
    assert len(list(target.glob("*.safetensors"))) > 3
    place = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert place.keys() == read(target).keys()
    assert_same(read(target), glm_state_dict(read_chatglm_config(CONFIG), tensors))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_computes_the_logits_of_the_checkpoint(tmp_path):
    transformers = pytest.importorskip("transformers")
    tensors = {name: 0.2 * tensor for name, tensor in random_tensors(dtype=torch.float32).items()}
    convert_chatglm_dir(write(tmp_path / "chatglm", tensors), tmp_path / "glm")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "glm").eval()
    built = transformers.GlmForCausalLM(loaded.config).eval()
    built.load_state_dict(glm_state_dict(read_chatglm_config(CONFIG), tensors), strict=True)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, built(ids).logits)


def test_the_meaning_of_the_ratio_can_be_chosen(tmp_path):
    source = write(tmp_path / "chatglm", random_tensors(), CONFIG | {"rope_ratio": 4})
    ropes = []
    for meaning in ("base", "positions"):
        target = tmp_path / meaning
        options = ["--rope-ratio-scales", meaning]
        assert main(["models", "import", str(source), str(target), *options]) == 0
        ropes.append(json.loads((target / "config.json").read_text())["rope_parameters"])
    assert [rope["rope_type"] for rope in ropes] == ["default", "linear"]


def is_partial(tensors):
    tensors.pop("transformer.output_layer.weight")


def is_quantised(tensors):
    name = "transformer.encoder.layers.1.mlp.dense_4h_to_h.weight"
    tensors[name] = tensors[name].to(torch.int8)


@pytest.mark.parametrize(
    ("damage", "change", "code", "message"),
    [
        (is_partial, {}, 4, "lacks 1 .*output_layer"),
        (is_quantised, {}, 4, "dense_4h_to_h.weight' has dtype I8 .*unquantised"),
        (lambda t: None, {"hidden_size": 48}, 4, "has shape .* its config says"),
        (lambda t: None, {"model_type": "glm"}, 2, "should be 'chatglm'"),
    ],
)
def test_what_cannot_be_imported_is_refused_before_anything_is_written(
    tmp_path, capsys, damage, change, code, message
):
    tensors = random_tensors()
    damage(tensors)
    source = write(tmp_path / "chatglm", tensors, CONFIG | change)
    assert main(["models", "import", str(source), str(tmp_path / "glm")]) == code
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "glm").exists()


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_directory_without_a_config_is_refused(tmp_path, capsys, content):
    source = tmp_path / "chatglm"
    source.mkdir()
    if content is not None:
        (source / "config.json").write_text(content)
    assert main(["models", "import", str(source), str(tmp_path / "glm")]) != 0
    assert "config.json" in capsys.readouterr().err
    assert not (tmp_path / "glm").exists()


def test_a_directory_that_is_not_empty_is_left_alone(tmp_path, capsys):
    source = write(tmp_path / "chatglm", random_tensors())
    assert main(["models", "import", str(source), str(source)]) == 2
    assert "not an empty directory" in capsys.readouterr().err


def peak_of_import(root):
    """Return the peak [bytes] of an import, and the size of the checkpoint."""
    config = CONFIG | {"padded_vocab_size": 4096, "hidden_size": 512, "ffn_hidden_size": 8192}
    config |= {"num_layers": 12}
    write(root / "chatglm", random_tensors(config), config)
    size = (root / "chatglm" / "model.safetensors").stat().st_size
    return peak_bytes(
        lambda: convert_chatglm_dir(root / "chatglm", root / "glm", max_shard_bytes=1 << 24)
    ), size


@pytest.mark.slow
def test_no_more_than_a_shard_and_a_mapping_is_in_memory(tmp_path):
    peak, size = measured_alone(peak_of_import, tmp_path)
    assert size > 300e6
    assert peak < 150e6
