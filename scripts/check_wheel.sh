#!/usr/bin/env bash
# Builds the wheel and proves that the control plane works from it without torch.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
.venv/bin/python -m build --wheel --no-isolation --outdir "$work/dist" . >"$work/build.log" 2>&1 || {
  cat "$work/build.log" >&2
  exit 1
}
.venv/bin/python -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  --constraint constraints.txt "$work"/dist/*.whl
"$work/venv/bin/python" - <<'PY'
import importlib.util
assert importlib.util.find_spec("torch") is None, "the base install must not bring torch"
import longarc.gateway.core, longarc.orchestrator.loop, longarc.runs.ledger, longarc.tokens.tokenizer
PY
"$work/venv/bin/python" scripts/check_gateway.py
"$work/venv/bin/longarc" --help >/dev/null
"$work/venv/bin/longarc" config check recipes/quickstart.toml
echo "wheel: control plane imports and runs without torch"
