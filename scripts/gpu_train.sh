#!/usr/bin/env bash
# Data and all drafters for a target on this machine's GPU, in at most 9 minutes, with no network but for the target:
#     bash scripts/gpu_train.sh OUT [SETTING…]        for instance: bash scripts/gpu_train.sh trained target=qwen3_4b
# OUT/<family> is a checkpoint with its card, OUT/data what they learned from; all else is left in a temporary folder.
# Where hydra is missing it is installed from the wheels in $WHEELS, or by pip.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT="${1:?say where to: bash scripts/gpu_train.sh OUT [SETTING…]}"
shift
PYTHON="${PYTHON:-python3}"
WORK="$(mktemp -d)"
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
if ! "$PYTHON" -c 'import hydra' 2>/dev/null; then
  "$PYTHON" -m pip install --quiet ${WHEELS:+--no-index --find-links "$WHEELS"} hydra-core omegaconf
fi
"$PYTHON" -m drafters.training.data prompts=65536 shard=2048 minutes=2.5 out="$WORK/data" "$@"
mkdir -p "$OUT/data"
cp "$WORK/data/conversations.parquet" "$WORK/data/manifest.json" "$OUT/data/"
for family in small_lm eagle mtp medusa dflash dspark; do
  # a GPU computes the target's streams faster than a disk reads them
  "$PYTHON" -m drafters.training drafter=$family experiment=train_default data="$WORK/data" out="$WORK/$family" \
    epochs=100 minutes=0.7 batch_tokens=16384 streams_gb=0 save_minutes=1 validate_minutes=10 "$@"
  cp -r "$WORK/$family/checkpoint" "$OUT/$family"
done
du -sh "$OUT"/*
