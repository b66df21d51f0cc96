#!/usr/bin/env bash
# The main job, which goes on when one of its processes dies: bash launch/elastic.sh [Hydra overrides]
# Experimental: CPUs over gloo.
# One process for each GPU, or two on the CPU; NPROC=n picks another number. The others finish the window of a process
# that has died, and another joins them. On several nodes, start it on each with --nnodes=M --node-rank=K and
# --rdzv=HOST:PORT, node 0's host and a port that is free there. On SIGTERM or SIGUSR1 the run saves and leaves, for
# which it has SHUTDOWN_TIMEOUT seconds (120).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$python" -m distaccum.elastic "$@"
