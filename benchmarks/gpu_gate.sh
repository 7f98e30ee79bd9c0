#!/usr/bin/env bash
# Builds, tests and measures on a machine with an NVIDIA GPU, in four calls of nine minutes at
# most, any of which may be lost. The most useful parts come first:
#
#     benchmarks/gpu_gate.sh 1                 every kernel's bits, all tests, steps, layers, counters
#     benchmarks/gpu_gate.sh 2                 whole models
#     benchmarks/gpu_gate.sh 3                 sanitizers, two streams, experiments
#     benchmarks/gpu_gate.sh 4                 more models, the host, the other steps, Muon
#     benchmarks/gpu_gate.sh build step:300    these parts, with so many seconds (540)
#
# $OUT/gpu_gate.tar.gz, written again after each part, holds the results of all calls: a log per part,
# the CSV files, the page of benchmarks with their tables, and summary.txt. If a part fails or runs out
# of time, the others run. The exit status is the number of parts that failed.
#
# PYTHON   interpreter that has a CUDA build of torch, and pytest (python3); nothing is installed
# OUT      where the archive goes (results/gpu)
# BUILD    build folder (build/gpu), kept between calls
# WHEEL    a wheel of ampfuse that is unpacked in place of a build, such as 'dist/*cp312*.whl'
# CORE     a folder with ampfuse_gpu_tests, the core's tests, from a build elsewhere
set -uo pipefail
SELF=$(realpath "$0")
cd "$(dirname "$SELF")/.." || exit

# The parts of each call, and the seconds of each.
declare -A CALLS=(
  [1]="machine:15 build:165 core:30 tests:130 step:75 layers:40 counters:60 tables:15"
  [2]="machine:15 build:165 nets:345 tables:15"
  [3]="machine:15 build:165 memcheck:100 racecheck:100 stress:40 experiments:75"
  [4]="machine:15 build:165 more_nets:180 host_time:45 meter:20 muon:30 others:70 tables:15"
)
PYTHON=${PYTHON:-python3}
OUT=${OUT:-results/gpu}
BUILD=${BUILD:-build/gpu}
RESULTS=$PWD/$BUILD/results
CORE_TESTS=${CORE:-$BUILD}/ampfuse_gpu_tests
# Where pip puts cmake and ninja; and what was built.
PATH=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH
export PYTHONPATH=$PWD/$BUILD/site PYTHONUNBUFFERED=1

# ---- what the parts do ---------------------------------------------------------------------------

SKIPPED=77
# A part is skipped where a tool or package that it needs is not installed.
needs() { command -v "$1" || exit "$SKIPPED"; }
needs_packages() { "$PYTHON" -c "import $1" || exit "$SKIPPED"; }

machine() {
  date -u +%FT%TZ
  git rev-parse HEAD
  uname -srm
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.mem --format=csv
  nvcc --version | tail -n 2
  "$PYTHON" -c 'import sys, torch; print("python", sys.version.split()[0]); print("torch", torch.__version__)
p = torch.cuda.get_device_properties(0)
print(p.name, f"sm_{p.major}{p.minor}", p.multi_processor_count, "multiprocessors", p.L2_cache_size >> 20, "MB L2")'
}

# The Python files before the module, which cmake installs among them.
build() {
  rm -rf "$BUILD/site" && mkdir -p "$BUILD/site" || return
  if [ -n "${WHEEL:-}" ]; then
    # shellcheck disable=SC2086 # a pattern
    "$PYTHON" -m zipfile -e $WHEEL "$BUILD/site"
    return
  fi
  compile all ampfuse_gpu_tests && cp -r python/ampfuse "$BUILD/site/" &&
    cmake --install "$BUILD" --prefix "$BUILD/site"
}

compile() {
  cmake -S . -B "$BUILD" $(command -v ninja >/dev/null && echo -G Ninja) -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$(command -v "$PYTHON")" -DAMPFUSE_CUDA=ON \
    -DAMPFUSE_CUDA_ARCHS="${AMPFUSE_CUDA_ARCHS:-native}" &&
    cmake --build "$BUILD" -j "$(nproc)" --target "$@"
}

# A core of another build is not built again.
build_core() { if [ -z "${CORE:-}" ]; then compile ampfuse_gpu_tests; fi; }

core() { build_core && "$CORE_TESTS"; }

# A sanitizer checks the core's tests, which touch every kernel at its seams and run none of torch's.
# It is an order of magnitude slower, so it runs those with few blocks.
sanitize() {
  needs compute-sanitizer
  build_core && compute-sanitizer --tool "$@" --error-exitcode 9 "$CORE_TESTS" \
    norms non_finite unscaled maps steps nn_ops
}
memcheck() { sanitize memcheck; } # (no --leak-check: pinned buffers are kept to the end)
racecheck() { sanitize racecheck; }
initcheck() { sanitize initcheck; }

