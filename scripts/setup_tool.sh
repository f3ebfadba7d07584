#!/usr/bin/env bash
# Makes .venv-NAME: what one integration test needs beside LongArc, at the versions of tests/integration/NAME.txt.
set -euo pipefail
python="${1:?usage: setup_tool.sh PYTHON NAME}"
name="${2:?usage: setup_tool.sh PYTHON NAME}"

if [ ! -x ".venv-$name/bin/python" ]; then
  "$python" -m venv ".venv-$name"
fi
".venv-$name/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "tests/integration/$name.txt"
