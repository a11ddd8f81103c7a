#!/bin/sh
# Prints the first Python of 3.11 or newer that makes virtual environments. `python3` comes first: it is where a torch
# that somebody installed for this machine's devices would be.
for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
    if "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        echo "$python"
        exit 0
    fi
done
echo "no Python 3.11 or newer with venv and ensurepip found: install one (Debian: apt install python3-venv), or name it: make ... PYTHON=/path/to/python" >&2
exit 1
