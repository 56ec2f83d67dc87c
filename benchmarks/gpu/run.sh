#!/usr/bin/env bash
# One GPU, at most ten minutes: tests on the device, calibration, planned runs, predicted against measured, and peers
# beside ours. Results go to $OUT (default benchmarks/results/gpu), after every stage; commit what is there.
#
#   bash benchmarks/gpu/run.sh [OPTIONS OF benchmarks/gpu/peers.py]
#   STAGES=peers bash benchmarks/gpu/run.sh --models llama-2-13b --cells small --output 13b.json    ten minutes for peers
#
#   STAGES="tests calibrate execute peers"    which stages, in this order
#   PROFILE=h100                              planned for, with the memory and cores of this machine, where calibration
#                                             left no $OUT/profile.json
#   BUDGET_S=580                              seconds for all of them
#   WHEELS=wheels                             folder of wheels to install beside what is there, if it exists: ours
#                                             (pydantic, pydantic_core, annotated_types, typing_inspection, highspy) and
#                                             the peers' (benchmarks/requirements-peers.txt)
#   MODELS="llama-3.2-1b"                     what the execute stage plans and executes: names, or paths of a config.json
#   BATCH="--micro-batch 4 --seq-len 2048"    of what, as options of ullage plan
#
# The execute stage leaves a folder of each model: plan.json, run.json (every measured task), trace.json.gz (for
# ui.perfetto.dev: the simulated iterations beside the measured ones) and summary.json (predicted against measured).
# A stage that fails, or takes longer than it may, is told in $OUT/stages.txt with the end of its output, and the others
# go on. Needs torch with CUDA, transformers, numba, llvmlite, scipy, rich, pydantic and highspy; nothing is downloaded.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT="${OUT:-benchmarks/results/gpu}"
STAGES="${STAGES:-tests calibrate execute peers}"
BUDGET_S="${BUDGET_S:-580}"
WHEELS="${WHEELS:-wheels}"
MODELS="${MODELS:-llama-3.2-1b}"
BATCH="${BATCH:---micro-batch 4 --seq-len 2048}"
PYTHON="${PYTHON:-python3}"
PROFILE="${PROFILE:-h100}"
begin_s=$(date +%s)
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

left_s() { echo $((BUDGET_S - $(date +%s) + begin_s)); }

# stage NAME LIMIT_S COMMAND...: run a command within its limit and what is left of the budget; tell how it ended.
stage() {
    local name=$1 limit_s=$2 start_s code
    shift 2
    [ "$(left_s)" -lt "$limit_s" ] && limit_s=$(left_s)
    if [ "$limit_s" -lt 5 ]; then
        echo "$name: not run, no time was left" >> "$OUT/stages.txt"
        return
    fi
    start_s=$(date +%s)
    timeout --kill-after 5 "$limit_s" "$@" > "$scratch/log.txt" 2>&1
    code=$?
    echo "$name: ended with $code after $(($(date +%s) - start_s)) s of $limit_s s" | tee -a "$OUT/stages.txt"
    tail -n 30 "$scratch/log.txt"
    [ $code -eq 0 ] || tail -n 15 "$scratch/log.txt" | sed 's/^/    /' >> "$OUT/stages.txt"
}

install_wheels() {
    local wheel
    mkdir -p "$scratch/ours" "$scratch/peers"
    for wheel in "$WHEELS"/*.whl; do
        local place=ours
        # Apart, so that only the peers' processes import them: transformers looks for torchao, and takes time for it.
        case "$(basename "$wheel")" in deepspeed* | torchao* | hjson*) place=peers ;; esac
        "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$scratch/$place" "$wheel" \
            || echo "install: $wheel failed" | tee -a "$OUT/stages.txt"
    done
    export PYTHONPATH="$PYTHONPATH:$scratch/ours" ULLAGE_PEERS="$scratch/peers"
}

profile() {
    local found="$OUT/profile.json" made="$scratch/stand_in.json"
    if [ ! -f "$found" ]; then
        found="$made"
        [ -f "$made" ] || "$PYTHON" benchmarks/gpu/stand_in.py "$PROFILE" "$made" || return
    fi
    echo "$found"
}

execute_model() {
    local folder
    folder="$OUT/$(basename "${1%/config.json}")"
    mkdir -p "$folder"
    "$PYTHON" -m ullage plan --model "$1" --hardware "$(profile)" $BATCH --output "$folder/plan.json" \
        && "$PYTHON" -m ullage execute "$folder/plan.json" --iterations 12 --output-dir "$folder" \
            --storage-dir "$scratch" --json > "$folder/summary.json"
}
export -f execute_model profile
export PYTHON OUT PROFILE BATCH scratch

: > "$OUT/stages.txt"
compgen -G "$WHEELS/*.whl" > /dev/null && install_wheels
if ! "$PYTHON" -c 'import highspy, ullage.commands.execute.run' 2> "$scratch/log.txt"; then
    echo "imports: $(tail -n 1 "$scratch/log.txt"); put a wheel of what is missing into $WHEELS/" | tee -a "$OUT/stages.txt"
    exit 1
fi
grep -E 'MemTotal|MemAvailable' /proc/meminfo > "$OUT/machine.txt"
nvidia-smi --query-gpu=name,memory.total,memory.free,driver_version,pcie.link.gen.current,pcie.link.width.current \
    --format=csv >> "$OUT/machine.txt" 2>&1
for name in $STAGES; do
    case "$name" in
        tests) stage tests 120 "$PYTHON" -m pytest -q --rootdir . tests/executor/test_cuda.py ;;
        calibrate) stage calibrate 150 "$PYTHON" -m ullage calibrate --quick --output "$OUT/profile.json" ;;
        execute) for model in $MODELS; do stage "execute $model" 120 bash -c 'execute_model "$1"' - "$model"; done ;;
        peers)
            stage peers "$(left_s)" "$PYTHON" benchmarks/gpu/peers.py --quick --profile "$(profile)" \
                --budget "$(($(left_s) - 25))" --limit 150 --output "$OUT/peers.json" "$@"
            ;;
        *) echo "$name: no such stage" | tee -a "$OUT/stages.txt" ;;
    esac
done
cat "$OUT/stages.txt"
