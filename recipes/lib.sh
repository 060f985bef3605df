# The training loops, for any dataset recipe. Source this file; it runs nothing by itself.
#
# A recipe sets the dataset's numbers and calls `isft`, `idpo` or `isft_dpo` (or `train METHOD`).
# All of these can be set from outside:
#
#   MODEL    what to train: a hub id, a directory, or built in        (recipe's default)
#   BASE     M_base of R_loss; an adapter of it is left off           ($MODEL)
#   OUT      run directory; the same OUT continues where it stopped   (runs/NAME-seed$SEED)
#   SEED     decides tasks, splits, sampling and training             (0)
#   ROUNDS   rounds after the initialization round                    (recipe's default)
#   TASKS, N tasks of an SFT round, conversations a task              (recipe's default)
#   TREES    tasks of a DPO round, a tree each                        (recipe's default)
#   HELD_OUT tasks to evaluate on, greedily                           (recipe's default)
#   LOAD     auto | bf16 | fp16 | fp32 | 4bit: how weights are held   (auto)
#   TUNE     lora | full                                              (lora)
#   LAUNCH   what starts sft and dpo: "accelerate launch -m optima_lite" runs them on several GPUs
#                                                                     (optima-lite)
#
# One small GPU:      LOAD=4bit bash recipes/hotpotqa.sh
# Several large ones: TUNE=full LAUNCH="accelerate launch -m optima_lite" bash recipes/hotpotqa.sh
#
# The three methods share the initialization round (OUT/init) and what is measured before and after
# it; each works in a directory of its own (OUT/isft, OUT/idpo, OUT/isft_dpo), so that they can be run
# one after the other and compared: `compare` puts the last round of each in one table.
#
# Every step writes one file or directory and can be killed at any time: gen, score, tree, sft and dpo
# resume, select and tasks write whole files. Commands are printed as they run. In an OUT that is
# there, ROUNDS and HELD_OUT may grow. Other settings may change until a result has come of them: a
# mistyped MODEL until something was measured, SFT until the first model is trained. From then on
# the recipe refuses to go on with others. A step that was begun with other settings says so: give
# those again, or remove the file or directory it names. One run at a time writes to a file; methods
# may run side by side in one OUT once the initialization is there.

set -euo pipefail

SEED=${SEED:-0}
LOAD=${LOAD:-auto}
TUNE=${TUNE:-lora}
LAUNCH=${LAUNCH:-optima-lite}

isft() { train isft "$@"; }
idpo() { train idpo "$@"; }
isft_dpo() { train isft_dpo "$@"; }

