#!/usr/bin/env bash
# The native tests under sanitizers: `address` (AddressSanitizer and UndefinedBehaviorSanitizer) or `thread` (ThreadSanitizer).
#
#   PYTHON=.venv/bin/python scripts/sanitize.sh address|thread [pytest arguments]
#
# Builds csrc/ with NEO_SANITIZE into build/sanitize-*, beside the installed module and without touching it, and runs tests/native
# with it in a Python that preloads the sanitizer's library. Only C++ is instrumented, so the ISPC kernels are left out: the
# C++ twins run everything else (partition, plans, pool, appends, copies, bindings) through the same calls. Any report fails the run.
# Nothing is suppressed. Left out: the tests that start other processes, which would load the installed module, and one
# that compares times, which mean nothing here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kind=${1:?usage: scripts/sanitize.sh address|thread [pytest arguments]}
shift
root=$PWD
build=$root/build/sanitize-$kind
python=$(command -v "${PYTHON:-python3}")
[ "${python#/}" != "$python" ] || python=$root/$python

case $kind in
  address)
    library=libasan.so
    # CPython and torch keep memory until the end of the process: leaks cannot be told apart from that.
    export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1
    ;;
  thread)
    library=libtsan.so
    export TSAN_OPTIONS=halt_on_error=1:abort_on_error=1
    ;;
  *) echo "sanitize.sh: '$kind' is neither address nor thread" >&2; exit 2 ;;
esac
preload=$("${CXX:-c++}" -print-file-name=$library)
case $preload in /*) ;; *) echo "sanitize.sh: ${CXX:-c++} has no $library" >&2; exit 1 ;; esac

mkdir -p build
"$python" -m cmake -S csrc -B "$build" -DNEO_SANITIZE="$kind" -DNEO_ISPC=OFF -DPython_EXECUTABLE="$python" \
  -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" >"$build.log" 2>&1 || { cat "$build.log" >&2; exit 1; }
"$python" -m cmake --build "$build" --parallel >>"$build.log" 2>&1 || { cat "$build.log" >&2; exit 1; }

# A package that is the source tree with another native module in it.
tree=$build/tree
rm -rf "$tree"
mkdir -p "$tree/neo_compile"
for entry in neo_compile/*; do
  case $(basename "$entry") in __pycache__ | runtime | _C.*.so) ;; *) ln -s "$root/$entry" "$tree/neo_compile/" ;; esac
done
ln -s "$root/runtime" "$tree/neo_compile/runtime"
ln -s "$build"/_C.*.so "$tree/neo_compile/"

# Preloaded only here: compilers and cmake are none of our business. The editable install's import hook would find the installed
# module first, so it goes. One torch thread: its pool is not instrumented.
run='
import sys
tree = sys.argv.pop(1)
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path.insert(0, tree)
import neo_compile._C
assert neo_compile._C.__file__.startswith(tree), neo_compile._C.__file__
import pytest
sys.exit(pytest.main(sys.argv[1:]))
'
# libstdc++ comes along: the sanitizer looks for __cxa_throw when it starts, and Python itself is no C++ program.
exec env LD_PRELOAD="$preload $("${CXX:-c++}" -print-file-name=libstdc++.so.6)" OMP_NUM_THREADS=1 \
  "$python" -c "$run" "$tree" tests/native --ignore=tests/native/test_isa.py \
  -m "not slow" -k "not takes_its_factor" -o timeout=1200 "$@"
