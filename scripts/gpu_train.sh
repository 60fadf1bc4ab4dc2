#!/usr/bin/env bash
# Data and all drafters for a target on this machine's GPU, in at most 9 minutes: bash scripts/gpu_train.sh [OUT] [SETTING…]
# for instance: bash scripts/gpu_train.sh trained target=smollm2. With no network, WHEELS=folder installs from there.
# Checkpoints, of at most 15 MiB each, their cards and the data are left in OUT (default: results/training/gpu).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT="${1:-results/training/gpu}"
shift || true
PYTHON="${PYTHON:-python3}"
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
if ! "$PYTHON" -c 'import hydra' 2>/dev/null; then
  "$PYTHON" -m pip install --quiet ${WHEELS:+--no-index --find-links "$WHEELS"} hydra-core omegaconf
fi
"$PYTHON" -m drafters.training.data prompts=65536 shard=2048 minutes=2.5 out="$OUT/data" "$@"
for family in small_lm eagle mtp medusa dflash dspark; do
  "$PYTHON" -m drafters.training drafter=$family experiment=train_default data="$OUT/data" out="$OUT/$family" \
    epochs=100 minutes=0.75 batch_tokens=16384 streams_gb=60 save_minutes=1 validate_minutes=10 "$@"
done
du -ch "$OUT"/*/checkpoint | tail -1
