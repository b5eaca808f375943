# Sourced by the scripts that build or run something, from the repository's folder: what they need of their surroundings.

# cron, systemd and `env -i` leave it out; rustup and cargo ask for it.
if [ -z "${HOME:-}" ]; then
  HOME=$(getent passwd "$(id -u)" | cut -d: -f6)
  export HOME=${HOME:-/}
fi
PATH=$PATH:/usr/sbin:/sbin:${CARGO_HOME:-$HOME/.cargo}/bin # mkfs.ext4 and a rustup that no profile has been read for
# The compiler that cargo belongs to: a distribution's own, which setup.sh can bring for Rust programs, may come first.
cargo=$(command -v cargo || true)
[ ! -x "${cargo%/*}/rustc" ] || PATH=${cargo%/*}:$PATH
export PATH
# Everything here looks for what was built in target/, whatever its user has set for other projects.
export CARGO_TARGET_DIR=$PWD/target
unset CARGO_BUILD_TARGET
