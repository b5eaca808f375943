#!/usr/bin/env bash
# `make test`: everything, in the order in which it fails fastest. A stage that fails does not stop the later ones,
# so that one run shows all there is to mend; the exit status is non-zero if any did.
#
#   scripts/test.sh [STAGE...]     without a STAGE all of them; with some, only those of our own tests, over what is built
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
. scripts/environment.sh
umask 022 # the service account starts what is built here
export CARGO_TERM_COLOR=${CARGO_TERM_COLOR:-never}

# Whoever ends us ends what we run.
ends_jobs() { trap 'kill $(jobs -p) 2>/dev/null; exit 143' INT TERM; }
ends_jobs

failed=()
# stage NAME LIMIT_SECONDS COMMAND…
stage() {
  local name=$1 limit_s=$2 started=$SECONDS status=0
  shift 2
  printf '== %s\n' "$name"
  # In the background, where our trap is heard; bash would have it ignore Ctrl-C there, and what it starts too.
  timeout -k 30 "$limit_s" env --default-signal=INT,QUIT "$@" </dev/null &
  wait $! || status=$?
  [ "$status" = 124 ] && printf '%s: stopped after %s s\n' "$name" "$limit_s"
  [ "$status" = 0 ] || failed+=("$name")
  printf '== %s: %s (%s s)\n' "$name" "$([ "$status" = 0 ] && echo ok || echo "failed, status $status")" $((SECONDS - started))
  return "$status"
}

# Our own tests over the binary: each has a free port, a data directory and a range of ids of its own.
own_test() {
  local python=target/runtime/python/bin/python3
  local bare=$python
  [ -x /usr/bin/python3 ] && bare=/usr/bin/python3 # the bare system interpreter: the harness may lean on nothing else
  local with_ours=(env HARNESS_PYTHON="$PWD/$python")
  case $1 in
    harness) stage harness 300 "$bare" tests/harness/test_harness.py ;;
    program) stage program 300 "$bare" tests/harness/test_program.py ;;
    plots) stage plots 300 "${with_ours[@]}" "$bare" tests/harness/test_program.py Plots ;;
    zygote) stage zygote 300 "${with_ours[@]}" "$bare" tests/harness/test_zygote.py ;;
    kernel) stage kernel 900 "${with_ours[@]}" "$bare" tests/harness/test_kernel.py ;;
    node) stage node 300 "$bare" tests/harness/test_node.py ;;
    # What of the table the system's packages have, and the two languages that docs/languages.md adds.
    languages) stage toolchains 1200 bash scripts/setup.sh languages && stage languages 900 "$bare" -u tests/languages.py ;;
    exec-attacks) stage toolchains 1200 bash scripts/setup.sh languages && stage exec-attacks 600 "$bare" -u tests/exec_attacks.py ;;
    gallery) stage gallery 600 "$python" -u tests/gallery.py ;;
    workloads) stage workloads 600 "$bare" tests/workloads.py ;;
    faults) stage faults 900 "$bare" -u tests/faults.py ;;
    commands) stage commands 900 "$bare" -u tests/commands.py ;;
    files) stage files 600 "$bare" -u tests/files.py ;;
    endpoint) stage endpoint 600 "$bare" -u tests/endpoint.py ;;
    sessions) stage sessions 300 "$bare" -u tests/sessions.py ;;
    tenants) stage tenants 300 "$bare" -u tests/tenants.py ;;
    mcp) stage mcp 900 "$bare" -u tests/mcp.py ;;
    endpoint-module) stage endpoint-module 600 "$bare" -u tests/endpoint.py --module ;;
    *) echo "no such stage: $1" && return 2 ;;
  esac
}

# Three lanes of about the same length, for two processors: faults and commands wait for more than a minute each for what
# idles out, so one lane of them is asleep most of the time. The stages in which a neighbour looks at the clock (these two
# again) open one each. Both stages of the endpoint are in one lane, since they share an environment. A stage's output is
# held back until it has ended, and is shown in the order of `own_tests`.
lane_1=(faults gallery workloads exec-attacks kernel)
lane_2=(commands files languages sessions node)
lane_3=(endpoint endpoint-module mcp tenants harness program plots zygote)
own_tests=(harness program plots node zygote kernel gallery workloads faults commands files languages exec-attacks sessions tenants mcp endpoint endpoint-module)
outputs=target/own-tests

lane() {
  local name status
  ends_jobs
  for name in "$@"; do
    [[ " ${chosen[*]} " == *" $name "* ]] || continue
    own_test "$name" >"$outputs/$name.log" 2>&1
    echo $? >"$outputs/$name.ended" && mv "$outputs/$name.ended" "$outputs/$name.status"
  done
}

side_by_side() {
  local name
  rm -rf "$outputs" && mkdir -p "$outputs"
  lane "${lane_1[@]}" &
  lane "${lane_2[@]}" &
  lane "${lane_3[@]}" &
  for name in "${chosen[@]}"; do
    until [ -e "$outputs/$name.status" ] || [ -z "$(jobs -rp)" ]; do sleep 0.5; done
    cat "$outputs/$name.log"
    [ "$(cat "$outputs/$name.status")" = 0 ] || failed+=("$name")
  done
  wait
}

if [ $# -gt 0 ]; then
  chosen=("$@")
  side_by_side
else
  chosen=("${own_tests[@]}")
  stage set-up 1800 bash scripts/setup.sh || exit 1
  stage formatting 120 cargo fmt --check
  stage lints 1500 cargo clippy --release --locked --all-targets -- -D warnings
  # Compiling is a stage of its own: its time belongs to the build and not to a hanging test.
  if stage build 1800 cargo test --release --locked --no-run -q && stage binary 900 cargo build --release --locked -q; then
    stage tests 900 cargo test --release --locked --no-fail-fast
    side_by_side
    stage suites 2400 /usr/bin/env python3 tests/suites.py
  fi
fi

if [ ${#failed[@]} -gt 0 ]; then
  printf 'make test: failed: %s\n' "${failed[*]}"
  exit 1
fi
echo "make test: all stages passed"
