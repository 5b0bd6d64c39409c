# Debian packages without root and without changing the system; sourced by get_ispc.sh and get_aarch64.sh, which define
# `refuse` (this cannot be done here, and what to do instead) and `die`.
#
# The packages and all that they need, their libc included, are downloaded from the mirror that this machine's own apt
# sources name and checked by the installed Debian keyring. apt works in directories of its own; its lists, cache and
# hooks are not touched.

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

# Leaves with `refuse` where the function below cannot work. Sets VERSION_CODENAME.
check_is_debian() {
  [ -r /etc/os-release ] || refuse "this is not Debian (no /etc/os-release)."
  . /etc/os-release
  [ "${ID:-}" = debian ] || refuse "this is not Debian but ${PRETTY_NAME:-${ID:-an unknown system}}."
  for tool in apt-get apt-config dpkg-deb; do command -v "$tool" >/dev/null || refuse "$tool is missing."; done
  keyring=/usr/share/keyrings/debian-archive-keyring.gpg
  [ -r "$keyring" ] || refuse "$keyring is missing (package debian-archive-keyring)."
  mirror=$(find_mirror "${VERSION_CODENAME:-none}" | head -n 1 || true)
  [ -n "$mirror" ] || refuse "the apt sources of this machine name no mirror for ${VERSION_CODENAME:-this release}."
}

# fetch_packages WORK SUITE PACKAGE...: WORK/apt/archives/*.deb are the packages and their whole closure.
fetch_packages() {
  local work=$1 suite=$2
  shift 2
  mkdir -p "$work"/apt/{lists/partial,archives/partial,etc/none}
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
  apt-get -q=2 update >"$work/log" 2>&1 || { cat "$work/log" >&2; die "apt-get update failed for suite $suite."; }
  apt-get -q=2 --yes --download-only install "$@" >"$work/log" 2>&1 ||
    { cat "$work/log" >&2; die "could not download $* from suite $suite."; }
}
