#!/usr/bin/env bash
# The GPU suite on a machine with a CUDA device, torch and pytest; needs no network.
#
#   tools/gpu_suite.sh WHEELS [REPORTS] [PYTEST ARGUMENTS ...]
#
# WHEELS: folder with the wheels of the workspace (`uv build --all-packages --wheel`) and of what torch's environment lacks
# (apache-tvm-ffi, rich). They are installed into a folder of their own: entry points need installed distributions.
# REPORTS: folder for the logs; default gpu-suite. Prints a short table last; fails when a step failed.
set -uo pipefail
wheels=${1:?folder with wheels}
reports=${2:-gpu-suite}
shift $(($# < 2 ? $# : 2))
mkdir -p "$reports"
site=$(mktemp -d)
python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl || exit 1
export PYTHONPATH=$site PATH=$site/bin:$PATH PYTHONUNBUFFERED=1
CAKE_CACHE_DIR=$(mktemp -d)
export CAKE_CACHE_DIR

table=""
status=0
step() {
  local name=$1 start=$SECONDS code
  shift
  "$@" >"$reports/$name.log" 2>&1
  code=$?
  [ "$code" = 0 ] || status=1
  table+=$(printf '%-12s rc %-3s %4ss  %s' "$name" "$code" "$((SECONDS - start))" "$(tail -n 1 "$reports/$name.log" | cut -c1-150)")$'\n'
}

step doctor cake doctor --plain
step prebuild cake prebuild --all --plain
step verify cake verify --device cuda --plain
step pytest python3 -m pytest -q -p no:cacheprovider -m gpu --durations=15 "$@" packages
[ "$status" = 0 ] || tail -n 60 "$reports/pytest.log" "$reports/verify.log" "$reports/prebuild.log"
printf '%s' "$table"
exit "$status"
