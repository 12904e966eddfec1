#!/usr/bin/env bash
# Run the tests; creates .venv first when it is absent. Further arguments go to pytest.
#   bash scripts/test.sh               everything but the slow checks
#   bash scripts/test.sh --slow        the slow checks too
#   bash scripts/test.sh tests/sekv    one folder
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

selection=(-m "not slow and not gpu")
if [ "${1:-}" = "--slow" ]; then
    selection=(-m "not gpu")
    shift
fi
workers=$(nproc)  # before the next line: nproc never says more than OMP_NUM_THREADS
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
echo "test: running pytest on $workers cores"
exec .venv/bin/python -m pytest -n "$workers" --dist loadfile -q "${selection[@]}" "$@"
