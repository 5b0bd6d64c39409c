#!/usr/bin/env bash
# Puts a C++ cross compiler for 64-bit Arm and an emulator into PREFIX (default: .aarch64 at the top of the repository), on
# Debian, without root and without changing the system: about 120 MB to download, 600 MB on disk. scripts/check_neon.sh uses them.
#
#   scripts/get_aarch64.sh [PREFIX]     afterwards there are PREFIX/bin/aarch64-g++ and PREFIX/bin/qemu-aarch64
#
# The packages are those of this machine's own release, so they run with the system's libc; only the libraries that a plain
# system lacks are found through the wrappers.
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/debian_packages.sh"
prefix=${1:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.aarch64}

say() { printf 'get_aarch64: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
works() { "$prefix/bin/aarch64-g++" --version && "$prefix/bin/qemu-aarch64" --version; } >/dev/null 2>&1

refuse() {
  say "$1"
  say "Install a C++ compiler for aarch64-linux-gnu and qemu's user-mode emulator some other way, and put them on PATH as"
  say "aarch64-linux-gnu-g++ and qemu-aarch64."
  exit 1
}

if works; then say "already there: $prefix"; exit 0; fi
check_is_debian

mkdir -p "$(dirname "$prefix")"
prefix=$(cd "$(dirname "$prefix")" && pwd)/$(basename "$prefix")
work=$(mktemp -d "$prefix.partial.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
say "fetching the cross compiler and the emulator from $VERSION_CODENAME ..."
fetch_packages "$work" "$VERSION_CODENAME" g++-aarch64-linux-gnu qemu-user-static
mkdir -p "$work/tree/bin"
for deb in "$work"/apt/archives/*.deb; do
  case $(basename "$deb") in libc6_*) ;; *) dpkg-deb -x "$deb" "$work/tree/root" ;; esac  # the system's own is used
done
cat >"$work/tree/bin/aarch64-g++" <<'WRAPPER'
#!/bin/sh
root=$(cd "$(dirname "$(readlink -f "$0")")/../root" && pwd) || exit 1
LD_LIBRARY_PATH=$root/usr/lib/$(uname -m)-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} \
  exec "$root/usr/bin/aarch64-linux-gnu-g++" --sysroot="$root" "$@"
WRAPPER
cat >"$work/tree/bin/qemu-aarch64" <<'WRAPPER'
#!/bin/sh
bin=$(cd "$(dirname "$(readlink -f "$0")")/../root/usr/bin" && pwd) || exit 1
for name in qemu-aarch64-static qemu-aarch64; do [ -x "$bin/$name" ] && exec "$bin/$name" "$@"; done
echo "no qemu-aarch64 in $bin" >&2
exit 1
WRAPPER
chmod +x "$work/tree/bin/"*
rm -rf "$prefix"
mv -T "$work/tree" "$prefix"
works || die "what was unpacked into $prefix does not start."
say "installed $("$prefix/bin/aarch64-g++" --version | head -n 1), $("$prefix/bin/qemu-aarch64" --version | head -n 1)"
