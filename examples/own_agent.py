"""An agent of your own: any program that talks to a chat API. It runs in a box; the gateway is all it can reach."""

import json
import os
import sys
import urllib.request

URL = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
HEADERS = {
    "content-type": "application/json",
    "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
}


def ask(messages):
    body = json.dumps({"model": os.environ["LONGARC_MODEL"], "messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(URL, body, HEADERS)) as answer:
        return json.load(answer)["choices"][0]["message"]


task = sys.stdin.read()
draft = ask([{"role": "user", "content": task}])
again = {"role": "user", "content": "Louder."}
final = ask([{"role": "user", "content": task}, draft, again])

with open(os.environ["LONGARC_ANSWER"], "w") as file:
    file.write(final["content"] or "")
