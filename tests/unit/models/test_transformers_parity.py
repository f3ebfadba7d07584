import pytest
import torch

from longarc.models.build import build_model
from longarc.models.hf_config import config_to_hf
from longarc.models.hf_weights import load_pretrained_dir, save_pretrained_dir
from longarc.models.layout import Layout
from longarc.models.projection import project_logits
from model_cases import sharpened, small_glm, small_llama

CONFIGS = {
    # Many index heads and an odd-looking number of everything: with few heads ReLU makes ties, which
    # transformers breaks by no rule. Its latent norms always use 1e-6.
    "glm": small_glm(index_n_heads=32, latent_norm_eps=1e-6, rms_norm_eps=1e-4, rope_theta=300.0),
    "glm_shared": small_glm(
        num_hidden_layers=5,
        index_topk_pattern="FSFSS",
        index_n_heads=32,
        latent_norm_eps=1e-6,
        rms_norm_eps=1e-4,
    ),
    "llama": small_llama(rope_theta=300.0),
    "llama_tied_wide_heads": small_llama(tie_word_embeddings=True, head_dim=12),
}


def reference_class(name):
    transformers = pytest.importorskip("transformers")
    is_glm = name.startswith("glm")
    return transformers.GlmMoeDsaForCausalLM if is_glm else transformers.LlamaForCausalLM


def logits_of_both(ours, reference, ids):
    hidden = ours(ids, Layout.documents([len(ids)])).hidden
    with torch.no_grad():
        return project_logits(hidden, ours.output_weight), reference(ids[None]).logits[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_our_directory_and_computes_the_same(name, tmp_path, make_ids):
    ours = sharpened(build_model(CONFIGS[name], seed=6))
    save_pretrained_dir(ours, tmp_path)
    reference = reference_class(name).from_pretrained(tmp_path, local_files_only=True).eval()

    ours_logits, reference_logits = logits_of_both(ours, reference, make_ids(80))
    assert reference_logits.std() > 0.3
    torch.testing.assert_close(ours_logits, reference_logits, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
def test_we_read_the_directory_of_transformers_and_compute_the_same(name, tmp_path, make_ids):
    save_pretrained_dir(build_model(CONFIGS[name], seed=1), tmp_path / "config")
    cls = reference_class(name)
    config = cls.config_class.from_pretrained(tmp_path / "config", local_files_only=True)
    torch.manual_seed(4)
    reference = cls(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
            else:
                parameter.uniform_(0.5, 1.5)
    reference.save_pretrained(tmp_path / "theirs")

    ours = load_pretrained_dir(tmp_path / "theirs")
    ours_logits, reference_logits = logits_of_both(ours, reference, make_ids(80))
    assert reference_logits.std() > 0.3
    torch.testing.assert_close(ours_logits, reference_logits, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options", [{"max_shard_bytes": 20_000}, {"experts": "fused"}], ids=["shards", "fused"]
)
def test_transformers_reads_shards_and_fused_experts(options, tmp_path, make_ids):
    ours = sharpened(build_model(CONFIGS["glm"], seed=6))
    save_pretrained_dir(ours, tmp_path, **options)
    reference = reference_class("glm").from_pretrained(tmp_path, local_files_only=True).eval()
    ours_logits, reference_logits = logits_of_both(ours, reference, make_ids(80))
    torch.testing.assert_close(ours_logits, reference_logits, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_we_read_the_shards_of_transformers(tmp_path, make_ids):
    save_pretrained_dir(build_model(CONFIGS["glm"], seed=1), tmp_path / "config")
    cls = reference_class("glm")
    reference = cls.from_pretrained(tmp_path / "config", local_files_only=True).eval()
    reference.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    ours = load_pretrained_dir(tmp_path / "theirs")
    ours_logits, reference_logits = logits_of_both(ours, reference, make_ids(80))
    torch.testing.assert_close(ours_logits, reference_logits, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "schedule",
    [
        {"index_topk_pattern": "FSSF"},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
        {"indexer_types": ("full", "full", "shared", "shared")},
    ],
    ids=["pattern", "frequency", "types"],
)
def test_a_model_that_shares_indexers_has_the_logits_of_transformers(schedule, tmp_path, make_ids):
    shape = {"num_hidden_layers": 4, "index_n_heads": 32, "index_topk": 9, "latent_norm_eps": 1e-6}
    ours = build_model(small_glm(initializer_range=0.15, **shape, **schedule), seed=6)
    save_pretrained_dir(ours, tmp_path)
    reference = reference_class("glm").from_pretrained(tmp_path, local_files_only=True).eval()
    assert tuple(reference.config.indexer_types) == ours.config.indexer_kinds
    ours_logits, reference_logits = logits_of_both(ours, reference, make_ids(80))
    assert reference_logits.std() > 0.3
    torch.testing.assert_close(ours_logits, reference_logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("frequency", [1, 2])
def test_transformers_takes_the_settings_without_a_file_between(frequency):
    transformers = pytest.importorskip("transformers")
    values = config_to_hf(small_glm(index_topk_freq=frequency), dtype="float32")
    config = transformers.GlmMoeDsaConfig(**values)
    assert config.indexer_types == list(small_glm(index_topk_freq=frequency).indexer_kinds)
