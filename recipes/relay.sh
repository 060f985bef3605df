#!/usr/bin/env bash
# The demo's task, by any of the three methods: two 135M agents learn to answer better in fewer words.
#
#   bash recipes/relay.sh isft        imitate the best conversations
#   bash recipes/relay.sh idpo        prefer the better of sibling turns, from conversation trees
#   bash recipes/relay.sh isft_dpo    both in turn
#   bash recipes/relay.sh compare     one table of those that were run
#   SEED=1 bash recipes/relay.sh idpo               other tasks, other draws
#
# Killed? Run it again: it goes on where it stopped. Results are in runs/relay-seed$SEED.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
METHOD=${1:-isft}

MODEL=${MODEL:-relay}       # SmolLM2-135M-Instruct with an adapter that makes it wordy and fallible
BASE=${BASE:-smollm2}       # whose losses keep the language readable
ROUNDS=${ROUNDS:-2}         # rounds after the initialization round
TASKS=${TASKS:-32}          # fresh tasks in each SFT round
N=${N:-6}                   # conversations per task (the paper: 10)
TREES=${TREES:-12}          # fresh tasks in each DPO round
HELD_OUT=${HELD_OUT:-200}   # test tasks; their names occur in no training task

# Warmer than the paper's 0.7, since this model's one learned style varies little; no format texts
# in the initialization round, as for MATH and GSM8K in the paper.
GEN=${GEN:-"-t 0.8 --batch-size 96"}
# λ and θ are the paper's for HotpotQA; θ counts for little where the best of a task is right.
SCORE=${SCORE:-"--lambda-token 0.6 --lambda-loss 1"}
SELECT=${SELECT:-"--theta 0.5 --top 0.7"}
# A rank-8 adapter of a 135M model on some 40 examples: more epochs and smaller steps than the paper.
SFT=${SFT:-"--epochs 2 --batch-size 8 --lr 3e-4"}
# R_token is relative to the longest of a tree's 24 conversations, not of 6: twice the weight, and a
# smaller difference, or nearly no pair is about length.
TREE=${TREE:-"--lambda-token 1.2"}
PAIRS=${PAIRS:-"--theta-diff 0.05"}
# Some 60 pairs: more steps and larger ones than the paper's, each over several families, since the
# pairs of one pull all the same way. β is the paper's for 2WikiMultiHopQA; with 0.1 these steps lead
# to repetition (docs/log.md).
alpha=""
[ "$METHOD" != isft_dpo ] || alpha=" --alpha 0"
DPO=${DPO:-"--beta 0.5 --epochs 2 --batch-size 24 --lr 1e-4$alpha"}

# bash reads a script as it goes: with exit in the same line, this file may be edited during a run.
train "$METHOD" relay "optima-lite tasks relay" "optima-lite tasks relay --split test"; exit
