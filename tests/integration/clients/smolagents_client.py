"""An agent of ``smolagents``; ``MODE`` is tools (tools are called) or code (code is written and run)."""

import os
import subprocess
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def bash(command: str) -> str:
    """Run a command.

    Args:
        command: for bash.
    """
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=20)
    return done.stdout + done.stderr


def main():
    model = OpenAIServerModel(
        model_id=os.environ["LONGARC_MODEL"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )
    kind = CodeAgent if os.environ["MODE"] == "code" else ToolCallingAgent
    agent = kind(tools=[bash], model=model, max_steps=8)
    answer = agent.run(sys.stdin.read())
    with open(os.environ["LONGARC_ANSWER"], "w") as file:
        file.write(str(answer))


main()
