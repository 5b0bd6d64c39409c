#!/usr/bin/env bash
# Puts a working ISPC compiler into PREFIX (default: .ispc at the top of the repository), on Debian 12 and 13, without root
# and without changing the system. An ispc that is already on PATH is used as it is.
#
#   scripts/get_ispc.sh [PREFIX]        prints the path of the compiler on its last line
#
# Debian 13 packages ISPC and Debian 12 does not, so the package and all that it needs, its libc included, are unpacked beside
# each other (debian_packages.sh) and started through that libc's own loader.
set -euo pipefail

suite=trixie
. "$(dirname "${BASH_SOURCE[0]}")/debian_packages.sh"
repo_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
prefix=${1:-$repo_root/.ispc}

say() { printf 'get_ispc: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
works() { case $("$1" --version 2>/dev/null) in *ISPC*) ;; *) return 1 ;; esac; }

refuse() {
  say "$1"
  say "Install ISPC 1.22 or newer some other way: from your distribution (the package is usually called ispc), from Homebrew or"
  say "conda-forge, or from the releases page of the project ispc/ispc on GitHub. Put it on PATH, or set ISPC=/path/to/ispc."
  say "neo_compile also builds without it (NEO_ISPC=OFF), with the slower C++ kernels."
  exit 1
}

if found=$(command -v ispc) && works "$found"; then
  say "using the ispc on PATH: $("$found" --version | head -n 1)"
  echo "$found"
  exit 0
fi
if works "$prefix/bin/ispc"; then
  say "already there: $("$prefix/bin/ispc" --version | head -n 1)"
  echo "$prefix/bin/ispc"
  exit 0
fi

check_is_debian

mkdir -p "$(dirname "$prefix")"
prefix=$(cd "$(dirname "$prefix")" && pwd)/$(basename "$prefix")
# Beside the prefix, so that the last step is a rename: an interrupted run leaves nothing that looks finished.
work=$(mktemp -d "$prefix.partial.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
mkdir -p "$work/tree/bin"
say "fetching ISPC and what it needs from $suite ..."
fetch_packages "$work" "$suite" ispc
for deb in "$work"/apt/archives/*.deb; do dpkg-deb -x "$deb" "$work/tree/root"; done

root=$work/tree/root
[ -x "$root/usr/bin/ispc" ] || die "the downloaded package has no usr/bin/ispc."
loader=$(cd "$root" && find . -name 'ld-linux*.so.*' | head -n 1)
[ -n "$loader" ] || die "the downloaded libc has no dynamic loader."
libraries=$(dirname "$loader")
rm -rf "$root/usr/share/locale" "$root/usr/share/man"
cat >"$work/tree/bin/ispc" <<WRAPPER
#!/bin/sh
# Starts ISPC through the loader and the libraries that came with it (see scripts/get_ispc.sh).
here=\$(cd "\$(dirname "\$(readlink -f "\$0")")/../root" && pwd) || exit 1
exec "\$here/$loader" --inhibit-cache --library-path "\$here/$libraries:\$here/usr/lib" --argv0 "\$0" "\$here/usr/bin/ispc" "\$@"
WRAPPER
chmod +x "$work/tree/bin/ispc"
works "$work/tree/bin/ispc" || { "$work/tree/bin/ispc" --version >&2 || true; die "the unpacked ispc does not start."; }

if [ -e "$prefix" ]; then
  # Another run may have finished first; a broken installation is replaced; anything else is somebody's.
  if works "$prefix/bin/ispc"; then echo "$prefix/bin/ispc"; exit 0; fi
  [ -d "$prefix/root" ] || rmdir "$prefix" 2>/dev/null || die "$prefix exists and is not an ISPC installation."
  rm -rf "$prefix"
fi
mv -T "$work/tree" "$prefix"
say "installed $("$prefix/bin/ispc" --version | head -n 1)"
echo "$prefix/bin/ispc"
