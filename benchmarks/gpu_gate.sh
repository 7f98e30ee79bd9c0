#!/usr/bin/env bash
# Builds, tests and measures on a machine with an NVIDIA GPU:
#
#     benchmarks/gpu_gate.sh                    everything, half an hour and the experiments
#     PARTS=first benchmarks/gpu_gate.sh        what answers most, in eight minutes
#     PARTS="tests step" benchmarks/gpu_gate.sh
#
# The results are one log per part, the CSV files, tables of the benchmarks and
# summary.txt. They gather in BUILD/results over all runs, and $OUT/gpu_gate.tar.gz, written again
# after each part, holds them all. A part that fails, or takes LIMIT seconds, does not keep the others
# from running; the exit status is the number of parts that failed.
#
# PARTS    first build core tests tests_graphs tests_rest memcheck racecheck initcheck host_time
#          step compiled counters meter nets e1 e2 e4 e5 (all but first, which is the best of them)
# PYTHON   interpreter that has a CUDA build of torch, and pytest (python3). Nothing is installed there
#          and nothing is downloaded: the build goes to BUILD.
# OUT      where the archive goes (results/gpu)
# BUILD    build folder (build/gpu), kept between runs
# CORE     a folder with the core's tests, compiled elsewhere by tests/cpp/build_cuda.sh
# WHEELS   folder of wheels for what the experiments need and PYTHON lacks (torchvision of its torch,
#          timm, rich, tqdm and theirs); they are unpacked into BUILD
# LIMIT    seconds that a part may take (540)
set -uo pipefail
SELF=$(realpath "$0")
cd "$(dirname "$SELF")/.." || exit

export PYTHON=${PYTHON:-python3}
export OUT=${OUT:-results/gpu} BUILD=${BUILD:-build/gpu} WHEELS=${WHEELS:-}
export CORE=${CORE:-}
PARTS=${PARTS:-build core tests tests_graphs tests_rest memcheck racecheck initcheck host_time
  step compiled counters meter nets e1 e2 e4 e5}
PARTS=$(tr -s ' \n' ' ' <<<"$PARTS")
LIMIT=${LIMIT:-540}
RESULTS=$PWD/$BUILD/results
CORE_TESTS=${CORE:-$BUILD/core}/test_core
mkdir -p "$OUT" "$RESULTS"
# Where pip puts cmake and ninja; and what was built.
PATH=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH
export PYTHONPATH=$PWD/$BUILD/site:$PWD/$BUILD/packages PYTHONUNBUFFERED=1

# ---- what the parts do ---------------------------------------------------------------------------

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

# The Python files first: cmake installs the module among them.
build() {
  local generator=()
  if command -v ninja >/dev/null; then generator=(-G Ninja); fi
  cmake -S . -B "$BUILD" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$(command -v "$PYTHON")" -DAMPFUSE_CUDA=ON \
    -DAMPFUSE_CUDA_ARCHS="${AMPFUSE_CUDA_ARCHS:-native}" &&
    cmake --build "$BUILD" -j "$(nproc)" &&
    rm -rf "$BUILD/site" && mkdir -p "$BUILD/site" &&
    cp -r python/ampfuse "$BUILD/site/" &&
    cmake --install "$BUILD" --prefix "$BUILD/site"
}

build_core() { [ -n "$CORE" ] || tests/cpp/build_cuda.sh "$BUILD/core"; }

core() { build_core && "$CORE_TESTS"; }

run_pytest() {
  "$PYTHON" -m pytest -p no:cacheprovider -q -m gpu -o faulthandler_timeout=180 "$@"
}

# The C++ tests are the subset: they touch every kernel at its seams and hold no framework's kernels.
sanitize() {
  local tool=$1
  local options=(--tool "$tool" --error-exitcode 9)
  [ -x "$CORE_TESTS" ] || build_core || return
  [ "$tool" = memcheck ] && options+=(--leak-check full)
  compute-sanitizer "${options[@]}" "$CORE_TESTS" "${@:2}"
}

