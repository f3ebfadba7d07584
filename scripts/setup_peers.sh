#!/usr/bin/env bash
# Makes .venv-peers: what the benchmarks measure against, at the versions of benchmarks/peers.txt.
# It is apart from .venv, so that nothing of LongArc can come to depend on a peer.
set -euo pipefail
python="${1:?usage: setup_peers.sh PYTHON}"

if [ ! -x .venv-peers/bin/python ]; then
  "$python" -m venv .venv-peers
fi
.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check \
  --constraint constraints.txt --requirement benchmarks/peers.txt
