"""``longarc models import``: checkpoints of ChatGLM2, ChatGLM3 and GLM-4-9B as ``transformers`` reads them."""

import argparse
from pathlib import Path

from longarc.cli._exit import ExitCode


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    parser.add_argument(
        "source", type=Path, metavar="CHATGLM", help="directory with config.json and *.safetensors"
    )
    parser.add_argument("target", type=Path, metavar="DIRECTORY", help="new or empty directory")
    parser.add_argument(
        "--rope-ratio-scales",
        choices=("base", "positions"),
        default="base",
        help="what rope_ratio of the config means, which it does not say: ChatGLM3 and GLM-4-9B multiply the "
        "base of the frequencies by it (the default), ChatGLM2-6B-32K divides positions by it",
    )


def run(arguments: argparse.Namespace) -> int:
    """Convert, and say what was written."""
    from longarc.models.elders.chatglm_files import convert_chatglm_dir

    target: Path = arguments.target
    convert_chatglm_dir(arguments.source, target, ratio_scales=arguments.rope_ratio_scales)
    print(f"{target}: {', '.join(sorted(path.name for path in target.iterdir()))}")
    print("The tokenizer is not converted; its code lies beside the checkpoint.")
    return ExitCode.OK
