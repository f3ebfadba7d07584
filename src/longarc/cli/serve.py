"""Serve a trained checkpoint over the OpenAI chat-completions protocol, and record every session.

Point any OpenAI client at the printed address; all requests there are one session, those to .../s/NAME/v1
the session NAME. Requests name the model RECIPE/STAGE or longarc; others get a 404. Ctrl-C stops the server and folds the sessions into the run's ledger; the commands that
print their tokens are shown then.

With --engine-only ids go in and ids come out, for the stages of a run whose recipe names the server in
engine.servers. RUN may be a Hugging Face directory then. The first Ctrl-C (or SIGTERM) lets running
requests end, a second one ends them.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from longarc.cli._exit import ExitCode
from longarc.cli._numbers import port, positive_int, seconds, temperature
from longarc.cli._recipe import recipe_of_run

if TYPE_CHECKING:
    from longarc.pipeline.serve_engine import EngineServerSettings

SUMMARY = "chat with what was trained, or sample from it"

_CHAT_ONLY = ("temperature", "max_new_tokens", "thinking", "model_name")
_ENGINE_ONLY = ("ranks", "attention", "drain_s", "records_routing")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments. What belongs to one kind of server alone is None unless it is given."""
    parser.add_argument(
        "run_dir", type=Path, nargs="?", default=Path("runs/quickstart"), metavar="RUN"
    )
    parser.add_argument(
        "--stage", help="whose final checkpoint; the newest finished one by default"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=port, default=8000, help="port; 0 takes a free one")
    parser.add_argument(
        "--api-key",
        help="the key clients must send; by default LONGARC_API_KEY, with --engine-only "
        "LONGARC_ENGINE_KEY, else one is made and printed",
    )
    parser.add_argument(
        "--max-context-tokens",
        type=positive_int,
        metavar="N",
        help="of a whole session, or of prompt and completion; 4096 or what the model can",
    )
    chat = parser.add_argument_group("chat")
    chat.add_argument("--temperature", type=temperature, help="unless a request says otherwise; 1")
    chat.add_argument("--max-new-tokens", type=positive_int, metavar="N", help="of one answer; 256")
    chat.add_argument(
        "--thinking", action="store_true", default=None, help="let answers begin with thinking"
    )
    chat.add_argument(
        "--model-name",
        action="append",
        metavar="NAME",
        help="one more name under which requests may ask for the model, for programs that send a fixed one; may be "
        "repeated",
    )
    engine = parser.add_argument_group("engine server")
    engine.add_argument("--engine-only", action="store_true", help="serve ids, not chat")
    engine.add_argument(
        "--ranks",
        type=positive_int,
        metavar="N",
        help="engines side by side, which share the cores, at most one for each (or 8); 1",
    )
    engine.add_argument(
        "--attention",
        choices=("dense", "sparse"),
        help="how a Hugging Face model attends; dense, so a model that a dsa stage trained needs sparse. A run's "
        "checkpoint knows",
    )
    engine.add_argument(
        "--records-routing",
        choices=("experts", "experts_and_keys"),
        help="keep what tokens are routed to, for stages with the same rollout.routing_replay; nothing",
    )
    engine.add_argument(
        "--drain-s",
        type=seconds,
        metavar="S",
        help="how long running requests may take when the server is told to stop; 60",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted."""
    _refuse_useless(arguments)
    return _serve_engine(arguments) if arguments.engine_only else _serve_chat(arguments)


def _refuse_useless(arguments: argparse.Namespace) -> None:
    from longarc.errors import ConfigError

    useless = _CHAT_ONLY if arguments.engine_only else _ENGINE_ONLY
    given = [name for name in useless if getattr(arguments, name) is not None]
    if given:
        option = "--" + given[0].replace("_", "-")
        raise ConfigError(
            f"{option} has no effect {'with' if arguments.engine_only else 'without'} --engine-only; "
            f"leave it out"
        )


def _serve_chat(arguments: argparse.Namespace) -> int:
    import asyncio

    from longarc.errors import ConfigError
    from longarc.pipeline.local import open_workspace, stopping_on_signals
    from longarc.pipeline.progress import ProgressLine
    from longarc.pipeline.serve import ServeSettings, serve

    if _is_weights(arguments.run_dir):
        raise ConfigError(
            f"{arguments.run_dir} is a Hugging Face directory and not a run, so it has no chat format: serve it "
            f"with --engine-only, or start a run from it (initial.path) and serve that"
        )
    if "" in (arguments.model_name or ()):
        raise ConfigError("--model-name is empty; give a name that requests send as their model")
    api_key, shown_key = _key(arguments, "LONGARC_API_KEY")
    recipe = recipe_of_run(arguments.run_dir)
    progress = ProgressLine()
    temperature = arguments.temperature
    settings = ServeSettings(
        stage=arguments.stage,
        host=arguments.host,
        port=arguments.port,
        api_key=api_key,
        temperature=1.0 if temperature is None else temperature,
        max_new_tokens=arguments.max_new_tokens or 256,
        max_context_tokens=arguments.max_context_tokens,
        thinking=bool(arguments.thinking),
        model_names=tuple(arguments.model_name or ()),
    )

    def on_ready(base_url: str, stage: str) -> None:
        progress.say(f"serving stage {stage!r}: base_url={base_url} api_key={shown_key}")

    def on_recorded(trajectory: str, num_turns: int) -> None:
        turns = f"{num_turns} turn" + ("" if num_turns == 1 else "s")
        progress.say(f"recorded {turns}: longarc runs show {arguments.run_dir} {trajectory}")

    with open_workspace(recipe, arguments.run_dir, resume=True, progress=progress) as workspace:

        async def work() -> None:
            with stopping_on_signals(workspace.stop):
                await serve(workspace, settings, on_ready=on_ready, on_recorded=on_recorded)

        asyncio.run(work())
    return ExitCode.OK


def _serve_engine(arguments: argparse.Namespace) -> int:
    import asyncio

    from longarc.config.engine import ENGINE_KEY
    from longarc.pipeline.local import stopping_on_signals
    from longarc.pipeline.progress import ProgressLine
    from longarc.pipeline.serve_engine import serve_engine

    api_key, shown_key = _key(arguments, ENGINE_KEY)
    settings = _engine_settings(arguments, api_key)
    recipe = None if _is_weights(arguments.run_dir) else recipe_of_run(arguments.run_dir)
    progress = ProgressLine()

    async def work() -> None:
        stop = asyncio.Event()
        with stopping_on_signals(stop):
            await serve_engine(
                arguments.run_dir,
                recipe,
                settings,
                stop=stop,
                on_ready=lambda address: progress.say(
                    f"serving the engine: address={address} key={shown_key}"
                ),
            )

    asyncio.run(work())
    return ExitCode.OK


def _is_weights(directory: Path) -> bool:
    """Say whether a directory holds a model in Hugging Face's form and no run."""
    return (directory / "config.json").is_file()


def _engine_settings(arguments: argparse.Namespace, api_key: str) -> "EngineServerSettings":
    from longarc.pipeline.serve_engine import EngineServerSettings

    drain_s: float | None = arguments.drain_s
    return EngineServerSettings(
        stage=arguments.stage,
        attention=arguments.attention,
        host=arguments.host,
        port=arguments.port,
        api_key=api_key,
        num_ranks=arguments.ranks or 1,
        max_context_tokens=arguments.max_context_tokens,
        records_routing=arguments.records_routing or "none",
        drain_s=60.0 if drain_s is None else drain_s,
    )


def _key(arguments: argparse.Namespace, variable: str) -> tuple[str, str]:
    """Return the key, and what is shown of it."""
    import os
    import secrets

    from longarc.errors import ConfigError

    if arguments.api_key == "":
        raise ConfigError("--api-key is empty; give a key, or leave the option out and one is made")
    given: str | None = arguments.api_key or os.environ.get(variable)
    key = given or secrets.token_urlsafe(16)
    return key, "(the one you gave)" if given else key
