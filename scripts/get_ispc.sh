#!/usr/bin/env bash
# Puts a working ISPC compiler into PREFIX (default: .ispc at the top of the repository), on Debian 12 and 13, without root
# and without changing the system. An ispc that is already on PATH is used as it is.
#
#   scripts/get_ispc.sh [PREFIX]        prints the path of the compiler on its last line
#
# Debian 13 packages ISPC and Debian 12 does not, so the package and all that it needs, its libc included, are downloaded from
# the mirror that this machine's own apt sources name, checked by the installed Debian keyring, unpacked beside each other, and
# started through that libc's own loader. apt works in directories of its own; its lists, cache and hooks are not touched.
set -euo pipefail

suite=trixie
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

# The mirror of this machine's own release, from deb822 (.sources) and one-line (.list) files; security suites are no use here.
find_mirror() {
  local codename=$1 file
  for file in /etc/apt/sources.list.d/*.sources; do
    [ -r "$file" ] || continue
    awk -v want="$codename" '
      function flush(   i, n, s) {
        n = split(suites, s, " ")
        if (types ~ /(^| )deb( |$)/ && !off) for (i = 1; i <= n; i++) if (s[i] == want || s[i] == "stable") print first_uri
        types = suites = first_uri = ""; off = 0
      }
      /^[ \t]*$/ { flush(); next }
      /^#/ { next }
      { key = tolower($1) }
      key == "types:" { $1 = ""; types = $0 }
      key == "suites:" { $1 = ""; suites = $0 }
      key == "uris:" { first_uri = $2 }
      key == "enabled:" { off = (tolower($2) == "no") }
      END { flush() }' "$file"
  done
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
    [ -r "$file" ] || continue
    sed -n 's/^[[:space:]]*deb[[:space:]]\{1,\}\(\[[^]]*\][[:space:]]*\)\{0,1\}//p' "$file" |
      awk -v want="$codename" '$2 == want || $2 == "stable" { print $1 }'
  done
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

[ -r /etc/os-release ] || refuse "this is not Debian (no /etc/os-release)."
. /etc/os-release
[ "${ID:-}" = debian ] || refuse "this is not Debian but ${PRETTY_NAME:-${ID:-an unknown system}}."
for tool in apt-get apt-config dpkg-deb; do command -v "$tool" >/dev/null || refuse "$tool is missing."; done
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$keyring" ] || refuse "$keyring is missing (package debian-archive-keyring)."
mirror=$(find_mirror "${VERSION_CODENAME:-none}" | head -n 1 || true)
[ -n "$mirror" ] || refuse "the apt sources of this machine name no mirror for ${VERSION_CODENAME:-this release}."

mkdir -p "$(dirname "$prefix")"
prefix=$(cd "$(dirname "$prefix")" && pwd)/$(basename "$prefix")
# Beside the prefix, so that the last step is a rename: an interrupted run leaves nothing that looks finished.
work=$(mktemp -d "$prefix.partial.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
mkdir -p "$work"/apt/{lists/partial,archives/partial,etc} "$work/tree/bin"
: >"$work/apt/status"  # an empty dpkg status: apt resolves the closure down to libc
echo "deb [signed-by=$keyring] $mirror $suite main" >"$work/apt/etc/sources.list"
{
  apt-config dump | grep '^Acquire::' || true  # proxies, retries, certificates; but none of the hooks
  cat <<CONF
Dir::Etc::Main "/dev/null";
Dir::Etc::Parts "$work/apt/etc/none";
Dir::Etc::SourceList "$work/apt/etc/sources.list";
Dir::Etc::SourceParts "$work/apt/etc/none";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "$work/apt/etc/none";
Dir::State "$work/apt";
Dir::State::status "$work/apt/status";
Dir::State::lists "$work/apt/lists";
Dir::Cache "$work/apt";
Dir::Cache::archives "$work/apt/archives";
Dir::Log "$work/apt";
APT::Sandbox::User "$(id -un)";
APT::Install-Recommends "false";
Acquire::Languages "none";
Acquire::Retries "3";
Debug::NoLocking "true";
CONF
} >"$work/apt.conf"
export APT_CONFIG=$work/apt.conf

say "fetching ISPC and what it needs from $suite ..."
apt-get -q=2 update >"$work/log" 2>&1 || { cat "$work/log" >&2; die "apt-get update failed for suite $suite."; }
apt-get -q=2 --yes --download-only install ispc >"$work/log" 2>&1 ||
  { cat "$work/log" >&2; die "could not download the package ispc from suite $suite."; }
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
