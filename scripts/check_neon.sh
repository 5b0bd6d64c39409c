#!/usr/bin/env bash
# Builds the NEON kernels and the native attention around them for 64-bit Arm and runs tests/native/kernel_check.cpp in an
# emulator. Exit status 77, and one line that says what is missing, where that cannot be done.
#
#   scripts/check_neon.sh [SEED]
#
# The compiler is aarch64-linux-gnu-g++ and the emulator qemu-aarch64, from PATH or from scripts/get_aarch64.sh; ISPC is found as
# the build finds it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

first() { for name in "$@"; do command -v "$name" && return; done; echo ""; }
skip() { echo "check_neon: $*" >&2; exit 77; }
cxx=$(first aarch64-linux-gnu-g++ "$PWD/.aarch64/bin/aarch64-g++")
qemu=$(first qemu-aarch64 qemu-aarch64-static "$PWD/.aarch64/bin/qemu-aarch64")
ispc=$(first ${ISPC:-} "$PWD/.ispc/bin/ispc" ispc)
[ -n "$cxx" ] || skip "no aarch64-linux-gnu-g++ (scripts/get_aarch64.sh gets one)"
[ -n "$qemu" ] || skip "no qemu-aarch64 (scripts/get_aarch64.sh gets one)"
[ -n "$ispc" ] || skip "no ISPC compiler (scripts/get_ispc.sh gets one)"

build=build/neon
mkdir -p "$build"
"$ispc" -O3 --pic --werror --arch=aarch64 --target=neon-i32x4 csrc/paged_attention.ispc -o "$build/paged_attention_neon.o"
sources=(csrc/{paged_attention_scalar,kernel_table,partition,attention_plan,attention_work,append_work,thread_pool}.cpp)
"$cxx" -std=c++17 -O2 -ffp-contract=fast -pthread -static -DNEO_ISPC_NEON -Icsrc "${sources[@]}" tests/native/kernel_check.cpp \
  "$build/paged_attention_neon.o" -o "$build/kernel_check"
"$qemu" "$build/kernel_check" "$@"
