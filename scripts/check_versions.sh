#!/usr/bin/env bash
# Run the tests that depend on transformers and torch against other versions, each pair in a fresh virtual environment.
# For a schedule (it downloads a torch build per environment), not for every change.
#   bash scripts/check_versions.sh                              the oldest and the newest transformers supported
#   bash scripts/check_versions.sh 5.24.0 newest                these transformers, with the torch of constraints.txt
#   TORCH="2.9.0 newest" bash scripts/check_versions.sh 5.24.0  each of them with each of these torch versions
# `newest` is the newest that pyproject.toml allows. WORK names the folder of the environments (a temporary one), WORKERS
# the number of test processes (one per core).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

oldest=$(sed -n 's/^    "transformers>=\([^,"]*\).*/\1/p' pyproject.toml)
pinned_torch=$(sed -n 's/^torch==//p' constraints.txt)
versions=("$@")
[ $# -gt 0 ] || versions=("$oldest" newest)
work=${WORK:-$(mktemp -d)}
workers=${WORKERS:-$(nproc)}  # before the next line: nproc never says more than OMP_NUM_THREADS
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1

requirement() { # NAME VERSION
    if [ "$2" = newest ]; then echo "$1"; else echo "$1==$2"; fi
}

failed=()
for torch in ${TORCH:-$pinned_torch}; do
    for transformers in "${versions[@]}"; do
        name="transformers-$transformers-torch-$torch"
        echo "check_versions: $name"
        python3 -m venv "$work/$name"
        pip="$work/$name/bin/pip"
        # torch first and by exact version: a plain range could bring a build of several GB
        "$pip" install --quiet "$(requirement torch "$torch")"
        "$pip" install --quiet -e . "$(requirement transformers "$transformers")" "$(requirement torch "$torch")" \
            pytest pytest-xdist hypothesis
        "$pip" list 2>/dev/null | grep -E '^(torch|transformers|tokenizers|huggingface_hub|numpy) '
        if ! "$work/$name/bin/python" -m pytest -q -n "$workers" --dist loadfile -m "versions and not slow and not gpu"; then
            failed+=("$name")
        fi
    done
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "check_versions: failed: ${failed[*]}" >&2
    exit 1
fi
echo "check_versions: every pair passed"
