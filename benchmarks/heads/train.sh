#!/usr/bin/env bash
# Trains an EAGLE-3 head and Medusa heads for the default model on one GPU, and serves each once to see what it accepts.
#
#   benchmarks/heads/train.sh [OUT]          (default OUT: benchmarks/heads)
#
# Prompts: user turns that the model writes itself, and questions about the texts of this repository. Both heads use the
# model's own output head and are stored in bfloat16: 10 MB and 7 MB. About four minutes on an H200; DEVICE=cpu works, too,
# with PROMPTS and MINUTES lowered.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/heads}
device=${DEVICE:-cuda}
python=${PYTHON:-python}
model=${MODEL:-default}
prompts=${PROMPTS:-6000}
minutes=${MINUTES:-1.0}
answers=$(mktemp -d)/answers.jsonl
mkdir -p "$out"
rm -rf "$out/smollm2-135m-instruct-eagle3" "$out/smollm2-135m-instruct-medusa"

train() { "$python" -m bough train-draft "$model" "$@" --device "$device" --max-length 768 --epochs 40; }

train "$out/smollm2-135m-instruct-eagle3" --method eagle3 --num-drafts 5 \
  --sampled-prompts "$prompts" --texts docs --texts README.md --texts CONTRIBUTING.md --texts bough --text-prompts 1500 \
  --answer-tokens 256 --held-back 128 --save-answers "$answers" --max-minutes "$minutes" --batch-tokens 16384
train "$out/smollm2-135m-instruct-medusa" --method medusa --num-drafts 4 --medusa-layers 2 \
  --answers "$answers" --held-back 128 --max-minutes "$minutes" --batch-tokens 16384
"$python" benchmarks/heads/measure.py "$out" --model "$model" --device "$device" --answers "$answers"
