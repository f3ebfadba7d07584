"""An agent loop over ``litellm``; ``MODE`` is the provider: openai, hosted_vllm or anthropic."""

import json
import os
import subprocess
import sys

import litellm

PROVIDER = os.environ["MODE"]
MODEL = f"{PROVIDER}/{os.environ['LONGARC_MODEL']}"
BASE = os.environ["ANTHROPIC_BASE_URL" if PROVIDER == "anthropic" else "OPENAI_BASE_URL"]
FUNCTION = {
    "name": "bash",
    "description": "Run a command.",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    },
}


def bash(arguments):
    try:
        command = json.loads(arguments)["command"]
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error!r}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=20)
    return done.stdout + done.stderr


def main():
    messages = [
        {"role": "system", "content": "You work in a shell."},
        {"role": "user", "content": sys.stdin.read()},
    ]
    content = ""
    for _ in range(9):
        answer = litellm.completion(
            model=MODEL,
            api_base=BASE,
            api_key=os.environ["OPENAI_API_KEY"],
            messages=messages,
            tools=[{"type": "function", "function": FUNCTION}],
        )
        message = answer.choices[0].message
        messages.append(message.model_dump())
        content = message.content or ""
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = bash(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    with open(os.environ["LONGARC_ANSWER"], "w") as file:
        file.write(content)


main()
