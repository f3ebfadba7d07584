"""Settings that transformers would keep and never look at."""

import pytest

from longarc.errors import ConfigError
from longarc.models.backbones.classes import check_all_is_read
from transformers_cases import FAMILIES, small

pytest.importorskip("transformers")
OF_OTHERS = {"glm4_moe_lite": {"first_k_dense_replace"}}
"""Settings of the small models that stand in published files and are not read."""


def made(family, **changes):
    config = small(family, **changes)
    kept = {k: v for k, v in config.hf_config.items() if k not in OF_OTHERS.get(family, ())}
    return config.model_copy(update={"hf_config": kept})


@pytest.mark.parametrize("family", FAMILIES)
def test_names_that_the_class_lists_or_reads_in_an_old_spelling_pass(family):
    check_all_is_read(made(family))
    check_all_is_read(made(family, rope_theta=5e4, partial_rotary_factor=0.5, pad_token_id=1))
    check_all_is_read(made(family, rope_scaling={"type": "linear", "factor": 2.0}))
    check_all_is_read(made(family, rope_parameters={"rope_type": "default", "rope_theta": 1e4}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_misspelt_name_is_refused_with_the_one_that_is_read(family):
    with pytest.raises(
        ConfigError, match=r"model\.hf_config\.rms_norm_epz: did you mean rms_norm_eps"
    ):
        check_all_is_read(made(family, rms_norm_epz=1e-5))
    with pytest.raises(ConfigError, match=r"does not read nonsense, rubbish, so"):
        check_all_is_read(made(family, nonsense=1, rubbish=2))


def test_what_another_family_reads_is_refused_where_it_is_not():
    with pytest.raises(ConfigError, match="first_k_dense_replace"):
        check_all_is_read(small("glm4_moe_lite"))
    with pytest.raises(ConfigError, match="did you mean num_experts_per_tok"):
        check_all_is_read(small("glm4_moe", num_experts_per_tokn=2))
