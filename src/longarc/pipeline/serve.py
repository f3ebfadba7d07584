"""Chat with what was trained: engine and gateway over a checkpoint, every session in the ledger.

A session's turns are durable before they are answered. When the server stops, each session becomes a
trajectory with disposition ``served``; sessions that a crash left behind become one at the next start.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from longarc.config.rollout import RolloutConfig
from longarc.errors import ConfigError, boundary
from longarc.gateway.access import ServeAccess
from longarc.gateway.core import Gateway
from longarc.gateway.http import HttpSettings, build_app
from longarc.gateway.recorded import recorded
from longarc.gateway.server import bound_socket
from longarc.gateway.server import serving as http_serving
from longarc.gateway.session import GatewaySession
from longarc.pipeline.engines import raise_failure, served_context_tokens, stopped_or_failed
from longarc.pipeline.rl import sampling_of, serving
from longarc.pipeline.workspace import Loaded, Workspace
from longarc.records.outcome import Disposition, Outcome
from longarc.runs.ledger import Ledger

STAGE = "serve"
"""What the ledger calls served sessions."""
MODEL_ALIAS = "longarc"
"""Name under which every chat server gives the model that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How a checkpoint is served."""

    stage: str | None
    """Stage whose final checkpoint is served; None = the newest one that is finished."""
    host: str
    port: int
    """0 takes a free one."""
    api_key: str
    temperature: float
    """Unless a request says otherwise."""
    max_new_tokens: int
    """Of one answer, unless a request says otherwise [tokens]."""
    max_context_tokens: int | None
    """Of a whole session [tokens]; None = what the model can, at most 4096."""
    thinking: bool = False
    """Whether answers open with a thinking block unless the request says otherwise."""
    model_names: tuple[str, ...] = ()
    """More names under which requests may ask for the model."""


async def serve(
    workspace: Workspace,
    settings: ServeSettings,
    *,
    on_ready: Callable[[str, str], None],
    on_recorded: Callable[[str, int], None] | None = None,
) -> None:
    """Serve until the workspace's ``stop`` is set or the engine has failed.

    Args:
        workspace: the run.
        settings: what and where.
        on_ready: told the base URL and the stage once requests are answered.
        on_recorded: told the id and the turns of each session that became a trajectory, also of one that an
            earlier server left behind.

    Raises:
        ConfigError: no stage is finished, or the asked one is not; or the model cannot do so many tokens.
        ResourceError: the address cannot be had.
        EngineError: the engine failed; its sessions are recorded.
    """
    stage = served_stage(workspace, settings.stage)
    loaded = workspace.load(workspace.final(stage))
    rollout = _rollout(settings, loaded)
    listener = bound_socket(settings.host, settings.port)
    async with serving(
        workspace,
        loaded,
        rollout,
        policy_version=loaded.manifest.policy_version,
        num_threads=workspace.recipe.threads,
        logs_turns=True,
    ) as served:
        sessions = _ServedSessions(
            workspace.ledger, served.gateway, rollout, settings.thinking, on_recorded
        )
        await sessions.recover()
        access = ServeAccess([settings.api_key], sessions.open)
        app = build_app(
            served.gateway,
            access,
            HttpSettings(
                models=served_names(workspace.recipe.name, stage, settings.model_names),
                takes_other_models=False,
                honours_sampling=True,
            ),
        )
        try:
            async with http_serving(app, listener) as base_url:
                on_ready(f"{base_url}/v1", stage)
                await stopped_or_failed(workspace.stop, [served.engine])
        finally:
            await sessions.close()
        raise_failure([served.engine])


@dataclass(slots=True)
class _ServedSessions:
    """Sessions that people opened, until they are recorded."""

    ledger: Ledger
    gateway: Gateway
    rollout: RolloutConfig
    thinking: bool
    on_recorded: Callable[[str, int], None] | None
    _opened_at_s: dict[str, float] = field(default_factory=dict)
    """Start of each open session [seconds since the epoch]."""

    def open(self, name: str) -> GatewaySession:
        """Open the session of a key and name under an id that was never used before."""
        number = 0
        while (
            self.ledger.row(f"{STAGE}/{name}/{number}")
            or f"{STAGE}/{name}/{number}" in self._opened_at_s
        ):
            number += 1
        return self._open(f"{STAGE}/{name}/{number}")

    async def recover(self) -> None:
        """Record the sessions of a server that was killed."""
        for session_id in self.ledger.logged_sessions(prefix=f"{STAGE}/"):
            session = self.gateway.restore(
                session_id,
                self.ledger.turns(session_id),
                sampling=sampling_of(self.rollout, self.gateway),
                thinking=self.thinking,
                max_context_tokens=self.rollout.max_context_tokens,
            )
            self._opened_at_s[session_id] = time.time()
            await self._record(session_id, session)

    async def close(self) -> None:
        """Record every open session."""
        for session_id in list(self._opened_at_s):
            await self._record(session_id, self.gateway.session(session_id))

    def _open(self, session_id: str) -> GatewaySession:
        session = self.gateway.open(
            session_id,
            sampling=sampling_of(self.rollout, self.gateway),
            thinking=self.thinking,
            max_context_tokens=self.rollout.max_context_tokens,
        )
        self._opened_at_s[session_id] = time.time()
        return session

    async def _record(self, session_id: str, session: GatewaySession) -> None:
        started_at_s = self._opened_at_s.pop(session_id)
        await session.close()
        if session.num_turns:
            trajectory = recorded(
                session,
                stage=STAGE,
                outcome=Outcome.COMPLETED,
                started_at_s=started_at_s,
                duration_s=time.time() - started_at_s,
            )
            self.ledger.complete(trajectory, disposition=Disposition.SERVED)
            if self.on_recorded is not None:
                self.on_recorded(session_id, session.num_turns)


def served_names(recipe: str, stage: str, more: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names under which a stage of a run is asked for, its own first."""
    return tuple(dict.fromkeys([f"{recipe}/{stage}", MODEL_ALIAS, *more]))


def _rollout(settings: ServeSettings, loaded: Loaded) -> RolloutConfig:
    max_context_tokens = served_context_tokens(settings.max_context_tokens, loaded.model.config)
    with boundary(ConfigError, f"a session of {max_context_tokens} tokens (--max-context-tokens)"):
        return RolloutConfig(
            temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens,
            max_context_tokens=max_context_tokens,
        )


def served_stage(workspace: Workspace, stage: str | None) -> str:
    """Return the stage whose final checkpoint is served: the asked one, or the newest that is finished.

    Raises:
        ConfigError: no stage is finished, or the asked one is not.
    """
    finished = [
        name
        for name, config in workspace.recipe.stages.items()
        if config.kind != "eval" and workspace.run.stage(name).final() is not None
    ]
    if not finished:
        raise ConfigError(
            f"{workspace.run.path} has no finished training stage to serve; run or resume it first"
        )
    if stage is not None and stage not in finished:
        raise ConfigError(
            f"--stage {stage!r} is no finished training stage of {workspace.run.path}; there are {finished}"
        )
    return stage or finished[-1]
