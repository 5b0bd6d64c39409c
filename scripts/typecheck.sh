#!/usr/bin/env bash
# mypy, strict, over the package as it is installed: runtime/ is neo_compile.runtime there. An editable install maps it with
# an import hook that mypy cannot follow, so a tree of links is made that looks like the wheel.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
tree=$root/build/typecheck
rm -rf "$tree"
mkdir -p "$tree/neo_compile"
for entry in neo_compile/*; do
  case $(basename "$entry") in __pycache__ | runtime) ;; *) ln -s "$root/$entry" "$tree/neo_compile/" ;; esac
done
ln -s "$root/runtime" "$tree/neo_compile/runtime"
cd "$tree"
case ${PYTHON:=python3} in */*) [ "${PYTHON#/}" != "$PYTHON" ] || PYTHON=$root/$PYTHON ;; esac
MYPYPATH=$tree exec "$PYTHON" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" -p neo_compile "$@"
