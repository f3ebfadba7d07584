"""Let an agent program work on a task in a sandbox, with a model of yours behind it, and keep every token.

longarc agent run --harness claude-code --run runs/quickstart -- "Say hello"
longarc agent run --harness codex --upstream http://127.0.0.1:8000 --model MODEL --chat-format glm-5 --out first -- "Fix it"

The program runs in a box whose only network is the gateway. Its trajectory goes into the ledger of --run, and with
--out into a directory: segments.jsonl, trajectory.json, and the workspace as the program left it. Recipes train with
the same programs: harness = "claude-code" under [tasks.NAME].
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from longarc.cli._exit import ExitCode
from longarc.cli._numbers import natural_int, positive_int, seconds, temperature
from longarc.errors import ConfigError

if TYPE_CHECKING:
    from longarc.config.harness import HarnessConfig
    from longarc.pipeline.agent import AgentRun, AgentSettings

SUMMARY = "let Claude Code, Codex or your own agent work on a task, and keep every token"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add run."""
    from longarc.config.harness_names import HARNESSES

    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    run_parser = actions.add_parser("run", help="run a program on one task", allow_abbrev=False)
    add = run_parser.add_argument
    add(
        "--harness",
        required=True,
        metavar="NAME",
        help=f"the program: {', '.join(HARNESSES)}, or package.module:Class of your own",
    )
    add("--program", type=Path, metavar="PATH", help="where it is; .agents/NAME, then PATH")
    add(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help='a setting of the harness, as in a recipe, e.g. settings.arguments=["--tools","Bash"]; may be repeated',
    )
    add("--workspace", type=Path, metavar="DIR", help="its files are copied into the box")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="where segments, trajectory and workspace are written",
    )
    add("--timeout-s", type=seconds, default=600.0, metavar="S", help="of the program; 600")
    add("--max-requests", type=positive_int, default=64, metavar="N", help="that are answered; 64")
    model = run_parser.add_argument_group("the model: of a run, or behind engine servers")
    model.add_argument("--run", type=Path, metavar="RUN", help="a run whose checkpoint answers")
    model.add_argument("--stage", help="whose final checkpoint; the newest finished one by default")
    model.add_argument(
        "--upstream", action="append", metavar="URL", help="an engine server; may be repeated"
    )
    model.add_argument(
        "--model", type=Path, metavar="DIR", help="of --upstream: its tokenizer.json"
    )
    model.add_argument(
        "--engine",
        choices=("longarc", "vllm", "sglang"),
        help="what the upstreams are; longarc is longarc serve --engine-only",
    )
    model.add_argument("--chat-format", metavar="NAME", help="of --upstream, as in longarc gateway")
    model.add_argument(
        "--policy-version", type=natural_int, metavar="N", help="of vLLM's or SGLang's weights"
    )
    sampling = run_parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=temperature, default=1.0, help="1")
    sampling.add_argument("--seed", type=natural_int, metavar="N", help="a new one by default")
    sampling.add_argument(
        "--max-new-tokens", type=positive_int, default=1024, metavar="N", help="1024"
    )
    sampling.add_argument(
        "--max-context-tokens", type=positive_int, metavar="N", help="what model or engines can"
    )
    sampling.add_argument("--thinking", action="store_true", help="let answers begin with thinking")
    add("task", nargs="+", metavar="-- TASK", help="what the program is told")


def run(arguments: argparse.Namespace) -> int:
    """Run the program, and say what came of it."""
    settings = _settings(arguments)
    done = (
        _upstream(arguments, settings) if arguments.upstream else _checkpoint(arguments, settings)
    )
    if arguments.out is not None:
        done.write(arguments.out)
    _tell(arguments, done)
    return ExitCode.OK if done.trajectory.outcome.is_trainable else ExitCode.FAILED


