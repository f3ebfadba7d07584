#!/usr/bin/env bash
# Makes .venv-gateways: the gateways that make bench-gateway measures against, at the versions of benchmarks/gateways.txt.
set -euo pipefail
python="${1:?usage: setup_gateways.sh PYTHON}"

if [ ! -x .venv-gateways/bin/python ]; then
  "$python" -m venv .venv-gateways
fi
.venv-gateways/bin/python -m pip install --quiet --disable-pip-version-check --requirement benchmarks/gateways.txt
