"""An agent loop over the ``openai`` SDK: chat completions or Responses, streamed or not. ``MODE`` says which."""

import json
import os
import subprocess
import sys

from openai import OpenAI

client = OpenAI()
MODEL = os.environ["LONGARC_MODEL"]
PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}
DESCRIPTION = "Run a command."


def bash(arguments):
    try:
        command = json.loads(arguments)["command"]
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error!r}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=20)
    return done.stdout + done.stderr


def chat(prompt, *, streams):
    function = {"name": "bash", "description": DESCRIPTION, "parameters": PARAMETERS}
    options = {"model": MODEL, "tools": [{"type": "function", "function": function}]}
    messages = [{"role": "system", "content": "You work in a shell."}]
    messages.append({"role": "user", "content": [{"type": "text", "text": prompt}]})
    for _ in range(9):
        if streams:
            with client.chat.completions.stream(messages=messages, **options) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            answer = client.chat.completions.create(messages=messages, logprobs=True, **options)
            message = answer.choices[0].message
            assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = bash(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


def responses(prompt, *, streams):
    tool = {"type": "function", "name": "bash", "description": DESCRIPTION}
    tool |= {"parameters": PARAMETERS, "strict": False}
    options = {
        "model": MODEL,
        "instructions": "You work in a shell.",
        "tools": [tool],
        "store": False,
    }
    items = [{"role": "user", "content": prompt}]
    for _ in range(9):
        if streams:
            with client.responses.stream(input=items, **options) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(input=items, **options)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": bash(call.arguments),
            }
            for call in calls
        ]
    return None


def main():
    assert os.environ["LONGARC_MODEL"] in [model.id for model in client.models.list()]
    api, _, how = os.environ["MODE"].partition("-")
    answer = {"chat": chat, "responses": responses}[api](sys.stdin.read(), streams=how == "stream")
    with open(os.environ["LONGARC_ANSWER"], "w") as file:
        file.write(answer or "")


main()
