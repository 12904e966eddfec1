#!/usr/bin/env bash
# From a fresh checkout to a table and plots on a real model: installs into .venv, gets the embedded backbone, trains
# SeKV's routing for a few steps, then evaluates every main method at a tenth of the cache. Idempotent.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
began=$SECONDS
bash scripts/setup.sh
python=.venv/bin/python
export TOKENIZERS_PARALLELISM=false

echo "quickstart: training SeKV's routing for a few steps on the embedded text (a demonstration, not a good router)"
$python train.py train.steps=2 train.eval_every=0 train.save_every=2 output_dir=outputs/quickstart-train
echo "quickstart: evaluating the main methods at a tenth of the cache on SmolLM2-135M-Instruct"
echo "quickstart: fidelity (KL to the full cache) and needles, contexts of 1K and 2K tokens"
$python evaluate.py experiment=quickstart output_dir=outputs/quickstart
echo "quickstart: done in $(((SECONDS - began) / 60)) min $(((SECONDS - began) % 60)) s"
echo "quickstart: table above, rows in outputs/quickstart/results.json, plots in outputs/quickstart/*.png"
