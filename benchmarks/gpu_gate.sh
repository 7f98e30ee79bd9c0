#!/usr/bin/env bash
# Builds, tests and measures on a machine with an NVIDIA GPU, in one command:
#
#     benchmarks/gpu_gate.sh
#
# Everything it finds goes to ${OUT:-results/gpu}: machine.txt, one log per part, summary.txt, and
# the CSV files, tables and pictures of the benchmarks, which take at most a quarter of an hour. A part
# that fails does not keep the others from running; the exit status is the number of parts that failed.
#
# PYTHON   interpreter that has a CUDA build of torch, and pytest (python3). Nothing is installed there
#          and nothing is downloaded: the build goes to BUILD.
# BUILD    build folder (build/gpu), kept between runs
# PARTS    which parts to run: "build core tests sanitize bench experiments"
# WHEELS   folder of wheels for what the experiments need and PYTHON lacks (torchvision of its torch,
#          timm, rich, tqdm and theirs); they are unpacked into BUILD
set -uo pipefail
cd "$(dirname "$0")/.." || exit

PYTHON=${PYTHON:-python3}
OUT=$(mkdir -p "${OUT:-results/gpu}" && cd "${OUT:-results/gpu}" && pwd)
BUILD=${BUILD:-build/gpu}
PARTS=${PARTS:-build core tests sanitize bench experiments}
SITE=$PWD/$BUILD/site:$PWD/$BUILD/packages
JOBS=$(nproc)
failed=0
: >"$OUT/summary.txt"

# part NAME COMMAND...: runs it, keeps its output in NAME.log and one line in summary.txt.
part() {
  local name=$1 start=$SECONDS status=ok
  shift
  printf '\n=== %s\n' "$name"
  "$@" 2>&1 | tee "$OUT/$name.log" | tail -n 40
  if [ "${PIPESTATUS[0]}" -ne 0 ]; then
    status=FAILED
    failed=$((failed + 1))
  fi
  printf '%-22s %-7s %4d s\n' "$name" "$status" $((SECONDS - start)) | tee -a "$OUT/summary.txt"
}

wanted() { [[ " $PARTS " == *" $1 "* ]]; }

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

build() {
  cmake -S . -B "$BUILD" -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$PYTHON")" \
    -DAMPFUSE_CUDA=ON -DAMPFUSE_CUDA_ARCHS="${AMPFUSE_CUDA_ARCHS:-native}" &&
    cmake --build "$BUILD" -j "$JOBS" &&
    rm -rf "$BUILD/site" && mkdir -p "$BUILD/site" &&
    cmake --install "$BUILD" --prefix "$BUILD/site" &&
    cp -r python/ampfuse/. "$BUILD/site/ampfuse/" -n
}

