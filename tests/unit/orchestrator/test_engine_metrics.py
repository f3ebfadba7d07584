"""What a step reports of the engine: differences of counters, and the pages as they are."""

from dataclasses import replace

from longarc.orchestrator.metrics import engine_metrics
from longarc.records.metric import combine
from longarc.records.sampling import EngineHealth

BEFORE = EngineHealth(
    is_ready=True,
    policy_version=0,
    num_running=0,
    num_waiting=0,
    num_sampled_tokens=100,
    num_prompt_tokens=1000,
    num_cached_tokens=900,
    num_preemptions=2,
)


def test_a_step_says_what_the_cache_saved_and_who_gave_up_pages():
    after = replace(
        BEFORE,
        num_sampled_tokens=150,
        num_prompt_tokens=1200,
        num_cached_tokens=950,
        num_preemptions=5,
        num_used_pages=1,
        num_cached_pages=2,
        num_free_pages=1,
        busy_s=1.5,
    )
    assert after.prefill_tokens_saved_frac == 950 / 1200
    assert combine(engine_metrics(BEFORE, after, step_s=2.0)) == {
        "throughput/sampled_tokens_per_s": 25.0,
        "engine/prefill_tokens_saved_frac": 0.25,
        "engine/preemptions": 3,
        "engine/used_pages_frac": 0.25,
        "engine/cached_pages_frac": 0.5,
        "loop/engine_idle_frac": 0.25,
    }


def test_an_engine_that_does_not_tell_of_pages_reports_none():
    found = combine(engine_metrics(BEFORE, BEFORE, step_s=1.0))
    assert not any("pages" in name for name in found)
    assert BEFORE.num_pages == 0
    assert replace(BEFORE, num_prompt_tokens=0, num_cached_tokens=0).prefill_tokens_saved_frac == 0


def test_a_step_says_how_long_an_update_took_and_how_long_decoding_stood_still_for_it():
    before = replace(BEFORE, num_updates=3, update_s=9.0, update_pause_s=0.25)
    after = replace(before, num_updates=5, update_s=12.0, update_pause_s=0.75)
    found = combine(engine_metrics(before, after, step_s=1.0))
    assert (found["engine/update_s"], found["engine/update_pause_s"]) == (1.5, 0.25)
    none = combine(engine_metrics(before, before, step_s=1.0))
    assert not any("update" in name for name in none)
