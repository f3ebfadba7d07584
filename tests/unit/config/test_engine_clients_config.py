from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from longarc.config.engine import EngineConfig
from longarc.config.engine_clients import AnyEngineConfig, SglangConfig, VllmConfig
from longarc.config.loader import load_settings
from longarc.config.recipe import Recipe
from longarc.errors import ConfigError

SMOKE = Path(__file__).parents[3] / "recipes" / "smoke.toml"
ANY = TypeAdapter(AnyEngineConfig)


def test_an_engine_without_a_kind_is_the_embedded_one():
    assert ANY.validate_python({"max_running": 8}) == EngineConfig(max_running=8)


def test_the_kind_decides_which_settings_there_are():
    assert isinstance(ANY.validate_python({"kind": "vllm", "python": "p"}), VllmConfig)
    assert isinstance(ANY.validate_python({"kind": "sglang", "url": "http://a:1"}), SglangConfig)
    with pytest.raises(ValidationError, match="cache_tokens"):
        ANY.validate_python({"kind": "vllm", "python": "p", "cache_tokens": 4})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "engine={kind='vllm',python='p',cache_tokens=64}",
            "cache_tokens: unknown key with kind = 'vllm'",
        ),
        (
            "engine={kind='sglang',url='http://a:1',routing={}}",
            "routing: unknown key with kind = 'sglang'",
        ),
        ("engine.eager=true", "it belongs to kind = 'vllm': leave it out, or change kind"),
        ("engine={kind='vllm',python='p',device='cuda:0'}", "it belongs to kind = 'sglang'"),
        ("engine.dtype='float32'", "it belongs to kind = 'sglang' or 'vllm'"),
        ("engine.routing.eager=true", ": unknown key; "),
        ("engine.max_runing=3", "unknown key; did you mean engine.max_running"),
        ("stages.sft.loop={}", "with kind = 'sft'; it belongs to kind = 'agentic_rl' or "),
        (
            "model={family='llama',index_topk=8}",
            "it belongs to family = 'glm_hybrid' or 'glm_moe_dsa':",
        ),
    ],
)
def test_a_key_of_another_kind_is_said_to_be_one(override, said):
    with pytest.raises(ConfigError) as refused:
        load_settings(Recipe, SMOKE, overrides=[override])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kind": "vllm"}, "set python to start a server, or url"),
        ({"kind": "vllm", "python": "p", "url": "http://a"}, "and not both"),
        ({"kind": "vllm", "url": "http://a", "args": ["--x"]}, "runs already"),
        ({"kind": "vllm", "python": "p", "args": ["--dtype=half"]}, "LongArc sets itself"),
        ({"kind": "vllm", "python": "p", "args": ["--max_model_len", "9"]}, "LongArc sets itself"),
        ({"kind": "sglang", "python": "p", "args": ["--tp-size=2"]}, "LongArc sets itself"),
        ({"kind": "sglang", "python": "p", "update_from": "distributed"}, "needs group_address"),
        ({"kind": "sglang", "python": "p", "group_address": "a:1"}, "only used by"),
        ({"kind": "sglang", "python": "p", "device": "cuda:1"}, "is not used by"),
        ({"kind": "vllm", "url": "a:1"}, "https"),
        ({"kind": "vllm", "python": "p", "prefill_url": "http://p"}, "starts no pair of servers"),
        ({"kind": "sglang", "prefill_url": "http://p"}, "set python to start a server, or url"),
        ({"kind": "vllm", "url": "http://a", "prefill_url": "http://a/"}, "are both 'http://a'"),
        ({"kind": "vllm", "url": "http://a", "prefill_url": "a:1"}, "https"),
        (
            {
                "kind": "vllm",
                "url": "http://a",
                "prefill_url": "http://p",
                "on_update": "recompute",
            },
            'use "continue" or "finish"',
        ),
        ({"kind": "sglang", "url": "http://a", "prefill_url": "http://p"}, 'use "finish"'),
        (
            {
                "kind": "sglang",
                "url": "http://a",
                "prefill_url": "http://p",
                "on_update": "finish",
                "update_from": "tensor",
            },
            'with prefill_url use "disk"',
        ),
        ({"kind": "llama.cpp"}, "'embedded', 'vllm', 'sglang'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_the_way_out(settings, reason):
    with pytest.raises(ValidationError, match=reason):
        ANY.validate_python(settings)


def test_the_bound_of_the_probe_follows_the_dtype_unless_it_is_given():
    def bound(**settings):
        return VllmConfig(kind="vllm", python="p", **settings).probe_bound

    assert bound() == 0.002
    assert bound(dtype="bfloat16") == 0.15
    assert bound(dtype="bfloat16", max_probe_gap=0.03) == 0.03


SGLANG = "engine={kind='sglang',url='http://a:1'}"
VLLM = "engine={kind='vllm',python='p'}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([SGLANG, "stages.agentic_rl.rollout.top_p=0.9"], "rollout.top_p=0.9 cannot be sampled"),
        ([SGLANG, "stages.eval.rollout.top_k=3"], "stage 'eval': rollout.top_k=3 cannot be"),
        ([VLLM, "stages.distill.rollout.min_p=0.1"], "engine.args=['--return-sampling-mask']"),
        ([VLLM, "stages.agentic_rl.rollout.temperature=0.001"], "takes 0 or at least 0.01"),
        (
            [VLLM, "stages.midtrain.pattern={layers='FS',window=8}"],
            "cannot serve the hybrid that stages.midtrain.pattern makes",
        ),
    ],
)
def test_what_an_engine_from_elsewhere_can_never_sample_is_refused_in_the_recipe(overrides, said):
    with pytest.raises(ConfigError) as refused:
        load_settings(Recipe, SMOKE, overrides=overrides)
    assert said in str(refused.value)


def test_a_server_with_the_argument_for_it_may_leave_tokens_out():
    masked = "engine={kind='vllm',python='p',args=['--return-sampling-mask']}"
    load_settings(Recipe, SMOKE, overrides=[masked, "stages.agentic_rl.rollout.top_p=0.9"])
    running = "engine={kind='vllm',url='http://a:1'}"  # nobody here knows how it was started
    load_settings(Recipe, SMOKE, overrides=[running, "stages.agentic_rl.rollout.top_p=0.9"])
