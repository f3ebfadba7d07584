#!/usr/bin/env bash
# Tests Triton's kernels in its interpreter, with a Triton beside .venv: it is a gigabyte large, and PyTorch's
# builds for GPUs bring a version of their own.
set -euo pipefail

if [ "$(uname -sm)" != "Linux x86_64" ]; then
  echo "there is no Triton for $(uname -sm); the tests of its kernels are skipped"
  exit 0
fi
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
  --target "$directory" "triton==3.9.0"; then
  echo "triton could not be installed; the tests of its kernels are skipped"
  exit 0
fi
PYTHONPATH="$directory" .venv/bin/python -m pytest -q \
  tests/unit/models/test_sparse_attention.py tests/unit/models/kernels/test_triton_compiles.py