# An order of magnitude slower: the tests with few blocks.
sanitize_some() {
  local status=0 name
  for name in norms non_finite unscaled maps steps nn_ops; do sanitize "$1" "$name" || status=1; done
  return "$status"
}

unpack_wheels() {
  "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target "$BUILD/packages" "$WHEELS"/*.whl
}

# What a benchmark has measured when its time is up is in its CSV.
measure() {
  local name=$1 csv=$2
  "$PYTHON" "benchmarks/$name.py" --device cuda --csv "$RESULTS/$csv.csv" "${@:3}" &&
    report "$RESULTS/$csv.csv"
}

# A table of what was measured.
report() {
  case $1 in *nets* | *layers*) return ;; esac
  "$PYTHON" benchmarks/report.py "$1"
}

# What inspect and update move: DRAM, and sectors that L2 is asked to write. An update of 64 M FP16
# weights writes 14 bytes a parameter: 28 M sectors of 32 bytes, if each is written once.
counters() {
  local metrics=gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed
  metrics+=,dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sectors_op_read.sum
  metrics+=,lts__t_sectors_op_write.sum,sm__warps_active.avg.pct_of_peak_sustained_active
  metrics+=,smsp__inst_executed.sum,launch__registers_per_thread
  ncu --clock-control none --metrics "$metrics" -k 'regex:inspect_kernel|apply_kernel' \
    --launch-skip 4 --launch-count 4 "$PYTHON" -c '
import sys
sys.path.insert(0, "benchmarks")
import torch
from harness.cases import Case
from harness.routes import Ours, tensors_of
case = Case("AdamW", "64M", "fp16")
ours = Ours(case, *tensors_of(case, torch.device("cuda")))
for _ in range(4):
    ours()
torch.cuda.synchronize()'
}

# Whole steps of nets; and batch norms against torch's (cuDNN's).
nets() {
  measure nets nets_cuda
  measure layers layers_cuda
}

# Every experiment on synthetic data, at the published sizes where they take seconds, in all arms.
train() { "$PYTHON" -m ampfuse train "$@" --data synthetic --output "$RESULTS/experiments"; }

e1() {
  local status=0 batch mode
  for batch in 128 256 512 1024 2048; do
    for mode in FP32 FP16 amp; do
      train cifar --recipe e1 --mode "$mode" --batch-size "$batch" || status=1
    done
    train cifar --recipe e1 --arm tf32 amp-fp16 amp-bf16 O5 --batch-size "$batch" || status=1
  done
  return "$status"
}

e2() {
  local status=0
  train cifar --recipe e2 --arm all --iterations 60 || status=1
  train cifar --recipe e3 --model seresnext50_32x4d --arm all --iterations 30 || status=1
  train cifar --recipe e3 --model densenet161 --arm O0 O2 --batch-size 512 --iterations 30 || status=1
  return "$status"
}

e4() {
  local status=0 model
  for model in resnet18 resnet50; do
    train imagenet --recipe e4 --model "$model" --arm all --iterations 60 || status=1
  done
  return "$status"
}

e5() {
  local status=0 loop
  train mlp --recipe e5 --arm all --repeats 5 || status=1
  train mlp --recipe e5 --arm all --repeats 5 --graph || status=1
  for loop in tuned original; do
    train mnist --recipe e5 --arm all --epochs 1 --repeats 5 --loop "$loop" || status=1
  done
  train mnist --recipe e5 --arm all --epochs 1 --repeats 5 --graph || status=1
  return "$status"
}

# ---- running them --------------------------------------------------------------------------------

# This script runs itself for each part, so that `timeout` can end one.
if [ "${1:-}" = --part ]; then
  "${@:2}"
  exit
fi

failed=0
wanted() { [[ " $PARTS " == *" $1 "* ]]; }

