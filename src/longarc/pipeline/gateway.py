"""The gateway alone: before any engine, without a run and without torch.

::

    agents --chat APIs, a key each--> gateway --ids--> engine servers of LongArc, vLLM or SGLang
                                        |  every turn is in its session's file before it is answered
    trainer --mint, segments, weights--> admin door
"""

import asyncio
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from longarc.gateway.admin import AdminDoor
from longarc.gateway.core import Gateway
from longarc.gateway.durable import DurableSessions, SessionSpec
from longarc.gateway.http import HttpSettings, build_app
from longarc.gateway.meter import Meter
from longarc.gateway.server import bound_socket, serving
from longarc.gateway.turn_files import TurnFiles
from longarc.pipeline.upstream import UpstreamSettings, open_upstream
from longarc.records.sampling import Sampling
from longarc.tokens.chat_format import ChatFormat
from longarc.tokens.formats import make_chat_format
from longarc.tokens.template_source import TemplateSource
from longarc.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """How a gateway alone runs."""

    upstream: UpstreamSettings
    chat_format: str
    """As in ``longarc.tokens.formats``."""
    template: Path | None
    """Where the template of the format ``template`` is; None looks into the model's directory."""
    sessions: Path
    """Directory of the turn logs; what is in it is served again."""
    host: str
    port: int
    """0 takes a free one."""
    admin_key: str
    temperature: float
    """Unless a session is minted with another one; as the following."""
    max_new_tokens: int
    """Of one answer [tokens]."""
    thinking: bool
    model_names: tuple[str, ...]
    """What ``/v1/models`` lists."""
    drain_s: float
    """How long running requests may take to end once the gateway is told to stop [seconds]."""


async def run_gateway(
    settings: GatewaySettings, *, stop: asyncio.Event, on_ready: Callable[[str, int], None]
) -> None:
    """Serve until ``stop`` is set, then let running requests end.

    Args:
        settings: what and where.
        stop: ends it.
        on_ready: told the base URL and how many sessions were brought back, once requests are answered.

    Raises:
        CheckpointError: the model's directory has no tokenizer, or one without the format's control tokens.
        ConfigError: an option does not fit the engines, there is no such chat format or no template, or another gateway has the sessions.
        ContractError: a file of the sessions is damaged.
        ResourceError: the address or the directory cannot be had.
        EngineLostError: an engine does not answer.
    """
    chat_format = _chat_format(settings)
    with closing(TurnFiles(settings.sessions)) as files:
        listener = bound_socket(settings.host, settings.port)
        with closing(listener):
            async with open_upstream(settings.upstream) as upstream:
                gateway = Gateway(upstream.engine, chat_format, turn_log=files.append)
                sessions = DurableSessions(files, gateway)
                app = build_app(gateway, sessions, HttpSettings(models=settings.model_names))
                meter = Meter(app)
                defaults = SessionSpec(
                    sampling=Sampling(
                        temperature=settings.temperature, max_new_tokens=settings.max_new_tokens
                    ),
                    thinking=settings.thinking,
                    max_context_tokens=upstream.max_context_tokens,
                )
                admin = AdminDoor(gateway, sessions, defaults, meter, admin_key=settings.admin_key)
                app.router.routes.extend(admin.routes())
                async with serving(meter, listener, grace_s=round(settings.drain_s)) as base_url:
                    on_ready(base_url, sessions.num_open)
                    await stop.wait()


def _chat_format(settings: GatewaySettings) -> ChatFormat:
    directory = settings.upstream.model_directory
    template = None
    if settings.chat_format == "template":
        template = TemplateSource.read(settings.template or directory, values={}, date=None)
    return make_chat_format(settings.chat_format, Tokenizer.load(directory), template=template)
