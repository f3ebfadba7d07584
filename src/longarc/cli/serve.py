"""Serve a trained checkpoint over the OpenAI chat-completions protocol, and record every session.

Point any OpenAI client at the printed address. Ctrl-C stops the server and folds the sessions into the
run's ledger, where ``longarc runs show RUN SESSION`` prints their tokens.
"""

import argparse
from pathlib import Path

from longarc.cli._exit import ExitCode
from longarc.cli._numbers import port, positive_int, temperature
from longarc.cli._recipe import recipe_of_run

SUMMARY = "chat with what was trained"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
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
        help="the key clients must send; LONGARC_API_KEY by default, else one is made and printed",
    )
    parser.add_argument(
        "--temperature", type=temperature, default=1.0, help="unless a request says otherwise"
    )
    parser.add_argument(
        "--max-new-tokens", type=positive_int, default=256, metavar="N", help="of one answer"
    )
    parser.add_argument(
        "--max-context-tokens",
        type=positive_int,
        default=4096,
        metavar="N",
        help="of a whole session",
    )
    parser.add_argument("--thinking", action="store_true", help="let answers begin with thinking")


def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted."""
    import asyncio
    import os
    import secrets

    from longarc.config.stages import RolloutConfig
    from longarc.pipeline.local import open_workspace, stopping_on_signals
    from longarc.pipeline.progress import ProgressLine
    from longarc.pipeline.serve import ServeSettings, serve

    recipe = recipe_of_run(arguments.run_dir)
    given: str | None = arguments.api_key or os.environ.get("LONGARC_API_KEY")
    api_key = given or secrets.token_urlsafe(16)
    shown_key = "(the one you gave)" if given else api_key
    progress = ProgressLine()
    settings = ServeSettings(
        stage=arguments.stage,
        host=arguments.host,
        port=arguments.port,
        api_key=api_key,
        rollout=RolloutConfig(
            temperature=arguments.temperature,
            max_new_tokens=arguments.max_new_tokens,
            max_context_tokens=min(
                arguments.max_context_tokens, recipe.model.max_position_embeddings
            ),
        ),
        thinking=arguments.thinking,
    )

    def on_ready(base_url: str, stage: str) -> None:
        progress.say(f"serving stage {stage!r}: base_url={base_url} api_key={shown_key}")

    with open_workspace(recipe, arguments.run_dir, resume=True, progress=progress) as workspace:

        async def work() -> None:
            with stopping_on_signals(workspace.stop):
                await serve(workspace, settings, on_ready=on_ready)

        asyncio.run(work())
    return ExitCode.OK
