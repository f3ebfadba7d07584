#!/usr/bin/env bash
# Makes .venv-vllm: vLLM's CPU build at the versions of benchmarks/vllm.txt (3.5 GB), for recipes with
# engine.kind = "vllm" and for make integration. It is apart from .venv, whose packages have other versions.
set -euo pipefail
python="${1:?usage: setup_vllm.sh PYTHON}"

if [ ! -x .venv-vllm/bin/python ]; then
  "$python" -m venv .venv-vllm
fi
.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check \
  --no-deps --requirement benchmarks/vllm.txt
# Says at once, and not at the first recipe, where it cannot run.
.venv-vllm/bin/python -c 'import vllm; print("vLLM", vllm.__version__, "is in .venv-vllm")'