# train METHOD NAME TASKS_COMMAND TEST_COMMAND — initialization, $ROUNDS rounds of METHOD, a
# measurement after each, one table. METHOD compare makes only the table of the methods' last rounds.
#
# The task commands are `optima-lite tasks …`; each round's gets its own --seed, so that a generator
# gives fresh tasks and a dataset other splits. All methods see the same tasks in the same round.
#
# Options of single commands come from GEN (sampling, for gen and tree), SCORE (weights of the reward,
# for score and tree), TREE (the search), SELECT (of trajectories), PAIRS (select, of trees), SFT and
# DPO. For the initialization round they are INIT_GEN, INIT_SCORE, INIT_SELECT and INIT_SFT, by default
# those without INIT_. START says where an SFT round begins: `previous`, the last round's model (the
# exchange setting), or `base`, MODEL (debate). A DPO round begins with the last round's model.
train() {
  local method=$1 name=$2 tasks=$3 test=$4
  DIR=${OUT:-runs/$name-seed$SEED}
  # Each round has a seed of its own, SEED * 1000 + round, and --seed ends at 2^32 - 1.
  whole SEED 0 4294000
  whole ROUNDS 0 999
  local number
  for number in HELD_OUT TASKS N TREES; do whole $number 1 999999999; done
  one_of LOAD auto bf16 fp16 fp32 4bit
  one_of TUNE lora full
  one_of START previous base
  # As they stand in the command lines that are printed and run.
  OUT=$(printf %q "$DIR")
  BASE=$(printf %q "${BASE:-$MODEL}")
  MODEL=$(printf %q "$MODEL")
  INIT_GEN=${INIT_GEN-${GEN:-}} INIT_SCORE=${INIT_SCORE-${SCORE:-}}
  INIT_SELECT=${INIT_SELECT-${SELECT:-}} INIT_SFT=${INIT_SFT-${SFT:-}}
  case $method in
    compare) compare; return ;;
    isft) local uses="TASKS N SELECT SFT START" ;;
    idpo) local uses="TREES TREE PAIRS DPO" ;;
    isft_dpo) local uses="TASKS N SELECT SFT START TREES TREE PAIRS DPO" ;;
    *) echo "error: $method is not a method: isft, idpo, isft_dpo or compare" >&2; exit 2 ;;
  esac

  mkdir -p "$DIR/$method"
  same_settings "$DIR/settings.txt" "$DIR/eval-start.jsonl" "$test" MODEL BASE SEED LOAD EVAL_GEN
  same_settings "$DIR/init-settings.txt" "$DIR/init" "$tasks" \
    TUNE TASKS N INIT_GEN INIT_SCORE INIT_SELECT INIT_SFT
  same_settings "$DIR/$method/settings.txt" "$DIR/$method/round1" "" GEN SCORE $uses
  initialize "$tasks" "$test"

  local round from model=$OUT/init here=$OUT/$method
  local files="$OUT/eval-start.jsonl $OUT/eval-init.jsonl" labels="--label start --label init"
  TIMES=$DIR/$method/times.tsv
  for ((round = 1; round <= ROUNDS; round++)); do
    if [ "$method" = idpo ] || { [ "$method" = isft_dpo ] && ((round % 2 == 0)); }; then
      dpo_round "$here/round$round" $((SEED * 1000 + round)) "$model" "$tasks"
    else
      from=$model
      [ "${START:-previous}" = base ] && from=$MODEL
      sft_round "$here/round$round" $((SEED * 1000 + round)) "$model" "$from" "$tasks"
    fi
    model=$here/round$round
    evaluate "$model" "$here/eval-round$round.jsonl"
    files+=" $here/eval-round$round.jsonl"
    labels+=" --label $(title $method)-$round"
  done
  run "optima-lite eval $files $labels"
  printf '%s: %s min of generating, scoring and training, %s of them for the initialization\n' \
    "$(title $method)" "$(minutes "$DIR/times.tsv" "$TIMES")" "$(minutes "$DIR/times.tsv")" >&2
}

# compare — the last round of each method that was run in OUT, in one table.
compare() {
  local method last files="$OUT/eval-start.jsonl $OUT/eval-init.jsonl"
  local labels="--label start --label init" tasks found=""
  tasks=$(lines "$DIR/test.jsonl")
  for method in isft idpo isft_dpo; do
    last=$({ ls "$DIR/$method" 2>/dev/null || true; } | sed -n 's/^eval-round\([0-9]*\)\.jsonl$/\1/p' | sort -n | tail -n 1)
    [ -n "$last" ] || continue
    if [ "$(lines "$DIR/$method/eval-round$last.jsonl")" != "$tasks" ]; then
      echo "error: $method was not measured on all $tasks tasks of $DIR/test.jsonl: run it again" >&2
      exit 1
    fi
    found=yes
    files+=" $OUT/$method/eval-round$last.jsonl"
    labels+=" --label $(title $method)-$last"
    printf '%s-%s: %s min\n' "$(title $method)" "$last" \
      "$(minutes "$DIR/times.tsv" "$DIR/$method/times.tsv")" >&2
  done
  if [ -z "$found" ]; then
    echo "error: no method was run in $DIR: begin with isft, idpo or isft_dpo" >&2
    exit 1
  fi
  run "optima-lite eval $files $labels"
}

# initialize TASKS_COMMAND TEST_COMMAND — the held-out tasks, and the SFT round that all methods begin
# with (Section 3.2, Algorithm 1) -> $OUT/init
initialize() {
  TIMES=$DIR/times.tsv
  [ -e "$DIR/eval-start.jsonl" ] || rm -f "$DIR/test.jsonl"  # it may be another seed's
  if [ "$(lines "$DIR/test.jsonl")" -lt "$HELD_OUT" ]; then
    run "$2 --limit $HELD_OUT --seed $SEED --overwrite -o $OUT/test.jsonl"
  fi
  evaluate "$MODEL" "$OUT/eval-start.jsonl"
  local GEN=$INIT_GEN SCORE=$INIT_SCORE SELECT=$INIT_SELECT SFT=$INIT_SFT
  sft_round "$OUT/init" $((SEED * 1000)) "$MODEL" "$MODEL" "$1"
  evaluate "$OUT/init" "$OUT/eval-init.jsonl"
}

