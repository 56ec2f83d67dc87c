#!/usr/bin/env bash
# See run.py: bash benchmarks/gpu/run.sh [STAGE ...] [OPTIONS]
cd "$(dirname "$0")/../.." && exec "${PYTHON:-python3}" -u -m benchmarks.gpu.run "$@"
