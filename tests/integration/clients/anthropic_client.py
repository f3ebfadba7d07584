"""An agent loop over the ``anthropic`` SDK, streamed or not; thinking comes back as it was given."""

import os
import subprocess
import sys

from anthropic import Anthropic

client = Anthropic()
MODEL = os.environ["LONGARC_MODEL"]
TOOL = {
    "name": "bash",
    "description": "Run a command.",
    "input_schema": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    },
}


def bash(arguments):
    command = arguments.get("command", "echo no command")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=20)
    return done.stdout + done.stderr


def ask(messages, *, streams):
    options = {
        "model": MODEL,
        "max_tokens": 1024,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "system": [
            {"type": "text", "text": "You work in a shell.", "cache_control": {"type": "ephemeral"}}
        ],
        "tools": [TOOL],
        "messages": messages,
    }
    options["max_tokens"] = 2000
    counted = client.messages.count_tokens(
        **{name: value for name, value in options.items() if name != "max_tokens"}
    )
    if streams:
        with client.messages.stream(**options) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**options)
    assert answer.usage.input_tokens == counted.input_tokens, (answer.usage, counted)
    return answer


def main():
    assert MODEL in [model.id for model in client.models.list()]
    messages = [{"role": "user", "content": sys.stdin.read()}]
    text = ""
    for _ in range(9):
        answer = ask(messages, streams=os.environ["MODE"] == "stream")
        messages.append({"role": "assistant", "content": answer.content})
        text = "".join(block.text for block in answer.content if block.type == "text")
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            break
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": bash(call.input)}
            for call in calls
        ]
        results[-1]["cache_control"] = {"type": "ephemeral"}
        for message in messages[1:]:
            if message["role"] == "user":
                for block in message["content"]:
                    block.pop("cache_control", None)
        messages.append({"role": "user", "content": results})
    with open(os.environ["LONGARC_ANSWER"], "w") as file:
        file.write(text)


main()