def _settings(arguments: argparse.Namespace) -> "AgentSettings":
    from longarc.pipeline.agent import AgentSettings, files_below

    if (arguments.run is None) == (not arguments.upstream):
        raise ConfigError("give --run RUN or --upstream URL: one of them says which model answers")
    only_upstream = ("model", "engine", "chat_format", "policy_version")
    useless = ("stage",) if arguments.upstream else only_upstream
    for name in useless:
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect with {'--upstream' if arguments.upstream else '--run'}; "
                f"leave it out"
            )
    if arguments.upstream and None in (arguments.model, arguments.chat_format, arguments.out):
        raise ConfigError("--upstream needs --model DIR, --chat-format NAME and --out DIR")
    if arguments.out is not None and arguments.out.exists():
        raise ConfigError(f"--out {arguments.out} exists already; give a directory that does not")
    return AgentSettings(
        harness=_harness(arguments),
        task=" ".join(arguments.task),
        files={} if arguments.workspace is None else files_below(arguments.workspace),
        temperature=arguments.temperature,
        max_new_tokens=arguments.max_new_tokens,
        max_context_tokens=arguments.max_context_tokens,
        thinking=arguments.thinking,
        seed=arguments.seed,
    )


def _harness(arguments: argparse.Namespace) -> "HarnessConfig":
    from longarc.config.harness import HarnessConfig
    from longarc.config.loader import apply_override, validated
    from longarc.pipeline.harness import make_harness

    tree: dict[str, object] = {
        "kind": arguments.harness,
        "max_requests": arguments.max_requests,
        "timeout_s": arguments.timeout_s,
        "settings": {} if arguments.program is None else {"program": str(arguments.program)},
    }
    for override in arguments.overrides:
        apply_override(tree, override)
    config = validated(HarnessConfig, tree, source="--harness", overrides=arguments.overrides)
    make_harness(config, where="--harness")  # before a model is loaded
    return config


def _checkpoint(arguments: argparse.Namespace, settings: "AgentSettings") -> "AgentRun":
    import asyncio

    from longarc.cli._recipe import recipe_of_run
    from longarc.pipeline.agent_checkpoint import run_on_checkpoint
    from longarc.pipeline.local import open_workspace
    from longarc.pipeline.progress import ProgressLine

    recipe = recipe_of_run(arguments.run)
    with open_workspace(recipe, arguments.run, resume=True, progress=ProgressLine()) as workspace:
        return asyncio.run(run_on_checkpoint(workspace, settings, stage=arguments.stage))


def _upstream(arguments: argparse.Namespace, settings: "AgentSettings") -> "AgentRun":
    import asyncio
    import os

    from longarc.config.engine import ENGINE_KEY
    from longarc.config.format_names import format_name
    from longarc.pipeline.agent import run_upstream
    from longarc.pipeline.gateway import format_of
    from longarc.pipeline.upstream import UpstreamSettings

    try:
        name = format_name(arguments.chat_format)
    except ValueError as error:
        raise ConfigError(f"--chat-format {error}") from error
    upstream = UpstreamSettings(
        kind=arguments.engine or "longarc",
        addresses=tuple(dict.fromkeys(arguments.upstream)),
        key=os.environ.get(ENGINE_KEY) or None,
        model_directory=arguments.model,
        max_context_tokens=arguments.max_context_tokens,
        policy_version=arguments.policy_version,
    )
    chat_format = format_of(name, arguments.model, template=None)
    return asyncio.run(run_upstream(upstream, chat_format, settings))


def _tell(arguments: argparse.Namespace, done: "AgentRun") -> None:
    trajectory = done.trajectory
    print(
        f"{trajectory.outcome}: {trajectory.num_turns} turns in {trajectory.duration_s:.1f} s"
        + (f"; {trajectory.error}" if trajectory.error else "")
    )
    for segment in trajectory.segments:
        of = (
            segment.agent_id
            if segment.window == 0
            else f"{segment.agent_id}, window {segment.window}"
        )
        print(
            f"segment {segment.order}: {segment.kind} of {of}, {len(segment.token_ids)} tokens, "
            f"{segment.num_trained_tokens} of them trained"
        )
    if trajectory.messages and trajectory.messages[-1].content:
        print(f"\n{trajectory.messages[-1].content.strip()}\n")
    if arguments.run is not None:
        print(f"recorded: longarc runs show {arguments.run} {trajectory.id}")
    if arguments.out is not None:
        print(f"written: {arguments.out}")
