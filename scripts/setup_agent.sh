#!/usr/bin/env bash
# Installs one agent program or SDK of scripts/agents.txt below .agents/NAME, apart from everything else.
# Virtual environments are made with the system's Python where that is possible: boxes run it, and as root another
# user has to be able to.
set -euo pipefail
python="${1:?usage: setup_agent.sh PYTHON NAME}"
name="${2:?usage: setup_agent.sh PYTHON NAME}"

line="$(grep -E "^$name " scripts/agents.txt)" || {
  echo "there is no agent '$name'; scripts/agents.txt has: $(grep -oE '^[a-z-]+' scripts/agents.txt | tr '\n' ' ')" >&2
  exit 2
}
read -r _ source package <<< "$line"
place=".agents/$name"
mkdir -p .agents

case "$source" in
  npm)
    command -v npm > /dev/null || {
      echo "$name is an npm package: install Node.js 20 or newer, which has npm" >&2
      exit 2
    }
    npm install --prefix "$place" --no-audit --no-fund --loglevel=error "$package"
    ;;
  pip)
    if /usr/bin/python3 -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2> /dev/null; then
      python=/usr/bin/python3
    fi
    [ -x "$place/bin/python" ] || "$python" -m venv "$place"
    "$place/bin/python" -m pip install --quiet --disable-pip-version-check "$package"
    ;;
esac
