#!/usr/bin/env bash
# Compiles the tests of the core as they run on a GPU, with CUDA's runtime in place of the emulation:
#
#     tests/cpp/build_cuda.sh FOLDER
#
# makes FOLDER/test_core. That takes nvcc and no GPU, so a machine without one can make it for one
# that has a GPU and no compiler.
#
# AMPFUSE_CUDA_ARCHS   of which GPUs, as 90 or "80;90" (native: those of this machine)
# NVCC                 the compiler (nvcc)
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "$0")/../.."
nvcc=$(command -v "${NVCC:-nvcc}")

flags=(-std=c++17 -O2 -lineinfo -fmad=false -Xcompiler=-ffp-contract=off -Icsrc)
for arch in $(tr ';,' '  ' <<<"${AMPFUSE_CUDA_ARCHS:-native}"); do
  if [ "$arch" = native ]; then
    flags+=(-arch=native)
  else
    arch=${arch//./}
    flags+=(-gencode "arch=compute_$arch,code=sm_$arch")
  fi
done
# PyPI's packages keep the runtime where their nvcc does not look.
runtime=$(dirname "$(dirname "$nvcc")")/lib
if [ -e "$runtime/libcudart_static.a" ]; then flags+=("-L$runtime"); fi

# The CPU's kernels are those of one instruction set, which machines with a GPU have.
isa=scalar
if [ "$(uname -m)" = x86_64 ]; then isa=avx2; fi
units=$(python3 tests/cpp/units.py "$isa")
for test in main test_core test_nn; do units+=$'\n'"$test tests/cpp/$test.cpp"; done
objects=()
jobs=()
while read -r name source options; do
  own=()
  for option in $options; do
    case $option in
      -m*) own+=(-Xcompiler="$option") ;;
      *) own+=("$option") ;;
    esac
  done
  object=$folder/$name.o
  "$nvcc" "${flags[@]}" "${own[@]}" -c "$source" -o "$object" &
  jobs+=($!)
  objects+=("$object")
  # As many at a time as there are cores.
  if [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; then wait -n; fi
done <<<"$units"
for job in "${jobs[@]}"; do wait "$job"; done
"$nvcc" "${flags[@]}" "${objects[@]}" -o "$folder/test_core"
rm "${objects[@]}"
