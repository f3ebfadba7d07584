"""ATIF documents as they are read: what has to be there, of which type, and what belongs together.

Fields that nothing here reads are left alone: programs add their own.

Source: Harbor RFC 0001, "Agent Trajectory Interchange Format", v1.8, and the pydantic models of harbor 0.26.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from longarc.config.settings import problems_of
from longarc.errors import ContractError

ATIF_VERSION: Final = "ATIF-v1.8"
"""What is written."""
_NEWEST_MINOR: Final = 8
_MAX_TOKEN_ID: Final = 2**31 - 1
_SHOWN_PROBLEMS: Final = 3

TokenId = Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class ContentPart(_Part):
    """A piece of a message."""

    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        if self.type != "text" or self.text is None:
            raise ValueError(f"a part of type {self.type!r}; only text can be read")
        return self


class ToolCallPart(_Part):
    """A call of a tool."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class ResultPart(_Part):
    """What came back; without content where it only refers to another trajectory."""

    source_call_id: str | None = None
    content: str | list[ContentPart] | None = None


class ObservationPart(_Part):
    """What the world answered to a step."""

    results: list[ResultPart]


class MetricsPart(_Part):
    """The tokens of a step."""

    prompt_token_ids: list[TokenId] | None = None
    completion_token_ids: list[TokenId] | None = None
    logprobs: list[float] | None = None

    @model_validator(mode="after")
    def _have_one_length(self) -> Self:
        ids, logprobs = self.completion_token_ids, self.logprobs
        if ids is not None and logprobs is not None and len(ids) != len(logprobs):
            raise ValueError(
                f"{len(ids)} completion_token_ids with {len(logprobs)} logprobs; each token has one"
            )
        return self


class StepPart(_Part):
    """One step."""

    step_id: int
    timestamp: str | None = None
    source: Literal["system", "user", "agent"]
    message: str | list[ContentPart]
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPart] | None = None
    observation: ObservationPart | None = None
    metrics: MetricsPart | None = None
    is_copied_context: bool | None = None
    llm_call_count: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _results_answer_calls(self) -> Self:
        known = {call.tool_call_id for call in self.tool_calls or ()}
        for result in self.observation.results if self.observation else ():
            if result.source_call_id is not None and result.source_call_id not in known:
                raise ValueError(
                    f"step {self.step_id} has a result of call {result.source_call_id!r}, but calls {sorted(known)}"
                )
        return self

    @property
    def was_sampled(self) -> bool:
        """Whether a model wrote it, here and not in an earlier trajectory."""
        return self.source == "agent" and not self.is_copied_context and self.llm_call_count != 0


class AgentPart(_Part):
    """Who acted."""

    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None


class Document(_Part):
    """One trajectory and those in it."""

    schema_version: str
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: AgentPart
    steps: list[StepPart] = Field(min_length=1)
    notes: str | None = None
    final_metrics: dict[str, Any] | None = None
    continued_trajectory_ref: str | None = None
    extra: dict[str, Any] | None = None
    subagent_trajectories: "list[Document] | None" = None

    @model_validator(mode="after")
    def _steps_are_all_there(self) -> Self:
        for position, step in enumerate(self.steps, start=1):
            if step.step_id != position:
                raise ValueError(
                    f"steps are numbered 1, 2, 3, ..., but step {position} is numbered {step.step_id}"
                )
        return self

    @model_validator(mode="after")
    def _inner_ones_have_names(self) -> Self:
        names = [inner.trajectory_id for inner in self.subagent_trajectories or ()]
        if None in names or len(set(names)) != len(names):
            raise ValueError(
                f"subagent_trajectories have trajectory_id {names}; each needs one of its own"
            )
        return self


def read_document(data: object, *, name: str) -> Document:
    """Return an ATIF document, v1.0 to v1.8.

    Args:
        data: the JSON of the root.
        name: what errors call it.

    Raises:
        ContractError: it is no such document, or holds what cannot be trained on (pictures, sounds).
    """
    check_version(data, name=name)
    try:
        return Document.model_validate(data)
    except ValidationError as error:
        said = problems_of(error).split("; ")
        more = f"; and {len(said) - _SHOWN_PROBLEMS} more" if len(said) > _SHOWN_PROBLEMS else ""
        raise ContractError(
            f"{name!r} is no valid ATIF document: {'; '.join(said[:_SHOWN_PROBLEMS])}{more}"
        ) from error


def check_version(data: object, *, name: str) -> None:
    """Refuse what is no ATIF document of a version that can be read.

    Raises:
        ContractError: it is not.
    """
    if not isinstance(data, Mapping):
        raise ContractError(
            f"{name!r} holds a {type(data).__name__}; an ATIF document is a JSON object"
        )
    stated = data.get("schema_version")
    minor = str(stated).removeprefix("ATIF-v1.")
    is_known = str(stated).startswith("ATIF-v1.") and minor.isascii() and minor.isdigit()
    if not is_known or len(minor) > 3 or int(minor) > _NEWEST_MINOR:
        raise ContractError(
            f"{name!r} has schema_version {stated!r}; ATIF-v1.0 to ATIF-v1.{_NEWEST_MINOR} can be read"
        )
