#!/usr/bin/env bash
# The main job, with everything it needs: bash launch/train.sh [Hydra overrides]
# One process for each GPU, or two on the CPU; NPROC=n picks another number. On SIGTERM or SIGUSR1 the run saves and
# leaves, for which it has SHUTDOWN_TIMEOUT seconds (120).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

check=yes
for argument in "$@"; do # what only prints needs one process and no check
    case $argument in
        -h | --help | --hydra-help | --version | -c | --cfg | --cfg=* | -i | --info | --info=*)
            exec "$python" "$root/launch/train.py" "$@" ;;
        --check) check=only ;;
        --check=*) check=only NPROC=${argument#--check=} ;;
        -m | --multirun) check=no ;; # every job of a sweep is checked when its turn comes
    esac
done
if [ -z "${NPROC:-}" ]; then
    NPROC=$("$python" -c 'import torch; print(torch.cuda.device_count() or 2)')
fi
# torchrun turns every failure into its own exit code and report, so mistakes are found before it starts.
[ $check = no ] || "$python" "$root/launch/train.py" "$@" --check="$NPROC"
[ $check != only ] || exit 0
cores=$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + NPROC - 1) / NPROC))}
# Asked to leave, the workers save; torchrun has to pass that on, and to wait for as long as a save may take.
exec "$python" -m torch.distributed.run --standalone --nproc-per-node="$NPROC" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 --shutdown-timeout="${SHUTDOWN_TIMEOUT:-120}" \
    "$root/launch/train.py" "$@"
