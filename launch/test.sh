#!/usr/bin/env bash
# The tests, with everything they need: bash launch/test.sh [pytest arguments]
# Three files at a time, in the order of their names: those that start processes come before the many short ones.
set -euo pipefail
development=yes
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
# Hundreds of interpreters are started: none is to compile what another has, and a file has one core here, not all.
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=20 "$@"
