"""What ATIF v1.8 demands of a document, spelt out for tests.

The rules are those of Harbor RFC 0001 and of the pydantic models of harbor 0.26, which need Python 3.12; where
that package can be imported, ``tests/integration/test_harbor.py`` asks the models themselves.
"""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

_DOCUMENT = {
    *("schema_version", "session_id", "trajectory_id", "agent", "steps", "notes"),
    *("final_metrics", "continued_trajectory_ref", "extra", "subagent_trajectories"),
}
_AGENT = {"name", "version", "model_name", "tool_definitions", "extra"}
_STEP = {
    *("step_id", "timestamp", "source", "model_name", "reasoning_effort", "message"),
    *("reasoning_content", "tool_calls", "observation", "metrics", "is_copied_context"),
    *("llm_call_count", "extra"),
}
_AGENTS_ALONE = {"model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics"}
_METRICS = {
    *("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd", "prompt_token_ids"),
    *("completion_token_ids", "logprobs", "extra"),
}
_RESULT = {"source_call_id", "content", "subagent_trajectory_ref", "extra"}
_CALL = {"tool_call_id", "function_name", "arguments", "extra"}
_TOTALS = {
    *("total_prompt_tokens", "total_completion_tokens", "total_cached_tokens"),
    *("total_cost_usd", "total_steps", "extra"),
}


def broken_rules(document: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a document, in words; nothing where it is valid."""
    return list(_document(document, "root"))


def _document(document: Mapping[str, Any], at: str) -> Iterator[str]:
    yield from _only(document, _DOCUMENT, at, needs={"schema_version", "agent", "steps"})
    if document["schema_version"] != "ATIF-v1.8":
        yield f"{at}: schema_version {document['schema_version']!r}"
    yield from _only(document["agent"], _AGENT, f"{at}.agent", needs={"name", "version"})
    yield from _only(document.get("final_metrics", {}), _TOTALS, f"{at}.final_metrics")
    if not document["steps"]:
        yield f"{at}: no steps"
    for position, step in enumerate(document["steps"], start=1):
        if step["step_id"] != position:
            yield f"{at}: step {position} is numbered {step['step_id']}"
        yield from _step(step, f"{at}.steps[{position - 1}]")
    inner = document.get("subagent_trajectories", [])
    names = [one.get("trajectory_id") for one in inner]
    if None in names or len(set(names)) != len(names):
        yield f"{at}: names of inner documents {names}"
    for number, one in enumerate(inner):
        yield from _document(one, f"{at}.subagent_trajectories[{number}]")


def _step(step: Mapping[str, Any], at: str) -> Iterator[str]:
    yield from _only(step, _STEP, at, needs={"step_id", "source", "message"})
    if step["source"] not in ("system", "user", "agent"):
        yield f"{at}: source {step['source']!r}"
    if step["source"] != "agent" and step.keys() & _AGENTS_ALONE:
        yield f"{at}: {sorted(step.keys() & _AGENTS_ALONE)} of a step of the {step['source']}"
    if not isinstance(step["message"], str):
        yield f"{at}: message {step['message']!r}"
    if "timestamp" in step:
        datetime.fromisoformat(step["timestamp"])
    yield from _calls_and_results(step, at)
    yield from _metrics(step.get("metrics", {}), f"{at}.metrics")


def _calls_and_results(step: Mapping[str, Any], at: str) -> Iterator[str]:
    for call in step.get("tool_calls", ()):
        yield from _only(
            call, _CALL, f"{at}.tool_calls", needs={"tool_call_id", "function_name", "arguments"}
        )
        if not isinstance(call["arguments"], dict):
            yield f"{at}: arguments {call['arguments']!r}"
    calls = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    for result in step.get("observation", {}).get("results", ()):
        yield from _only(result, _RESULT, f"{at}.observation")
        if result.get("source_call_id") not in {None, *calls}:
            yield f"{at}: a result of {result['source_call_id']!r}, which was not called"
        for reference in result.get("subagent_trajectory_ref", ()):
            if not reference.keys() & {"trajectory_id", "trajectory_path"}:
                yield f"{at}: a reference to nothing"


def _metrics(metrics: Mapping[str, Any], at: str) -> Iterator[str]:
    yield from _only(metrics, _METRICS, at)
    for name in ("prompt_token_ids", "completion_token_ids"):
        if not all(type(i) is int for i in metrics.get(name, ())):
            yield f"{at}: {name} {metrics[name]!r}"
    if not all(type(p) in (int, float) for p in metrics.get("logprobs", ())):
        yield f"{at}: logprobs {metrics['logprobs']!r}"


def _only(
    value: Mapping[str, Any], known: set[str], at: str, *, needs: set[str] = frozenset()
) -> Iterator[str]:
    for name in value.keys() - known:
        yield f"{at}: unknown field {name!r}"
    for name in needs - value.keys():
        yield f"{at}: no {name!r}"
    for name in value:
        if value[name] is None:
            yield f"{at}: {name} is null"
