#!/usr/bin/env bash
# Checks specbench on this machine's GPU in minutes, with nothing downloaded: bash scripts/gpu_check.sh [--out FOLDER]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" scripts/gpu_check.py "$@"
