#!/usr/bin/env bash
# HotpotQA, information exchange, iSFT with the paper's numbers (Table 8).
#
#   bash recipes/hotpotqa.sh                                  Llama 3 8B, full size, from the hub
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct LOAD=4bit bash recipes/hotpotqa.sh      any model, small GPU
#   SCALE=tiny bash recipes/hotpotqa.sh                       smollm2, a few tasks, a laptop CPU
#   TRAIN=train.json TEST=dev.json bash recipes/hotpotqa.sh   files on disk, official or hub schema
source "$(dirname "$0")/lib.sh"

if [ "${SCALE:-full}" = tiny ]; then
  MODEL=${MODEL:-smollm2}
  ROUNDS=${ROUNDS:-0} TASKS=${TASKS:-12} N=${N:-4} HELD_OUT=${HELD_OUT:-20}
  # A 135M model rarely finds an answer: whatever is best of four is trained on, to show the steps.
  THETA=${THETA:--1}
  EVAL_GEN=${EVAL_GEN:---max-turns 4 --max-turn-tokens 96}
else
  MODEL=${MODEL:-meta-llama/Meta-Llama-3-8B-Instruct}
  ROUNDS=${ROUNDS:-5}        # six rounds in all: the initialization round and five of iSFT
  TASKS=${TASKS:-10000}      # tasks a round
  N=${N:-10}                 # conversations a task
  HELD_OUT=${HELD_OUT:-7405} # the whole validation split
  THETA=${THETA:-0.5}        # θ_sft
  EVAL_GEN=${EVAL_GEN:-}
fi
LR=${LR:-$([ "$TUNE" = full ] && echo 2e-5 || echo 2e-4)}  # Table 8; ten times that with LoRA

GEN="-t 0.7 $EVAL_GEN"
INIT_GEN="-t 0.3 --formats $EVAL_GEN"   # round 0: a random format text ends each prompt
SCORE="--lambda-token 0.6 --lambda-loss 1"
SELECT="--theta $THETA --top 0.7"
SFT="--epochs 3 --batch-size 32 --lr $LR"

isft hotpotqa \
  "optima-lite tasks hotpotqa --shuffle ${TRAIN:+--source $TRAIN}" \
  "optima-lite tasks hotpotqa --split validation ${TEST:+--source $TEST}"
