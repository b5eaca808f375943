#!/usr/bin/env bash
# `make serve`: sets up, builds, runs the daemon in the foreground and shows a first execution once it answers.
# Arguments for `caisson serve` come in SERVE_ARGS: make serve SERVE_ARGS='--listen 127.0.0.1:9000'.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

bash scripts/setup.sh
cargo build --release --locked
chmod a+rx target/release/caisson # the service account starts it too, whatever our umask is

if [ "$(id -u)" = 0 ] && ! getent passwd caisson >/dev/null; then
  nologin=$(command -v nologin || echo /bin/false)
  useradd --system --user-group --no-create-home --home-dir /nonexistent --shell "$nologin" caisson ||
    echo "serve: could not create the service account caisson; a fixed free id is used instead" >&2
fi

# The system's node wins; ours is there only where the system has none.
PATH=$PATH:$PWD/target/runtime/node/bin
# shellcheck disable=SC2086 # several arguments in one variable, on purpose
set -- ${SERVE_ARGS:-}

# The demonstration waits beside the daemon and ends with this shell, which becomes the daemon.
python3 scripts/first_execution.py $$ &
exec target/release/caisson serve "$@"
