#!/usr/bin/env bash
# The demo: a team of two 135M agents learns to answer better with a fraction of the words.
#
#   bash recipes/quickstart.sh                          about 15 minutes on 2 cores, no GPU
#   ROUNDS=4 HELD_OUT=200 bash recipes/quickstart.sh    the longer run of docs/log.md
#   SEED=1 bash recipes/quickstart.sh                   other tasks, other draws
#
# Killed? Run it again: it goes on where it stopped. Results are in runs/quickstart-seed$SEED.
# The numbers are in relay.sh, which knows the other methods too.
OUT=${OUT:-runs/quickstart-seed${SEED:-0}}
HELD_OUT=${HELD_OUT:-64}
source "$(dirname "$0")/relay.sh" isft
