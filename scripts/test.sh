#!/usr/bin/env bash
# `make test`: everything, in the order in which it fails fastest. A stage that fails does not stop the later ones,
# so that one run shows all there is to mend; the exit status is non-zero if any did.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
PATH=$PATH:$HOME/.cargo/bin
export CARGO_TERM_COLOR=${CARGO_TERM_COLOR:-never}

failed=()
# stage NAME LIMIT_SECONDS COMMAND…
stage() {
  local name=$1 limit_s=$2 started=$SECONDS status=0
  shift 2
  printf '== %s\n' "$name"
  timeout -k 30 "$limit_s" "$@" </dev/null || status=$?
  [ "$status" = 124 ] && printf '%s: stopped after %s s\n' "$name" "$limit_s"
  [ "$status" = 0 ] || failed+=("$name")
  printf '== %s: %s (%s s)\n' "$name" "$([ "$status" = 0 ] && echo ok || echo "failed, status $status")" $((SECONDS - started))
  return "$status"
}

stage set-up 1800 bash scripts/setup.sh || exit 1
stage formatting 120 cargo fmt --check
stage lints 1500 cargo clippy --release --locked --all-targets -- -D warnings
# Compiling is a stage of its own: its time belongs to the build and not to a hanging test.
if stage build 1800 cargo test --release --locked --no-run -q && stage binary 900 cargo build --release --locked -q; then
  stage tests 900 cargo test --release --locked --no-fail-fast
  python=target/runtime/python/bin/python3
  [ -x /usr/bin/python3 ] && python=/usr/bin/python3 # the bare system interpreter: the harness may lean on nothing else
  if [ -e tests/harness/test_harness.py ]; then
    stage harness 300 "$python" tests/harness/test_harness.py
  else
    echo "skip: tests/harness/test_harness.py is not there"
  fi
  stage zygote 300 env HARNESS_PYTHON="$PWD/target/runtime/python/bin/python3" "$python" tests/harness/test_zygote.py
  stage kernel 900 env HARNESS_PYTHON="$PWD/target/runtime/python/bin/python3" "$python" tests/harness/test_kernel.py
  stage gallery 600 target/runtime/python/bin/python3 -u tests/gallery.py
  stage workloads 600 "$python" tests/workloads.py
  stage faults 900 "$python" -u tests/faults.py
  stage commands 900 "$python" -u tests/commands.py
  stage files 600 "$python" -u tests/files.py
  stage endpoint 600 "$python" -u tests/endpoint.py
  stage endpoint-module 600 "$python" -u tests/endpoint.py --module
  stage suites 2400 "$python" tests/suites.py
fi

if [ ${#failed[@]} -gt 0 ]; then
  printf 'make test: failed: %s\n' "${failed[*]}"
  exit 1
fi
echo "make test: all stages passed"
