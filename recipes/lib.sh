# The training loops, for any dataset recipe. Source this file; it runs nothing by itself.
#
# A recipe sets the dataset's numbers and calls `isft`. All of these can be set from outside:
#
#   MODEL    what to train: a hub id, a directory, or built in        (recipe's default)
#   BASE     M_base of R_loss; an adapter of it is left off           ($MODEL)
#   OUT      run directory; the same OUT continues where it stopped   (runs/NAME-seed$SEED)
#   SEED     decides tasks, splits, sampling and training             (0)
#   ROUNDS   iSFT rounds after the initialization round               (recipe's default)
#   TASKS, N tasks a round, conversations a task                      (recipe's default)
#   HELD_OUT tasks to evaluate on, greedily                           (recipe's default)
#   LOAD     auto | bf16 | fp16 | fp32 | 4bit: how weights are held   (auto)
#   TUNE     lora | full                                              (lora)
#   LAUNCH   what starts sft: "accelerate launch -m optima_lite" runs it on several GPUs
#                                                                     (optima-lite)
#
# One small GPU:      LOAD=4bit bash recipes/hotpotqa.sh
# Several large ones: TUNE=full LAUNCH="accelerate launch -m optima_lite" bash recipes/hotpotqa.sh
#
# Every step writes one file or directory and can be killed at any time: gen, score and sft resume,
# select and tasks write whole files. Commands are printed as they run. In an OUT that is there, ROUNDS
# and HELD_OUT may grow; with other settings the recipe refuses to go on.

set -euo pipefail

SEED=${SEED:-0}
LOAD=${LOAD:-auto}
TUNE=${TUNE:-lora}
LAUNCH=${LAUNCH:-optima-lite}

# run "PIPELINE" — print a shell pipeline, run it, and say how long it took.
run() {
  local started=$SECONDS
  printf '\n\033[1m$ %s\033[0m\n' "$1" >&2
  eval "$1"
  printf '  [%d s]\n' $((SECONDS - started)) >&2
}

# isft NAME TASKS_COMMAND TEST_COMMAND — initialization round, $ROUNDS iSFT rounds, a measurement
# after each, one table. The task commands are `optima-lite tasks …`; each round's gets its own
# --seed, so that a generator gives fresh tasks and a dataset other splits.
#
# Options of single commands come from GEN, SCORE, SELECT, SFT (and INIT_GEN for round 0).
isft() {
  local name=$1 tasks=$2 test=$3
  DIR=${OUT:-runs/$name-seed$SEED}
  BASE=${BASE:-$MODEL}
  mkdir -p "$DIR"
  same_settings "$tasks" "$test"
  OUT=$(printf %q "$DIR")  # as it stands in the command lines that are printed and run
  if [ "$(cat "$DIR/test.jsonl" 2>/dev/null | wc -l)" -lt "$HELD_OUT" ]; then
    run "$test --limit $HELD_OUT --seed $SEED --overwrite -o $OUT/test.jsonl"
  fi
  evaluate "$MODEL" start

  local round model=$MODEL files="$OUT/eval-start.jsonl" labels="--label start"
  for ((round = 0; round <= ROUNDS; round++)); do
    # Exchange: each round trains the previous round's model further (Section 3.2).
    sft_round "$round" "$model" "$tasks"
    model=$OUT/round$round
    evaluate "$model" "round$round"
    files+=" $OUT/eval-round$round.jsonl"
    labels+=" --label $( ((round)) && echo "iSFT-$round" || echo init)"
  done
  run "optima-lite eval $files $labels"
}

# same_settings TASKS_COMMAND TEST_COMMAND — keep what shapes the results in settings.txt, and stop
# where a run with other settings would go on in the same directory.
same_settings() {
  local now name
  now=$(
    for name in MODEL BASE SEED TASKS N LOAD TUNE GEN INIT_GEN SCORE SELECT SFT EVAL_GEN; do
      printf '%s=%s\n' "$name" "${!name:-}"
    done
    printf '%s\n' "$@"
  )
  if [ ! -e "$DIR/settings.txt" ]; then
    printf '%s\n' "$now" > "$DIR/settings.txt"
  elif ! diff "$DIR/settings.txt" - <<< "$now" >&2; then
    echo "error: $DIR was made with other settings (<): set OUT to another directory" >&2
    exit 1
  fi
}

# sft_round ROUND MODEL TASKS_COMMAND — generate, score, select, train -> $OUT/roundROUND
sft_round() {
  local round=$1 model=$2 tasks=$3 here=$OUT/round$1
  [ -e "$DIR/round$round" ] && return
  local gen=${GEN:-}
  ((round)) || gen=${INIT_GEN:-${GEN:-}}
  local seed=$((SEED * 1000 + round))
  run "$tasks --limit $TASKS --seed $seed | optima-lite gen --model $model -n $N --seed $seed --load $LOAD $gen --resume -o $here-trajectories.jsonl"
  run "optima-lite score $here-trajectories.jsonl --model $BASE --load $LOAD ${SCORE:-} --resume -o $here-scored.jsonl"
  run "optima-lite select $here-scored.jsonl ${SELECT:-} | $LAUNCH sft --model $model --tune $TUNE --load $LOAD --seed $SEED ${SFT:-} --resume -o $here"
}

# evaluate MODEL LABEL — greedy conversations on the held-out tasks -> $OUT/eval-LABEL.jsonl
evaluate() {
  run "optima-lite gen $OUT/test.jsonl --model $1 -n 1 -t 0 --load $LOAD ${EVAL_GEN:-} --resume -o $OUT/eval-$2.jsonl"
}
