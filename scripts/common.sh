# SPDX-License-Identifier: Apache-2.0
# Shared by the scripts beside it; sourced, never run.
set -euo pipefail

readonly root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly self="scripts/$(basename "$0")"
cd "$root"

# Progress goes to standard error, so that a script's output stays its own.
say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
[[ -t 2 ]] || say() { printf '%s\n' "$*" >&2; }

# die MESSAGE [WHAT TO DO]
die() {
  printf '%s: %s\n' "$self" "$1" >&2
  [[ $# -lt 2 ]] || printf '  %s\n' "$2" >&2
  exit 1
}

# wrong MESSAGE: of an argument.
wrong() {
  printf '%s: %s\n  see %s --help\n' "$self" "$1" "$self" >&2
  exit 2
}

# The comment at the top of the script is its help.
show_help() { sed -n '3,/^[^#]/{ s/^# \{0,1\}//p; }' "$self"; }

job_count() { echo "${JOBS:-$(nproc)}"; }

# The compiler cache lies in the tree unless the caller has one.
use_ccache() {
  export CCACHE_DIR="${CCACHE_DIR:-$root/.ccache}"
  export CCACHE_BASEDIR="${CCACHE_BASEDIR:-$root}"
  export CCACHE_NOHASHDIR=1
}

# configure PRESET [CMAKE ARGUMENTS]: its output is shown only where it fails.
configure() {
  local preset="$1" log
  log="build/configure-$preset.log"
  mkdir -p build
  say "configure $preset"
  if ! cmake --preset "$@" >"$log" 2>&1; then
    cat "$log" >&2
    die "cmake could not configure preset '$preset'; its output is above and in $log" \
        "if a library is missing, run scripts/bootstrap"
  fi
}

# build PRESET [TARGET…]
build() {
  local preset="$1"
  shift
  say "build $preset, $(job_count) at a time"
  cmake --build --preset "$preset" --parallel "$(job_count)" ${1:+--target "$@"} >&2 ||
    die "the build of preset '$preset' failed; the first error is above"
}

# Seconds as people read them.
duration() { printf '%d min %02d s' $(($1 / 60)) $(($1 % 60)); }
