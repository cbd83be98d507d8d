#!/usr/bin/env bash
# The norms beside their peers on a machine with a CUDA device and torch; needs no network.
#
#   tools/bench_gpu.sh WHEELS [OUT] [ARGUMENTS OF bench_norms.py ...]
#
# WHEELS: the workspace's wheels (`uv build --all-packages --wheel`), what torch's environment lacks (apache-tvm-ffi, rich) and
# the peers' wheels; a wheel may come in pieces NAME.whl.part*. Several fla-core wheels: the newest runs with all peers,
# each other one in a process of its own. OUT: folder for logs and documents; default bench-norms.
# GIT_SHA: commit of the sources, for the documents. Prints the short tables last; fails when a run failed.
set -uo pipefail
wheels=${1:?folder with wheels}
out=${2:-bench-norms}
shift $(($# < 2 ? $# : 2))
mkdir -p "$out"
work=$(mktemp -d)
mkdir "$work/wheels" "$work/site"
for part in "$wheels"/*.whl.part*; do
  [ -e "$part" ] && cat "$part" >>"$work/wheels/$(basename "${part%.part*}")" # the shell sorts the pieces
done
cp "$wheels"/*.whl "$work/wheels" || exit 1

install() {
  local target=$1
  shift
  python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$target" "$@"
}
mapfile -t fla < <(find "$work/wheels" -name 'fla_core-*.whl' | sort -rV)
mapfile -t others < <(find "$work/wheels" -name '*.whl' ! -name 'fla_core-*')
install "$work/site" "${others[@]}" || exit 1
for wheel in "${fla[@]}"; do install "$work/$(basename "$wheel" .whl)" "$wheel" || exit 1; done
# --target runs no .pth file: this folder is what nvidia-cutlass-dsl's would add.
site=$work/site:$work/site/nvidia_cutlass_dsl/dsl_packages
export PATH=$work/site/bin:$PATH PYTHONUNBUFFERED=1
CAKE_CACHE_DIR=$(mktemp -d)
export CAKE_CACHE_DIR

echo "== imports"
try() {
  local path=$1 module=$2 statement=$3
  PYTHONPATH=$path python3 -c "$statement; import $module; print('$module', getattr($module, '__version__', 'imports'))" 2>&1 | tee -a "$out/imports.log"
}
try "$site" torch "pass"
try "$site" triton "pass"
try "$site" cake_norms "pass"
try "$site" liger_kernel "from liger_kernel.ops.rms_norm import LigerRMSNormFunction, rms_norm_backward, rms_norm_forward"
try "$site" cutlass "pass"
try "$site" quack "from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd"
for wheel in "${fla[@]}"; do
  try "$site:$work/$(basename "$wheel" .whl)" fla "import fla.modules.fused_norm_gate as m; m.layer_norm_gated_fwd, m.rms_norm_gated"
done

status=0
run() {
  local path=$1 name=$2 start=$SECONDS
  shift 2
  echo "== $name"
  PYTHONPATH=$path python3 packages/cake-norms/benchmarks/bench_norms.py --json "$out/$name.json" "$@" >"$out/$name.log" 2>&1 || status=1
  echo "$((SECONDS - start)) s, $(grep -c ' ms ' "$out/$name.log") rows timed"
}
PYTHONPATH=$site cake prebuild --all --plain >"$out/prebuild.log" 2>&1 || status=1
tail -n 1 "$out/prebuild.log"
stem=$(date -u +%F)-${GIT_SHA:-unknown}
sha=(${GIT_SHA:+--git-sha "$GIT_SHA"})
with() { [ -n "${1:-}" ] && echo ":$work/$(basename "$1" .whl)"; }
run "$site$(with "${fla[0]:-}")" "$stem" "${sha[@]}" "$@"
for wheel in "${fla[@]:1}"; do
  version=$(basename "$wheel" | cut -d- -f2)
  run "$site$(with "$wheel")" "$stem.fla-$version" "${sha[@]}" --op gated_rmsnorm --rows peered --peers fla
done
for log in "$out/$stem".fla-*.log "$out/$stem.log"; do
  [ -e "$log" ] || continue
  echo "== $(basename "$log")"
  if grep -q 'copy ceiling' "$log"; then sed -n '/copy ceiling/,$p' "$log"; else tail -n 40 "$log"; fi
done
exit "$status"
