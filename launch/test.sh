#!/usr/bin/env bash
# The tests, with everything they need: bash launch/test.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
exec "$python" -m pytest "$@"
