#!/usr/bin/env bash
# The experiments that have something to show without a GPU: E1, E2, E4 and E5 on synthetic data in
# FP32, under torch.amp and at O5. Twenty minutes on two cores that do nothing else.
#
#     make experiments
#
# PYTHON   interpreter that has ampfuse[experiments] (python3)
# RESULTS  folder of the result files (build/experiments)
# CSV      folder of the CSV files (benchmarks/results)
# REPEATS  runs of each variant (5)
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
RESULTS=${RESULTS:-build/experiments}
CSV=${CSV:-benchmarks/results}

train() {
  "$PYTHON" -m ampfuse train "$@" --variant fp32 amp-bf16 O5 --data synthetic --device cpu \
    --repeats "${REPEATS:-5}" --output "$RESULTS"
}

train cifar --recipe e1 --batch-size 32 64 128 --evaluate False
train cifar --recipe e2
train imagenet --recipe e4 --model resnet18
train mlp --recipe e5
for recipe in e1 e2 e4 e5; do
  "$PYTHON" -m ampfuse make_table "$recipe" --no-published --results "$RESULTS" \
    --csv "$CSV/experiments_${recipe}_cpu.csv"
done
"$PYTHON" -m ampfuse make_plot --results "$RESULTS" --plot_std
"$PYTHON" benchmarks/report.py "$CSV"/experiments_e?_cpu.csv
