#!/usr/bin/env bash
# Makes .venv and installs LongArc with the given extras, at the versions of constraints.txt.
set -euo pipefail
python="${1:?usage: setup.sh PYTHON EXTRAS}"
extras="${2:?usage: setup.sh PYTHON EXTRAS}"

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "setup: $python is Python $version, LongArc needs 3.11 or newer; set PYTHON=/path/to/python3.11" >&2
  exit 2
fi
if [ ! -x .venv/bin/python ]; then
  if ! "$python" -m venv .venv; then
    rm -rf .venv
    echo "setup: $python cannot make a virtual environment; install the package python$version-venv" >&2
    exit 2
  fi
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check \
  --constraint constraints.txt --editable ".[$extras]"

# Where a C++ compiler is found; without one the same results come from eager PyTorch.
.venv/bin/python -m longarc.models.kernels.build
