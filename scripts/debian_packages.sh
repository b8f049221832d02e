#!/usr/bin/env bash
# Installs what scripts/debian-packages.txt names and is missing. Does nothing when all is there, and only says what
# is missing where it cannot install (no apt, or not root).
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  echo "setup: no apt here: install the counterparts of $here/debian-packages.txt yourself" >&2
  exit 0
fi

missing=()
while read -r package; do
  [[ -z $package || $package == \#* ]] && continue
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done <"$here/debian-packages.txt"

if ((${#missing[@]} == 0)); then exit 0; fi
if ((EUID != 0)); then
  echo "setup: not root, so not installed: ${missing[*]}" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
echo "setup: installing ${missing[*]}"
apt-get update -q
apt-get install -q -y --no-install-recommends "${missing[@]}"
