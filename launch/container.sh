#!/usr/bin/env bash
# The image's entry point: the main job under torchrun. Arguments are Hydra overrides.
#   NPROC                     processes here: one for each GPU, or two on the CPU
#   NNODES, NODE_RANK         how many containers make the job (1), and which of them this is (from 0)
#   MASTER_ADDR, MASTER_PORT  where they meet: the container with NODE_RANK=0, and a port that is free there (29500)
#   JOB_ID                    the job's name, the same in all of them (distaccum)
#   JOIN_SECONDS              how long they wait for each other at the start (900)
#   STOP_SECONDS              how long the processes have to save and leave once they are asked to stop (120)
# It exits with 0 when the run is done, 2 for bad configuration, 75 where the run was preempted: saved, to be continued.
# With a program's name first (bash, python, pytest, torchrun, distaccum) that runs instead.
set -euo pipefail

refuse() {
    echo "distaccum: configuration error: $1" >&2
    exit 2
}

case ${1:-} in
    bash | python | pytest | torchrun | distaccum) exec "$@" ;;
esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
train="$root/launch/train.py"
check=yes
for argument in "$@"; do # what only prints needs one process and no check
    case $argument in
        -h | --help | --hydra-help | --version | -c | --cfg | --cfg=* | -i | --info | --info=* | --check | --check=*)
            exec python "$train" "$@" ;;
        -m | --multirun) check=no ;; # every job of a sweep is checked when its turn comes
    esac
done

NPROC=${NPROC:-$(python -c 'import torch; print(torch.cuda.device_count() or 2)')}
NNODES=${NNODES:-1}
MASTER_PORT=${MASTER_PORT:-29500}
JOIN_SECONDS=${JOIN_SECONDS:-900}
STOP_SECONDS=${STOP_SECONDS:-120}
for name in NPROC NNODES MASTER_PORT JOIN_SECONDS STOP_SECONDS; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || refuse "$name=${!name}: not a whole number. Give one from 1, or leave it unset"
done

# As --standalone does, but by the job's name, by which a container that comes back owns its run directory.
meeting=(--rdzv-id="${JOB_ID:-distaccum}" --rdzv-backend=c10d --rdzv-endpoint=localhost:0)
if [ "$NNODES" -gt 1 ]; then
    [[ ${NODE_RANK:-} =~ ^[0-9]+$ && $NODE_RANK -lt $NNODES ]] ||
        refuse "NODE_RANK=${NODE_RANK:-}: not one of $NNODES containers. Give each its own, 0 to $((NNODES - 1))"
    [ -n "${MASTER_ADDR:-}" ] ||
        refuse "MASTER_ADDR=: $NNODES containers have nowhere to meet. Name the host of the one with NODE_RANK=0"
    # Which of them keeps the list is said, not left to torchrun's guess from host names.
    is_host=$([ "$NODE_RANK" = 0 ] && echo true || echo false)
    meeting=(--nnodes="$NNODES" --rdzv-id="${JOB_ID:-distaccum}"
        --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"
        --rdzv-conf="is_host=$is_host,join_timeout=$JOIN_SECONDS,read_timeout=$JOIN_SECONDS")
fi
# torchrun turns every failure into its own exit code and report, so mistakes are found before it starts.
[ $check = no ] || python "$train" "$@" --check="$((NNODES * NPROC))" > /dev/null
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + NPROC - 1) / NPROC))}
unset MASTER_ADDR MASTER_PORT # torchrun gives the workers their own
# The workers are told whatever asks to stop, and have the time to save.
# Their own outcome comes back in a file of this container: a volume may hold the runs of other jobs.
preempted=$(mktemp)
trap 'rm -f "$preempted"' EXIT
DISTACCUM_PREEMPTED=$preempted torchrun "${meeting[@]}" --nproc-per-node="$NPROC" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout="$STOP_SECONDS" "$train" "$@" &
job=$!
for signal in TERM INT HUP QUIT USR1; do
    # shellcheck disable=SC2064 # expanded now, on purpose
    trap "kill -$signal $job" "$signal"
done
code=0
while kill -0 $job 2> /dev/null; do # a signal interrupts bash's own wait
    wait $job && code=0 || code=$?
done
# torchrun says 0 where it was not itself that was told to stop, and 1 where it was: who starts containers has to know.
[ ! -s "$preempted" ] || exit 75
exit "$code"