# The torch-free core and its tests, compiled by nvcc with the real runtime in place of the emulation.
build_core() {
  local flags=(-std=c++17 -O2 -fmad=false -arch=native -Xcompiler=-ffp-contract=off -Icsrc)
  mkdir -p "$BUILD/core"
  nvcc "${flags[@]}" -Xcompiler=-mavx2,-mfma,-mf16c -c csrc/cpu/kernels_avx2.cpp -o "$BUILD/core/avx2.o" &&
    nvcc "${flags[@]}" -Xcompiler=-mavx512f,-mavx512bw,-mavx512dq,-mavx512vl,-mavx2,-mfma,-mf16c \
      -c csrc/cpu/kernels_avx512.cpp -o "$BUILD/core/avx512.o" &&
    nvcc "${flags[@]}" -lineinfo csrc/cuda/*.cu csrc/cpu/backend.cpp csrc/cpu/kernels_scalar.cpp \
      tests/cpp/main.cpp tests/cpp/test_core.cpp "$BUILD"/core/avx*.o -o "$BUILD/core/test_core"
}

core() { build_core && "$BUILD/core/test_core"; }

run_pytest() {
  PYTHONPATH="$SITE" "$PYTHON" -m pytest -p no:cacheprovider -q -m gpu "$@"
}

# The C++ tests are the subset: they touch every kernel at its seams and hold no framework's kernels.
sanitize() {
  local tool=$1
  local options=(--tool "$tool" --error-exitcode 9)
  [ "$tool" = memcheck ] && options+=(--leak-check full)
  compute-sanitizer "${options[@]}" "$BUILD/core/test_core" "${@:2}"
}

unpack_wheels() {
  "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target "$BUILD/packages" "$WHEELS"/*.whl
}

# One benchmark, bounded: what it has measured when its time is up is in its CSV.
measure() {
  local name=$1 seconds=$2
  PYTHONPATH="$SITE" timeout "$seconds" "$PYTHON" "benchmarks/$name.py" --device cuda \
    --csv "$OUT/${name}_cuda.csv"
}

# Tables, and pictures where matplotlib is, of what was measured.
report() {
  local status=0 csv
  for csv in "$OUT"/step_cuda.csv "$OUT"/host_time_cuda.csv; do
    [ -f "$csv" ] || { status=1; continue; }
    PYTHONPATH="$SITE" "$PYTHON" benchmarks/table.py "$csv" || status=1
    if "$PYTHON" -c 'import matplotlib' 2>/dev/null; then
      PYTHONPATH="$SITE" "$PYTHON" benchmarks/plot.py "$csv" || status=1
    fi
  done
  return "$status"
}

# Every experiment on synthetic data, at the published sizes where they take seconds, in all arms.
train() { PYTHONPATH="$SITE" "$PYTHON" -m ampfuse train "$@" --data synthetic --output "$OUT/results" --quiet; }

experiments() {
  local status=0 batch loop
  train mlp --recipe e5 --arm all --repeats 5 || status=1
  train mlp --recipe e5 --arm all --repeats 5 --graph || status=1
  for loop in tuned original; do
    train mnist --recipe e5 --arm all --epochs 1 --repeats 5 --loop "$loop" || status=1
  done
  train mnist --recipe e5 --arm all --epochs 1 --repeats 5 --graph || status=1
  for batch in 128 256 512 1024 2048; do
    for mode in FP32 FP16 amp; do
      train cifar --recipe e1 --mode "$mode" --batch-size "$batch" || status=1
    done
    train cifar --recipe e1 --arm tf32 amp-fp16 amp-bf16 O5 --batch-size "$batch" || status=1
  done
  train cifar --recipe e2 --arm all --iterations 60 || status=1
  train cifar --recipe e3 --model seresnext50_32x4d --arm all --iterations 30 || status=1
  train cifar --recipe e3 --model densenet161 --arm O0 O2 --batch-size 512 --iterations 30 || status=1
  for model in resnet18 resnet50; do
    train imagenet --recipe e4 --model "$model" --arm all --iterations 60 || status=1
  done
  return "$status"
}

part machine machine
if wanted build; then part build build; fi
if [ -n "${WHEELS:-}" ]; then part wheels unpack_wheels; fi
if wanted core; then part core core; fi
if wanted tests; then part tests run_pytest tests; fi
if wanted sanitize; then
  if ! command -v compute-sanitizer >/dev/null; then
    echo "sanitize               SKIPPED compute-sanitizer is not installed" | tee -a "$OUT/summary.txt"
  elif [ ! -x "$BUILD/core/test_core" ]; then
    echo "sanitize               SKIPPED the core's tests were not built" | tee -a "$OUT/summary.txt"
  else
    part memcheck sanitize memcheck
    # The next two are an order of magnitude slower: the tests with few blocks.
    for name in steps norms non_finite unscaled; do
      part "racecheck-$name" sanitize racecheck "$name"
      part "initcheck-$name" sanitize initcheck "$name"
    done
  fi
fi
if wanted bench; then
  part syncs measure syncs 120
  part host_time measure host_time 120
  part step measure step 600 # torch.compile takes half of it
  part report report
fi
if wanted experiments; then
  if PYTHONPATH="$SITE" "$PYTHON" -c 'import torchvision, timm, rich, tqdm' 2>/dev/null; then
    part experiments experiments
  else
    echo "experiments            SKIPPED torchvision, timm, rich or tqdm is missing: see WHEELS" |
      tee -a "$OUT/summary.txt"
  fi
fi

printf '\n'
cat "$OUT/summary.txt"
exit "$failed"