run_pytest() {
  TORCHINDUCTOR_COMPILE_THREADS=2 "$PYTHON" -m pytest -p no:cacheprovider -q -m gpu \
    -o faulthandler_timeout=60 $("$PYTHON" -c 'import xdist; print("-n 8")' 2>/dev/null) "$@"
}
tests() { run_pytest tests -k "not competing" --continue-on-collection-errors; }
stress() { run_pytest tests/core/test_gpu.py -k competing; }

# A benchmark writes each row at once, so its CSV holds what it measured in its time.
measure() { "$PYTHON" "benchmarks/$1.py" --device cuda --csv "$RESULTS/$2.csv" "${@:3}"; }
step() {
  measure step step_cuda --no-compile --modes \
    --only adamw-1B-bf16 adamw-resnet50-bf16 adamw-2000x64K-bf16 adamw-gpt2-medium-bf16
}
others() { measure step step_others_cuda --no-compile --only fp16 fp32 sgd vit-b; }
meter() { measure step meter_cuda --no-compile --meter --only 2000x64K-bf16 resnet50-bf16; }
layers() { measure layers layers_cuda; }
muon() { measure step muon_cuda --all --only muon; }
host_time() { measure step host_time_cuda --host; }
# Both add to one CSV.
networks() { needs_packages torchvision,timm,transformers && measure nets nets_cuda --only "$@"; }
nets() { networks gpt vit resnet50; }
more_nets() { networks llama convnext bert_base; }

counters() {
  needs ncu
  "$PYTHON" benchmarks/counters.py | grep -v ^== | tee "$RESULTS/counters.csv"
}

# Each variant at the published sizes, on synthetic data.
experiments() {
  needs_packages torchvision,timm,tqdm,sklearn
  local status=0
  train() {
    "$PYTHON" -m ampfuse train "$@" --variant fp32 amp-fp16 amp-bf16 O2 O5 --repeats 2 \
      --evaluate False --data synthetic --output "$RESULTS/experiments" || status=1
  }
  train cifar --recipe e1 --batch-size 128 1024
  train mlp --recipe e5
  train mnist --recipe e5 --epochs 1 --graph
  train cifar --recipe e2 --iterations 60
  return "$status"
}

# Tables of the measurements.
tables() {
  ls "$RESULTS"/*_cuda.csv || exit "$SKIPPED"
  cp docs/benchmarks.md "$RESULTS/" &&
    "$PYTHON" benchmarks/report.py "$RESULTS"/*_cuda.csv --page "$RESULTS/benchmarks.md"
}

# ---- running them --------------------------------------------------------------------------------

# This script runs itself for each part, so that `timeout` can end one.
if [ "${1:-}" = --part ]; then
  "$2"
  exit
fi

mkdir -p "$OUT" "$RESULTS"
failed=0 share_ends=0

# part NAME SECONDS: runs it until the seconds of all parts so far are over, keeps its output in
# NAME.log and one line in summary.txt.
part() {
  local name=$1 start=$SECONDS status left
  share_ends=$((share_ends + $2))
  left=$((share_ends > SECONDS ? share_ends - SECONDS : 1))
  printf '\n=== %s\n' "$name"
  timeout -k 5 "$left" bash "$SELF" --part "$name" 2>&1 |
    tee "$RESULTS/$name.log" | tail -n 40
  case ${PIPESTATUS[0]} in
    0) status=ok ;;
    "$SKIPPED") status=SKIPPED ;;
    124 | 137) status=TIMEOUT ;;
    *) status=FAILED ;;
  esac
  case $status in FAILED | TIMEOUT) failed=$((failed + 1)) ;; esac
  printf '%-14s %-8s %s s\n' "$name" "$status" "$((SECONDS - start))" >>"$RESULTS/summary.txt"
  cp "$RESULTS/summary.txt" "$OUT/summary.txt"
  tar -czf "$OUT/.archive" -C "$RESULTS" . && mv "$OUT/.archive" "$OUT/gpu_gate.tar.gz"
}

if [ $# -eq 0 ]; then set -- 1 2 3 4; fi
printf '%s  %s\n' "$(date -u +%FT%TZ)" "$*" >>"$RESULTS/summary.txt"
for word; do
  for one in ${CALLS[$word]:-$word}; do
    IFS=: read -r name seconds _ <<<"$one:540"
    part "$name" "$seconds"
  done
done

printf '\n'
cat "$RESULTS/summary.txt"
exit "$failed"
