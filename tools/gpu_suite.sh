#!/usr/bin/env bash
# The GPU suite on a machine with a CUDA device, torch and pytest; needs no network.
#
#   tools/gpu_suite.sh [--no-compiler] WHEELS [REPORTS] [PYTEST ARGUMENTS ...]
#
# WHEELS: folder with the wheels of the workspace (`uv build --all-packages --wheel`) and of what torch's environment lacks
# (apache-tvm-ffi, rich). They are installed into a folder of their own: entry points need installed distributions.
# REPORTS: folder for the logs; default gpu-suite. Prints a short table last; fails when a step failed.
#
# --no-compiler: proves that wheels with libraries are enough. The wheels of ops in WHEELS are ones that were built with
# CAKE_AOT_ARCHS="sm_80 sm_90a" (sm_80: some tests compare with the portable build). No compiler can be found, every
# library must be there already, and nothing may be compiled; the tests are those of these packages.
set -uo pipefail
no_compiler=
[ "${1:-}" = --no-compiler ] && no_compiler=yes && shift
wheels=${1:?folder with wheels}
reports=${2:-gpu-suite}
shift $(($# < 2 ? $# : 2))
mkdir -p "$reports"
site=$(mktemp -d)
python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl || exit 1
export PYTHONPATH=$site PATH=$site/bin:$PATH PYTHONUNBUFFERED=1
CAKE_CACHE_DIR=$(mktemp -d)
export CAKE_CACHE_DIR
tests=(packages)
if [ -n "$no_compiler" ]; then
  tests=()
  for wheel in "$wheels"/cake_*-py3-none-linux_*.whl; do # a wheel with libraries is one for a kind of machine
    name=$(basename "$wheel" | cut -d- -f1)
    [ -e "$wheel" ] && tests+=("packages/${name//_/-}")
  done
  [ ${#tests[@]} -gt 0 ] || { echo "$wheels: holds no wheel with libraries" >&2 && exit 2; }
  unset CUDA_HOME CUDA_PATH
  # A compiler that is named and not there ends cake-core's search: PATH, wheels and /usr/local/cuda are not looked at.
  export CAKE_NVCC=$site/no-nvcc CAKE_CXX=$site/no-c++
fi

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
no_nvcc() {
  cake doctor --json | python3 -c '
import json, sys
nvcc = next(check for check in json.load(sys.stdin)["machine"] if check["what"] == "nvcc")
print(nvcc["found"])
sys.exit(not nvcc["found"].startswith("none"))'
}
nothing_compiled() {
  local found
  found=$(find "$CAKE_CACHE_DIR" -type f)
  echo "${found:-the cache is empty}"
  [ -z "$found" ]
}

step doctor cake doctor --plain
[ -z "$no_compiler" ] || step no-nvcc no_nvcc
step prebuild cake prebuild --all --plain
step verify cake verify --device cuda --plain
step pytest python3 -m pytest -q -p no:cacheprovider -m gpu --durations=15 "$@" "${tests[@]}"
[ -z "$no_compiler" ] || step compiled nothing_compiled
[ "$status" = 0 ] || tail -n 60 "$reports/pytest.log" "$reports/verify.log" "$reports/prebuild.log"
printf '%s' "$table"
exit "$status"
