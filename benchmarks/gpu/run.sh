#!/usr/bin/env bash
# One GPU, about ten minutes: tests on the device, calibration, planned runs, predicted against measured, and training
# without offload beside them. Results go to $OUT (default benchmarks/results/gpu); commit what is there.
#
#   bash benchmarks/gpu/run.sh [MODEL ...]        default: llama-3.2-1b qwen2.5-3b opt-6.7b
#
# Needs torch with CUDA, transformers, numba, scipy, networkx, rich and pydantic; nothing is installed or downloaded.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
OUT="${OUT:-benchmarks/results/gpu}"
MODELS=("$@")
[ ${#MODELS[@]} -gt 0 ] || MODELS=(llama-3.2-1b qwen2.5-3b opt-6.7b)
mkdir -p "$OUT"

python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "no CUDA GPU that PyTorch can use")'
if python -c 'import pytest' 2>/dev/null; then
    timeout 120 python -m pytest -q --rootdir . tests/executor/test_cuda.py | tee "$OUT/tests.txt"
fi
timeout 180 python -m ullage calibrate --quick --output "$OUT/profile.json"
for model in "${MODELS[@]}"; do
    python -m ullage plan --model "$model" --hardware "$OUT/profile.json" --micro-batch 4 --seq-len 2048 \
        --output "$OUT/$model-plan.json"
    timeout 150 python -m ullage execute "$OUT/$model-plan.json" --iterations 12 --output-dir "$OUT" --json \
        > "$OUT/$model-run.json" || echo "$model: execution failed" | tee -a "$OUT/failures.txt"
    rm -f "$OUT/run.json" "$OUT/trace.json.gz"
done
timeout 90 python benchmarks/gpu/in_memory.py --model "${MODELS[0]}" --output "$OUT/in-memory.json"