archive() {
  cp "$RESULTS/summary.txt" "$OUT/summary.txt"
  tar -czf "$OUT/.archive" -C "$RESULTS" . && mv "$OUT/.archive" "$OUT/gpu_gate.tar.gz"
}

say() {
  printf '%-14s %-8s %s\n' "$@" | tee -a "$RESULTS/summary.txt"
  archive
}

# part NAME SECONDS COMMAND...: runs it for so long at most, keeps its output in NAME.log and one line
# in summary.txt.
part() {
  local name=$1 seconds=$2 start=$SECONDS status=ok code
  printf '\n=== %s\n' "$name"
  timeout -k 10 "$seconds" bash "$SELF" --part "${@:3}" 2>&1 | tee "$RESULTS/$name.log" | tail -n 40
  code=${PIPESTATUS[0]}
  if [ "$code" -ne 0 ]; then
    status=FAILED
    failed=$((failed + 1))
  fi
  if [ "$code" -eq 124 ]; then status=TIMEOUT; fi
  say "$name" "$status" "$((SECONDS - start)) s"
}

# needs NAME TOOL: whether TOOL is there; the part is skipped if not.
needs() {
  if command -v "$2" >/dev/null; then return; fi
  say "$1" SKIPPED "$2 is not there"
  return 1
}

printf '%s  %s\n' "$(date -u +%FT%TZ)" "$PARTS" >>"$RESULTS/summary.txt"
part machine 20 machine
if [ -n "$WHEELS" ]; then part wheels 120 unpack_wheels; fi

if wanted first; then
  # Eight minutes at most, even if each takes all its time.
  part build 140 build
  part core 60 core
  part tests 80 run_pytest tests/test_gpu.py tests/test_batch_norm.py
  part step_first 110 measure step step_first --no-compile \
    --only adamw-1B-fp16 adamw-2000x64K-fp16 adamw-resnet50-fp16
  if needs counters ncu; then part counters 60 counters; fi
fi

if wanted build; then part build "$LIMIT" build; fi
if wanted core; then part core "$LIMIT" core; fi
if wanted tests; then part tests "$LIMIT" run_pytest tests/test_gpu.py tests/test_batch_norm.py; fi
if wanted tests_graphs; then
  part tests_graphs "$LIMIT" run_pytest tests/test_graphs.py tests/test_experiments_graphs.py
fi
if wanted tests_rest; then
  part tests_rest "$LIMIT" run_pytest tests --ignore tests/test_gpu.py --ignore tests/test_batch_norm.py \
    --ignore tests/test_graphs.py \
    --ignore tests/test_experiments_graphs.py --continue-on-collection-errors
fi
if wanted memcheck && needs memcheck compute-sanitizer; then part memcheck "$LIMIT" sanitize memcheck; fi
for tool in racecheck initcheck; do
  if wanted "$tool" && needs "$tool" compute-sanitizer; then part "$tool" "$LIMIT" sanitize_some "$tool"; fi
done
if wanted host_time; then part host_time "$LIMIT" measure host_time host_time_cuda; fi
if wanted step; then part step "$LIMIT" measure step step_cuda --no-compile; fi
if wanted compiled; then part compiled "$LIMIT" measure step step_compiled --only resnet50 vit-b-fp16; fi
if wanted counters && needs counters ncu; then part counters "$LIMIT" counters; fi
if wanted meter; then
  part meter "$LIMIT" measure step meter_cuda --no-compile --meter --only 64K-fp16 resnet50-fp16 sgd-1B-fp16
fi
for name in nets e1 e2 e4 e5; do
  wanted "$name" || continue
  if "$PYTHON" -c 'import torchvision, timm, rich, tqdm' 2>/dev/null; then
    part "$name" "$LIMIT" "$name"
  else
    say "$name" SKIPPED "torchvision, timm, rich or tqdm is missing: see WHEELS"
  fi
done

printf '\n'
cat "$RESULTS/summary.txt"
exit "$failed"
