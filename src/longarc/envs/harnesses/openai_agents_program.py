"""An agent over the OpenAI Agents SDK that works in a shell; the task comes on standard input.

It runs inside a box, with the SDK and without LongArc: ``agent.py chat|responses MODEL INSTRUCTIONS``.
"""

import asyncio
import subprocess
import sys

from agents import (  # type: ignore[import-not-found]
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

INSTRUCTIONS = "You solve the user's task in a shell. Call bash until it is solved, then answer."
MAX_TURNS = 1000
"""The gateway counts requests; this is no bound of its own."""


@function_tool  # type: ignore[untyped-decorator]
def bash(command: str) -> str:
    """Run a command in the workspace and return what it prints.

    Args:
        command: for bash.
    """
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, errors="replace", timeout=120
    )
    return (done.stdout + done.stderr)[-10_000:]


def main() -> None:
    """Run the agent and print its answer."""
    api, model, instructions = sys.argv[1:4]
    kind = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
    agent = Agent(
        name="shell",
        instructions=instructions or INSTRUCTIONS,
        tools=[bash],
        model=kind(model=model, openai_client=AsyncOpenAI()),
    )
    result = asyncio.run(Runner.run(agent, sys.stdin.read(), max_turns=MAX_TURNS))
    sys.stdout.write(f"{result.final_output}\n")


if __name__ == "__main__":
    main()
