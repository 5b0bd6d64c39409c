#!/usr/bin/env bash
# Runs the tests that depend on what torch and transformers do under other versions than those of constraints.txt, each pair in a
# virtual environment of its own, with the package built in it. Prints a line per pair; fails if one fails.
#
#   scripts/test_matrix.sh [TORCH/TRANSFORMERS ...]      default: the oldest and the newest versions that are supported
#
#   VENV_MATRIX=.venv-matrix     where the environments go: 6 GB each where PyPI's torch brings CUDA with it
#   PYTHON=python3, PIP_ARGS, ISPC, PYTEST_ARGS
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pairs=("$@")
[ ${#pairs[@]} -gt 0 ] || pairs=(2.11.0/5.17.0 2.14.1/5.24.0)
folder=${VENV_MATRIX:-.venv-matrix}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
tests=(
  tests/passes tests/test_backend.py tests/test_backend_families.py tests/test_backend_wrappers.py tests/test_capture.py
  tests/test_explain.py tests/test_hf_masks.py tests/test_ops.py tests/test_parameters.py tests/test_plain_decoders.py
  tests/test_saved_capture.py tests/test_staged.py tests/e2e/test_families.py tests/e2e/test_generate.py
  tests/e2e/test_half_precision.py tests/e2e/test_parity.py
)

# An environment with these versions, the test tools of constraints.txt, and the package. Not under `set -e`: it is called in an `if`.
set_up() {
  local venv=$1 torch=$2 transformers=$3 pip
  # shellcheck disable=SC2206  # PIP_ARGS is a list of words
  pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$venv/constraints.txt" ${PIP_ARGS:-})
  { [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"; } &&
    grep -vE '^(torch|transformers|tokenizers|safetensors|numpy)==' constraints.txt > "$venv/constraints.txt" &&
    printf '%s\n' "torch==$torch" "transformers==$transformers" >> "$venv/constraints.txt" &&
    "${pip[@]}" scikit-build-core pybind11 cmake ninja &&
    PATH=$venv/bin:$PATH NEO_ISPC=$([ -n "${ISPC:-}" ] && echo ON || echo OFF) \
      "${pip[@]}" --no-build-isolation --editable ".[test]" -Cbuild-dir="$venv/build"
}

summary=()
failed=0
for pair in "${pairs[@]}"; do
  torch=${pair%/*} transformers=${pair#*/}
  venv=$folder/torch-$torch-transformers-$transformers
  log=$venv.log
  echo "== torch $torch, transformers $transformers: setting up $venv"
  if ! set_up "$venv" "$torch" "$transformers"; then
    summary+=("FAILED  torch $torch, transformers $transformers: could not be installed")
    failed=1
    continue
  fi
  # shellcheck disable=SC2086  # PYTEST_ARGS is a list of words
  if "$venv/bin/python" -m pytest -m "not slow" -p no:cacheprovider "${tests[@]}" ${PYTEST_ARGS:-} 2>&1 | tee "$log"; then
    verdict=passed
  else
    verdict=FAILED
    failed=1
  fi
  summary+=("$verdict  torch $torch, transformers $transformers: $(tail -n 1 "$log" | tr -d '=')")
done
printf '%s\n' "== summary" "${summary[@]}"
exit $failed
