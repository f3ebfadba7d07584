"""Stand between any agent and any engine: chat APIs on one side, token ids on the other, exact segments out.

MODEL is a directory with the model's tokenizer.json (and its config.json for vLLM and SGLang). Rollouts get
their keys from POST /admin/sessions; an agent is pointed at the base_url that comes with one. Segments are
fetched from GET /admin/sessions/ID/segments. Sessions survive any end of the process: started again on the
same --sessions, the gateway goes on with them. Ctrl-C (or SIGTERM) lets running requests end, a second one
does not. docs/guides/gateway-standalone.md has examples.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from longarc.cli._exit import ExitCode
from longarc.cli._numbers import natural_int, port, positive_int, seconds, temperature

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable

    from longarc.pipeline.gateway import GatewaySettings

SUMMARY = "record agents token for token, before any engine"

ADMIN_KEY = "LONGARC_ADMIN_KEY"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    from longarc.config.format_names import FORMAT_NAMES

    parser.add_argument("model", type=Path, metavar="MODEL", help="directory with tokenizer.json")
    parser.add_argument(
        "--upstream",
        action="append",
        required=True,
        metavar="URL",
        help="an engine server, http://host:port; may be repeated, and sessions are spread over them",
    )
    parser.add_argument(
        "--engine",
        choices=("longarc", "vllm", "sglang"),
        default="longarc",
        help="what the upstreams are; longarc is longarc serve --engine-only",
    )
    parser.add_argument(
        "--prefill",
        action="append",
        default=[],
        metavar="URL",
        help="of vLLM or SGLang: a server that prefills for an --upstream, which then only decodes; one for each, in "
        "the same order",
    )
    parser.add_argument(
        "--chat-format",
        type=_chat_format,
        required=True,
        metavar="NAME",
        help=f"how the model writes chats: {', '.join(FORMAT_NAMES)}, or package.module:name of a format or Renderer; "
        f"template is the model's own",
    )
    parser.add_argument(
        "--template",
        type=Path,
        metavar="PATH",
        help="with --chat-format template: a Jinja file, or a directory that has one; MODEL",
    )
    parser.add_argument(
        "--sessions",
        type=Path,
        default=Path("sessions"),
        metavar="DIR",
        help="where turns are written; sessions",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=port, default=8100, help="port; 0 takes a free one")
    parser.add_argument(
        "--admin-key",
        help=f"the key of /admin; by default {ADMIN_KEY}, else one is made and printed. The engines' own key is "
        f"LONGARC_ENGINE_KEY",
    )
    parser.add_argument(
        "--policy-version",
        type=natural_int,
        metavar="N",
        help="optimizer steps in the weights that vLLM or SGLang have now; LongArc's own engines know theirs",
    )
    parser.add_argument(
        "--drain-s",
        type=seconds,
        default=60.0,
        metavar="S",
        help="how long running requests may take when the gateway is told to stop; 60",
    )
    sampling = parser.add_argument_group("sessions that are minted without values of their own")
    sampling.add_argument("--temperature", type=temperature, default=1.0, help="1")
    sampling.add_argument(
        "--max-new-tokens", type=positive_int, default=4096, metavar="N", help="of one answer; 4096"
    )
    sampling.add_argument(
        "--max-context-tokens",
        type=positive_int,
        metavar="N",
        help="of a session; what the engines can",
    )
    sampling.add_argument("--thinking", action="store_true", help="let answers begin with thinking")
    sampling.add_argument(
        "--model-name",
        action="append",
        metavar="NAME",
        help="a name that /v1/models lists, for programs that look; may be repeated; longarc",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted."""
    import asyncio

    from longarc.pipeline.gateway import run_gateway
    from longarc.pipeline.signals import stopping_on_signals

    settings, shown_key = _settings(arguments)

    def on_ready(base_url: str, num_open: int) -> None:
        print(
            f"gateway: address={base_url} admin_key={shown_key} sessions={num_open} in {arguments.sessions}",
            flush=True,
        )

    async def work() -> None:
        stop = asyncio.Event()
        with stopping_on_signals(stop):
            await run_gateway(settings, stop=stop, on_ready=on_ready)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(work())
    return ExitCode.OK


def _chat_format(text: str) -> str:
    from longarc.config.format_names import format_name

    try:
        return format_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _loop_factory() -> "Callable[[], AbstractEventLoop] | None":
    """Return uvloop's, where it is installed: it is on Linux."""
    from importlib.util import find_spec

    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


def _settings(arguments: argparse.Namespace) -> "tuple[GatewaySettings, str]":
    import os
    import secrets

    from longarc.config.engine import ENGINE_KEY
    from longarc.errors import ConfigError
    from longarc.pipeline.gateway import GatewaySettings
    from longarc.pipeline.upstream import UpstreamSettings

    if arguments.admin_key == "":
        raise ConfigError(
            "--admin-key is empty; give a key, or leave the option out and one is made"
        )
    if arguments.template is not None and arguments.chat_format != "template":
        raise ConfigError(
            f"--template is for --chat-format template; {arguments.chat_format} reads no template, so leave it out"
        )
    if "" in (arguments.model_name or ()):
        raise ConfigError("--model-name is empty; give a name that programs send as their model")
    given: str | None = arguments.admin_key or os.environ.get(ADMIN_KEY)
    key = given or secrets.token_urlsafe(24)
    settings = GatewaySettings(
        upstream=UpstreamSettings(
            kind=arguments.engine,
            addresses=tuple(dict.fromkeys(arguments.upstream)),
            prefill_addresses=tuple(dict.fromkeys(arguments.prefill)),
            key=os.environ.get(ENGINE_KEY) or None,
            model_directory=arguments.model,
            max_context_tokens=arguments.max_context_tokens,
            policy_version=arguments.policy_version,
        ),
        chat_format=arguments.chat_format,
        template=arguments.template,
        sessions=arguments.sessions,
        host=arguments.host,
        port=arguments.port,
        admin_key=key,
        temperature=arguments.temperature,
        max_new_tokens=arguments.max_new_tokens,
        thinking=arguments.thinking,
        model_names=tuple(arguments.model_name or ("longarc",)),
        drain_s=arguments.drain_s,
    )
    return settings, "(the one you gave)" if given else key
