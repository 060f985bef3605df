#!/usr/bin/env bash
# HotpotQA, information exchange, with the paper's numbers (Table 8).
#
#   bash recipes/hotpotqa.sh [isft|idpo|isft_dpo|compare]     Llama 3 8B, full size, from the hub
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct LOAD=4bit bash recipes/hotpotqa.sh      any model, small GPU
#   SCALE=tiny bash recipes/hotpotqa.sh                       smollm2, a few tasks, a laptop CPU
#   TRAIN=train.json TEST=dev.json bash recipes/hotpotqa.sh   files on disk, official or hub schema
source "$(dirname "$0")/lib.sh"
METHOD=${1:-isft}

if [ "${SCALE:-full}" = tiny ]; then
  MODEL=${MODEL:-smollm2}
  ROUNDS=${ROUNDS:-0} TASKS=${TASKS:-12} N=${N:-4} TREES=${TREES:-2} HELD_OUT=${HELD_OUT:-20}
  # A 135M model rarely finds an answer: whatever is best of four is trained on, to show the steps.
  THETA=${THETA:--1} THETA_FILTER=${THETA_FILTER:--1} THETA_DIFF=${THETA_DIFF:-0}
  EVAL_GEN=${EVAL_GEN:---max-turns 4 --max-turn-tokens 96}
else
  MODEL=${MODEL:-meta-llama/Meta-Llama-3-8B-Instruct}
  ROUNDS=${ROUNDS:-5}        # six rounds in all: the initialization round and five more
  TASKS=${TASKS:-10000}      # tasks of an SFT round
  N=${N:-10}                 # conversations a task
  TREES=${TREES:-10000}      # tasks of a DPO round
  HELD_OUT=${HELD_OUT:-7405} # the whole validation split
  THETA=${THETA:-0.5} THETA_FILTER=${THETA_FILTER:-0.4} THETA_DIFF=${THETA_DIFF:-0.2}
  EVAL_GEN=${EVAL_GEN:-}
fi
# Table 8; ten times that with LoRA.
LR=${LR:-$([ "$TUNE" = full ] && echo 2e-5 || echo 2e-4)}
DPO_LR=${DPO_LR:-$([ "$TUNE" = full ] && echo 5e-7 || echo 5e-6)}

GEN=${GEN:-"-t 0.7 $EVAL_GEN"}
INIT_GEN=${INIT_GEN:-"-t 0.3 --formats $EVAL_GEN"}   # round 0: a random format text ends each prompt
SCORE=${SCORE:-"--lambda-token 0.6 --lambda-loss 1"}
SELECT=${SELECT:-"--theta $THETA --top 0.7"}
PAIRS=${PAIRS:-"--theta $THETA_FILTER --theta-diff $THETA_DIFF --top 0.5"}
INIT_SFT=${INIT_SFT:-${SFT:-"--epochs 3 --batch-size 32 --lr $LR"}}
if [ "$METHOD" = isft_dpo ]; then
  SFT=${SFT:-"--epochs 2 --batch-size 32 --lr $LR"}
  DPO=${DPO:-"--epochs 1 --batch-size 64 --lr $DPO_LR --beta 0.5 --alpha 0"}
else
  SFT=${SFT:-"--epochs 3 --batch-size 32 --lr $LR"}
  DPO=${DPO:-"--epochs 1 --batch-size 64 --lr $DPO_LR --beta 0.1 --alpha 1"}
fi

# bash reads a script as it goes: with exit in the same line, this file may be edited during a run.
train "$METHOD" hotpotqa \
  "optima-lite tasks hotpotqa --shuffle ${TRAIN:+--source $(printf %q "$TRAIN")}" \
  "optima-lite tasks hotpotqa --split validation ${TEST:+--source $(printf %q "$TEST")}"; exit