# sft_round MODEL_DIR SEED MODEL FROM TASKS_COMMAND — MODEL talks, FROM learns from its best
# conversations -> MODEL_DIR
sft_round() {
  finished "$1" && return
  run "$5 --limit $TASKS --seed $2 | optima-lite gen --model $3 -n $N --seed $2 --load $LOAD ${GEN:-} --resume -o $1-trajectories.jsonl"
  run "optima-lite score $1-trajectories.jsonl --model $BASE --load $LOAD ${SCORE:-} --resume -o $1-scored.jsonl"
  run "optima-lite select $1-scored.jsonl ${SELECT:-} | $LAUNCH sft --model $4 --tune $TUNE --load $LOAD --seed $SEED ${SFT:-} --resume -o $1"
}

# dpo_round MODEL_DIR SEED MODEL TASKS_COMMAND — MODEL talks in trees and learns to prefer the better
# of sibling turns -> MODEL_DIR
dpo_round() {
  finished "$1" && return
  run "$4 --limit $TREES --seed $2 | optima-lite tree --model $3 --base $BASE --seed $2 --load $LOAD ${GEN:-} ${SCORE:-} ${TREE:-} --resume -o $1-trees.jsonl"
  run "optima-lite select $1-trees.jsonl ${PAIRS:-} | $LAUNCH dpo --model $3 --tune $TUNE --load $LOAD --seed $SEED ${DPO:-} --resume -o $1"
}

# evaluate MODEL FILE — greedy conversations on the held-out tasks; not counted in the minutes.
evaluate() {
  TIMES=/dev/null run "optima-lite gen $OUT/test.jsonl --model $1 -n 1 -t 0 --load $LOAD ${EVAL_GEN:-} --resume -o $2"
}

# whole VARIABLE LEAST MOST — stop unless it is such a whole number, or not set.
whole() {
  local value=${!1:-$2}
  # Without leading zeros: bash would read them as octal. Length first: its numbers end somewhere.
  if [[ ! $value =~ ^(0|[1-9][0-9]{0,9})$ ]] || ((value < $2 || value > $3)); then
    echo "error: $1 is a whole number from $2 to $3, not $value" >&2
    exit 2
  fi
}

# one_of VARIABLE WORD… — stop unless it is one of the words, or not set.
one_of() {
  local name=$1 word
  shift
  for word in "$@"; do [ "${!name:-$1}" != "$word" ] || return 0; done
  echo "error: $name is one of $*, not ${!name}" >&2
  exit 2
}

# finished MODEL_DIR — whether it was trained. Its name is quoted as in the command lines.
finished() { eval "[ -e $1 ]"; }

# run "PIPELINE" — print a shell pipeline, run it, say how long it took, and add that to $TIMES.
run() {
  local started=$SECONDS
  printf '\n\033[1m$ %s\033[0m\n' "$1" >&2
  eval "$1"
  printf '  [%d s]\n' $((SECONDS - started)) >&2
  printf '%d\t%s\n' $((SECONDS - started)) "$1" >> "${TIMES:-/dev/null}"
}

# lines FILE — how many it has, 0 where it is not there.
lines() { { cat "$1" 2>/dev/null || true; } | wc -l; }

# minutes FILE… — the sum of times files.
minutes() { { cat "$@" 2>/dev/null || true; } | awk -F '\t' '{ s += $1 } END { printf "%.1f", s / 60 }'; }

title() { case $1 in isft) echo iSFT ;; idpo) echo iDPO ;; isft_dpo) echo iSFT-DPO ;; esac; }

# same_settings FILE RESULT TASKS_COMMAND VARIABLE… — keep in FILE what shapes RESULT, and stop where
# a run would go on from RESULT with other settings.
same_settings() {
  local file=$1 result=$2 tasks=$3 name now
  shift 3
  now=$(
    for name in "$@"; do printf '%s=%s\n' "$name" "${!name:-}"; done
    printf '%s\n' "$tasks"
  )
  if [ ! -e "$file" ] || [ ! -e "$result" ]; then
    printf '%s\n' "$now" > "$file"
  elif ! diff "$file" - <<< "$now" >&2; then
    echo "error: ${file%/*} was made with other settings (<): set OUT to another directory" >&2
    exit 1
  fi
}
