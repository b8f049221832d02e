#!/usr/bin/env bash
# Prints the first Python on PATH that is new enough to run DSec.
set -euo pipefail
for candidate in python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
  if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    command -v "$candidate"
    exit 0
  fi
done
echo "setup: no Python 3.11 or newer with venv was found on PATH" >&2
exit 1
