#!/usr/bin/env bash
# The ops of a package beside their peers on a machine with a CUDA device and torch; needs no network.
#
#   tools/bench_gpu.sh [--package cake-norms|cake-conv1d|cake-gdn|cake-gqa] WHEELS [OUT] [ARGUMENTS OF bench_*.py ...]
#
# WHEELS: the workspace's wheels (`uv build --all-packages --wheel`), what torch's environment lacks (apache-tvm-ffi, rich) and
# the peers' wheels with what they need (fla-core: einops, and tilelang for the backward of cake-gdn; tilelang: z3-solver 4.15,
# torch-c-dlpack-ext, apache-tvm-ffi < 0.1.13; flash-attn-4: nvidia-cutlass-dsl, quack-kernels, einops, torch-c-dlpack-ext).
# A wheel may come compressed (NAME.whl.xz) or in pieces (NAME.whl.part*).
# Several fla-core wheels: the newest runs with all peers, each other one in a process of its own. Of several apache-tvm-ffi
# wheels the oldest is for the processes of cake-gdn, whose peers need tilelang, the newest for all others. causal-conv1d
# may come as its source archive (causal_conv1d-*.tar.gz): it is compiled for this device, which takes minutes and nvcc,
# the wheel is left in OUT.
# OUT: folder for logs and documents; default bench-norms, bench-conv1d, bench-gdn, bench-gqa. The package is cake-norms if
# none is named. With --warm (all but cake-norms) nothing is timed: all peers compile side by side into their caches, for a
# later call on the same machine.
# GIT_SHA: commit of the sources, for the documents. Prints the short tables last; fails when a run failed.
set -uo pipefail
package=cake-norms
[ "${1:-}" = --package ] && package=${2:?package} && shift 2
# other: arguments of the processes for other versions of fla
case $package in
  cake-norms) other=(--op gated_rmsnorm --rows peered --peers fla) ;;
  cake-conv1d) other=(--rows peered --peers fla torch) ;;
  cake-gdn) ;; # below: the same shapes
  cake-gqa) other=() ;;
  *) echo "--package $package: needs cake-norms, cake-conv1d, cake-gdn or cake-gqa" >&2 && exit 2 ;;
