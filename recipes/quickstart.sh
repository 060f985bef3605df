#!/usr/bin/env bash
# The demo: a team of two 135M agents learns to answer better with a fraction of the words.
#
#   bash recipes/quickstart.sh                          about 15 minutes on 2 cores, no GPU
#   ROUNDS=4 HELD_OUT=200 bash recipes/quickstart.sh    the longer run of docs/log.md
#   SEED=1 bash recipes/quickstart.sh                   other tasks, other draws
#
# Killed? Run it again: it goes on where it stopped. Results are in runs/quickstart-seed$SEED.
source "$(dirname "$0")/lib.sh"

MODEL=${MODEL:-relay}       # SmolLM2-135M-Instruct with an adapter that makes it wordy and fallible
BASE=${BASE:-smollm2}       # whose losses keep the language readable
ROUNDS=${ROUNDS:-2}         # iSFT rounds after the initialization round
TASKS=${TASKS:-32}          # fresh tasks in each round
N=${N:-6}                   # conversations per task (the paper: 10)
HELD_OUT=${HELD_OUT:-64}    # test tasks; their names occur in no training task

# Warmer than the paper's 0.7, since this model's one learned style varies little; no format texts
# in the initialization round, as for MATH and GSM8K in the paper.
GEN="-t 0.8 --batch-size 96"
# λ and θ are the paper's for HotpotQA; θ counts for little where the best of a task is right.
SCORE="--lambda-token 0.6 --lambda-loss 1"
SELECT="--theta 0.5 --top 0.7"
# A rank-8 adapter of a 135M model on some 40 examples: more epochs and smaller steps than the paper.
SFT="--epochs 2 --batch-size 8 --lr 3e-4"

isft quickstart "optima-lite tasks relay" "optima-lite tasks relay --split test"
