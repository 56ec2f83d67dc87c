#!/usr/bin/env bash
# One GPU, at most ten minutes: the doctor, tests on the device, calibration, planned runs, predicted against measured,
# and peers beside ours. Results go to $OUT (default benchmarks/results/gpu), after every stage; commit what is there.
#
#   bash benchmarks/gpu/run.sh [OPTIONS OF benchmarks/gpu/peers.py]
#   STAGES=peers bash benchmarks/gpu/run.sh --models llama-2-13b --cells small --output 13b.json    ten minutes for peers
#
#   STAGES="doctor tests calibrate execute peers"    which stages, in this order: doctor and tests have 2 minutes
#                                             together, calibrate 2, execute 2 for all models, peers what is left
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
# Every stage leaves $OUT/stages/NAME.json as it ends: exit code, seconds, limit and the end of its output. One that
# fails, or takes longer than it may (code 124), does not stop the others; then the exit code is 1. The doctor's own
# answer is $OUT/doctor.json. Needs torch with CUDA, transformers, numba, llvmlite, scipy, rich, pydantic and highspy.
# Nothing is downloaded.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT="${OUT:-benchmarks/results/gpu}"
STAGES="${STAGES:-doctor tests calibrate execute peers}"
BUDGET_S="${BUDGET_S:-580}"
WHEELS="${WHEELS:-wheels}"
MODELS="${MODELS:-llama-3.2-1b}"
BATCH="${BATCH:---micro-batch 4 --seq-len 2048}"
PYTHON="${PYTHON:-python3}"
PROFILE="${PROFILE:-h100}"
begin_s=$(date +%s)
failed=0
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
    start_s=$(date +%s)
    if [ "$limit_s" -lt 5 ]; then
        code=null
        echo "not run, no time was left" > "$scratch/log.txt"
    else
        timeout --kill-after 5 "$limit_s" "$@" > "$scratch/log.txt" 2>&1
        code=$?
    fi
    tail -n 30 "$scratch/log.txt"
    told "$name" "$code" "$(($(date +%s) - start_s))" "$limit_s"
}

# told NAME CODE SECONDS LIMIT_S: write how a stage ended, whole, with the end of its output.
told() {
    echo "$1: code $2 after $3 s of $4 s"
    [ "$2" = 0 ] || failed=1
    "$PYTHON" - "$@" "$scratch/log.txt" "$OUT/stages/$1.json" << 'END'
import json, os, sys
name, code, seconds, limit_s, log, path = sys.argv[1:]
with open(log, errors="replace") as file:
    tail = file.read().splitlines()[-30:]
told = {"stage": name, "code": json.loads(code), "wall_s": int(seconds), "limit_s": int(limit_s), "output_tail": tail}
with open(path + ".part", "w") as file:
    json.dump(told, file, indent=1)
os.replace(path + ".part", path)
END
}

install_wheels() {
    local wheel
    mkdir -p "$scratch/ours" "$scratch/peers"
    for wheel in "$WHEELS"/*.whl; do
        local place=ours
        # Apart, so that only the peers' processes import them: transformers looks for torchao, and takes time for it.
        case "$(basename "$wheel")" in deepspeed* | torchao* | hjson*) place=peers ;; esac
        "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$scratch/$place" "$wheel" \
            || echo "install: $wheel failed"
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

model_name() { basename "${1%/config.json}"; }

examine() { "$PYTHON" -m ullage doctor --json > "$OUT/doctor.json" || { cat "$OUT/doctor.json"; return 1; }; }

execute_model() {
    local folder
    folder="$OUT/$(model_name "$1")"
    mkdir -p "$folder"
    "$PYTHON" -m ullage plan --model "$1" --hardware "$(profile)" $BATCH --output "$folder/plan.json" \
        && "$PYTHON" -m ullage execute "$folder/plan.json" --iterations 12 --output-dir "$folder" \
            --storage-dir "$scratch" --json > "$folder/summary.json"
}
export -f examine execute_model model_name profile
export PYTHON OUT PROFILE BATCH scratch

mkdir -p "$OUT/stages"
rm -f "$OUT"/stages/*.json
: > "$scratch/log.txt"
if compgen -G "$WHEELS/*.whl" > /dev/null; then
    start_s=$(date +%s)
    install_wheels > "$scratch/log.txt" 2>&1
    told install "$(grep -c failed "$scratch/log.txt")" "$(($(date +%s) - start_s))" "$BUDGET_S"
fi
num_models=$(wc -w <<< "$MODELS")
for name in $STAGES; do
    case "$name" in
        doctor) stage doctor 30 bash -c examine ;;
        tests) stage tests 90 "$PYTHON" -m pytest -q --rootdir . tests/executor/devices/test_cuda.py ;;
        calibrate) stage calibrate 120 "$PYTHON" -m ullage calibrate --quick --output "$OUT/profile.json" ;;
        execute) for model in $MODELS; do stage "execute-$(model_name "$model")" $((120 / num_models)) bash -c 'execute_model "$1"' - "$model"; done ;;
        peers)
            stage peers "$(left_s)" "$PYTHON" benchmarks/gpu/peers.py --quick --profile "$(profile)" \
                --budget "$(($(left_s) - 25))" --limit 150 --output "$OUT/peers.json" "$@"
            ;;
        *) echo "$name: no such stage" ;;
    esac
done
exit "$failed"