esac
short=${package#cake-}
wheels=${1:?folder with wheels}
out=${2:-bench-$short}
shift $(($# < 2 ? $# : 2))
[ "$package" = cake-gdn ] && other=("$@" --peers fla)
[ "$package" = cake-conv1d ] && case " $* " in *" --warm "*) other+=(--warm) ;; esac
mkdir -p "$out"
work=$(mktemp -d)
mkdir "$work/wheels" "$work/site"
for part in "$wheels"/*.whl.part*; do
  [ -e "$part" ] && cat "$part" >>"$work/wheels/$(basename "${part%.part*}")" # the shell sorts the pieces
done
for packed in "$wheels"/*.whl.xz; do
  [ -e "$packed" ] && python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' \
    "$packed" "$work/wheels/$(basename "$packed" .xz)"
done
cp "$wheels"/*.whl "$work/wheels" || exit 1

# causal-conv1d names nine architectures in its setup.py, and the file of the backward takes minutes for each.
compile_causal_conv1d() {
  local archive=$1 arch
  arch=$(python3 -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())') || return 1
  mkdir "$work/source" && tar -xzf "$archive" -C "$work/source" --strip-components 1 || return 1
  sed -i "/# HACK: The compiler flag/i\\    cc_flag = ['-gencode', 'arch=compute_$arch,code=sm_$arch']" "$work/source/setup.py"
  CAUSAL_CONV1D_FORCE_BUILD=TRUE python3 -m pip wheel --quiet --disable-pip-version-check --no-index --no-deps \
    --no-build-isolation --wheel-dir "$out" "$work/source" && cp "$out"/causal_conv1d-*.whl "$work/wheels"
}
for archive in "$wheels"/causal_conv1d-*.tar.gz; do
  [ -e "$archive" ] || continue
  echo "== compile $(basename "$archive")"
  compile_causal_conv1d "$archive" >"$out/causal-conv1d.log" 2>&1 || tail -n 20 "$out/causal-conv1d.log"
done

install() {
  local target=$1
  shift
  python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target "$target" "$@"
}
mapfile -t fla < <(find "$work/wheels" -name 'fla_core-*.whl' | sort -rV)
mapfile -t ffi < <(find "$work/wheels" -name 'apache_tvm_ffi-*.whl' | sort -rV)
mapfile -t others < <(find "$work/wheels" -name '*.whl' ! -name 'fla_core-*' ! -name 'apache_tvm_ffi-*')
if [ "$package" = cake-gdn ]; then ffi=("${ffi[@]: -1}"); else ffi=("${ffi[@]:0:1}"); fi
install "$work/site" "${others[@]}" "${ffi[@]}" || exit 1
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
try "$site" "${package//-/_}" "pass"
case $package in
  cake-norms)
    try "$site" liger_kernel "from liger_kernel.ops.rms_norm import LigerRMSNormFunction, rms_norm_backward, rms_norm_forward"
    try "$site" cutlass "pass"
    try "$site" quack "from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd"
    of_fla="import fla.modules.fused_norm_gate as m; m.layer_norm_gated_fwd, m.rms_norm_gated"
    ;;
  cake-conv1d)
    try "$site" causal_conv1d "from causal_conv1d import causal_conv1d_fn"
    of_fla="from importlib.util import find_spec; name = 'fla.modules.causal_conv1d'; __import__(name if find_spec(name) else 'fla.modules.conv')"
    ;;
  cake-gdn)
    try "$site" tvm_ffi "pass"
    try "$site" tilelang "pass"
    try "$site" flash_qla "pass"
    of_fla="from fla.ops.gated_delta_rule import chunk_gated_delta_rule"
    ;;
  cake-gqa)
    try "$site" cutlass "pass"
    try "$site" flash_attn.cute "from flash_attn.cute import flash_attn_varlen_func"
    fla=() # no peer of it
    ;;
esac
for wheel in "${fla[@]}"; do try "$site:$work/$(basename "$wheel" .whl)" fla "$of_fla"; done

status=0
run() {
  local path=$1 name=$2 start=$SECONDS code=0
  shift 2
  PYTHONPATH=$path python3 "packages/$package/benchmarks/bench_$short.py" --json "$out/$name.json" "$@" >"$out/$name.log" 2>&1 || code=1
  echo "== $name: $((SECONDS - start)) s, $(grep -c ' ms ' "$out/$name.log") rows timed"
  return "$code"
}
PYTHONPATH=$site cake prebuild --all --plain >"$out/prebuild.log" 2>&1 || status=1
tail -n 1 "$out/prebuild.log"
stem=$(date -u +%F)-${GIT_SHA:-unknown}
sha=(${GIT_SHA:+--git-sha "$GIT_SHA"})
with() { [ -n "${1:-}" ] && echo ":$work/$(basename "$1" .whl)"; }
beside=()
each() { # one process after the other; with --warm all of them at once
  case " ${other[*]} " in
    *" --warm "*) run "$@" & beside+=("$!") ;;
    *) run "$@" || status=1 ;;
  esac
}
each "$site$(with "${fla[0]:-}")" "$stem" "${sha[@]}" "$@"
for wheel in "${fla[@]:1}"; do
  version=$(basename "$wheel" | cut -d- -f2)
  each "$site$(with "$wheel")" "$stem.fla-$version" "${sha[@]}" "${other[@]}"
done
for process in "${beside[@]}"; do wait "$process" || status=1; done
for log in "$out/$stem".fla-*.log "$out/$stem.log"; do
  [ -e "$log" ] || continue
  echo "== $(basename "$log")"
  if grep -q 'copy ceiling' "$log"; then sed -n '/copy ceiling/,$p' "$log"; else tail -n 40 "$log"; fi
done
exit "$status"
