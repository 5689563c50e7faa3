#!/usr/bin/env bash
# Trains an EAGLE-3 head and Medusa heads for the default model on one GPU, and serves each once to see what it accepts.
#
#   benchmarks/heads/train.sh [OUT]          (default OUT: benchmarks/heads)
#
# Prompts: user turns that the model writes itself, and questions about the texts of this repository; answers are greedy and
# sampled in turns. Both heads draft the 8,192 most frequent tokens by the model's own output head, and are stored in
# bfloat16: 10 MB each. About seven minutes on an H200; DEVICE=cpu works, too, with PROMPTS and MINUTES lowered.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/heads}
device=${DEVICE:-cuda}
python=${PYTHON:-python}
model=${MODEL:-default}
prompts=${PROMPTS:-16000}
answer_minutes=${ANSWER_MINUTES:-0.75}
eagle_minutes=${EAGLE_MINUTES:-2.6}
medusa_minutes=${MEDUSA_MINUTES:-1.3}
eagle=$out/smollm2-135m-instruct-eagle3
medusa=$out/smollm2-135m-instruct-medusa
answers=$(mktemp -d)/answers.jsonl
mkdir -p "$out"
rm -rf "$eagle" "$medusa"

train() {
  "$python" -m bough train-draft "$model" "$@" --device "$device" --max-length 640 --epochs 1000 --token-map 8192 \
    --held-back 128 --batch-tokens 16384
}

train "$eagle" --method eagle3 --num-drafts 5 --max-minutes "$eagle_minutes" \
  --sampled-prompts "$prompts" --texts docs --texts README.md --texts CONTRIBUTING.md --texts bough --text-prompts 2000 \
  --answer-tokens 256 --temperature 0 0.7 --max-total-tokens 400000 --max-answer-minutes "$answer_minutes" --save-answers "$answers"
train "$medusa" --method medusa --num-drafts 4 --medusa-layers 4 --max-minutes "$medusa_minutes" --answers "$answers"
"$python" benchmarks/heads/measure.py "$out" --model "$model" --device "$device" --answers "$answers" --max-tokens 96
