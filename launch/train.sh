#!/usr/bin/env bash
# The main job, with everything it needs: bash launch/train.sh [Hydra overrides]
# One process for each GPU, or two on the CPU; NPROC=n picks another number. On SIGTERM or SIGUSR1 the run saves and
# leaves, for which it has SHUTDOWN_TIMEOUT seconds (120).
# A loop of one's own in the same environment: bash launch/train.sh own_loop.py [its arguments]; one process on the CPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
case ${1:-} in *.py) exec "$python" -m distaccum launch "$@" ;; esac
exec "$python" "$root/launch/local.py" "$@"
