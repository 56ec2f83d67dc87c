#!/usr/bin/env bash
# One GPU, at most ten minutes: the doctor, tests on the device, calibration, ten plans predicted and measured,
# checkpoints, and peers beside ours. Results go to $OUT (default benchmarks/results/gpu), after every stage. Commit the
# JSON files there; $OUT/agreement has every measured task, and $OUT/logs all that stages have printed.
#
#   bash benchmarks/gpu/run.sh [OPTIONS OF benchmarks/gpu/peers.py]
#   STAGES="doctor tests calibrate" BUDGET_S=200 bash benchmarks/gpu/run.sh       does anything work?
#   STAGES=peers bash benchmarks/gpu/run.sh --models llama-2-13b --cells small --output 13b.json    ten minutes for peers
#
#   STAGES="doctor tests calibrate again agreement checkpoints peers"    which stages, in this order. again: calibrate a
#                                             second time, for its spread (benchmarks/calibration.py --read)
#   PROFILE=h100                              planned for, with the memory and cores of this machine, where calibration
#                                             left no $OUT/profile.json
#   BUDGET_S=580                              seconds for all of them
#   ARCHIVE=results.tar.gz                    also all of $OUT in one file, after every stage
#   WHEELS=wheels                             folder of wheels to install beside what is there, if it exists: ours
#                                             (pydantic, pydantic_core, annotated_types, typing_inspection, highspy) and
#                                             the peers' (benchmarks/requirements-peers.txt)
#   PLANS="--only mixed planned"              options of benchmarks/gpu/agreement.py
#   CHECKPOINTS="--folder /mnt/nvme"          and of benchmarks/gpu/checkpoints.py
#
# Every stage leaves $OUT/stages/NAME.json as it ends: exit code, seconds, limit, and the end of its output. One that
# fails, or takes longer than it may (code 124), does not stop the others; then the exit code is 1. The doctor's own
# answer is $OUT/doctor.json. Needs torch with CUDA, transformers, numba, llvmlite, scipy, rich, pydantic and highspy.
# Nothing is downloaded.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT="${OUT:-benchmarks/results/gpu}"
STAGES="${STAGES:-doctor tests calibrate again agreement checkpoints peers}"
BUDGET_S="${BUDGET_S:-580}"
WHEELS="${WHEELS:-wheels}"
PLANS="${PLANS:-}"
CHECKPOINTS="${CHECKPOINTS:-}"
ARCHIVE="${ARCHIVE:-}"
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
    local name=$1 limit_s=$2 log="$OUT/logs/$1.txt" start_s code
    shift 2
    [ "$(left_s)" -lt "$limit_s" ] && limit_s=$(left_s)
    start_s=$(date +%s)
    if [ "$limit_s" -lt 5 ]; then
        code=null
        echo "not run, no time was left" > "$log"
    else
        timeout --kill-after 5 "$limit_s" "$@" > "$log" 2>&1
        code=$?
    fi
    tail -n 30 "$log"
    told "$name" "$code" "$(($(date +%s) - start_s))" "$limit_s"
}

# told NAME CODE SECONDS LIMIT_S: write how a stage ended, whole, with the end of its output.
told() {
    echo "$1: code $2 after $3 s of $4 s"
    [ "$2" = 0 ] || failed=1
    "$PYTHON" - "$@" "$OUT/logs/$1.txt" "$OUT/stages/$1.json" << 'END'
import json, os, sys
name, code, seconds, limit_s, log, path = sys.argv[1:]
with open(log, errors="replace") as file:
    tail = file.read().splitlines()[-30:]
told = {"stage": name, "code": json.loads(code), "wall_s": int(seconds), "limit_s": int(limit_s), "output_tail": tail}
with open(path + ".part", "w") as file:
    json.dump(told, file, indent=1)
os.replace(path + ".part", path)
END
    if [ -n "$ARCHIVE" ]; then tar -czf "$ARCHIVE.part" -C "$OUT" . && mv "$ARCHIVE.part" "$ARCHIVE"; fi
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

examine() { "$PYTHON" -m ullage doctor --json > "$OUT/doctor.json" || { cat "$OUT/doctor.json"; return 1; }; }

export -f examine
export PYTHON OUT

mkdir -p "$OUT/stages" "$OUT/logs"
for name in install $STAGES; do rm -f "$OUT/stages/$name.json"; done
if compgen -G "$WHEELS/*.whl" > /dev/null; then
    start_s=$(date +%s)
    install_wheels > "$OUT/logs/install.txt" 2>&1
    told install "$(grep -c failed "$OUT/logs/install.txt")" "$(($(date +%s) - start_s))" "$BUDGET_S"
fi
for name in $STAGES; do
    case "$name" in
        doctor) stage doctor 45 bash -c examine ;;
        tests)
            stage tests 100 "$PYTHON" -m pytest -q --rootdir . tests/executor/devices/test_cuda.py \
                tests/executor/memory/test_parking.py::test_on_a_gpu
            ;;
        calibrate) stage calibrate 120 "$PYTHON" -m ullage calibrate --quick --output "$OUT/profile.json" ;;
        again) stage again 90 "$PYTHON" -m ullage calibrate --quick --output "$OUT/profile_again.json" ;;
        agreement)
            # shellcheck disable=SC2086 # options
            stage agreement 300 "$PYTHON" benchmarks/gpu/agreement.py --profile "$(profile)" --budget 260 \
                --output "$OUT/agreement.json" $PLANS
            ;;
        checkpoints)
            stage checkpoints 90 "$PYTHON" benchmarks/gpu/checkpoints.py --profile "$(profile)" \
                --output "$OUT/checkpoints.json" $CHECKPOINTS
            ;;
        peers)
            stage peers "$(left_s)" "$PYTHON" benchmarks/gpu/peers.py --quick --profile "$(profile)" \
                --budget "$(($(left_s) - 25))" --limit 150 --output "$OUT/peers.json" "$@"
            ;;
        *) echo "$name: no such stage" ;;
    esac
done
exit "$failed"
