# shellcheck shell=bash
# What runs on each node, and perhaps in an image: lib.sh sends the text of these functions along.

# Waits for a child to the end; signals interrupt bash's own wait.
await() {
    local code=0
    while kill -0 "$1" 2> /dev/null; do
        wait "$1"
        code=$?
    done
    return $code
}

# One node's task. Slurm's signals come here, and with cgroups no further, so they are passed on: to the workers alone,
# which save and leave in order. torchrun would kill them, and its other children need not know what USR1 means.
on_node() {
    local nodes=$1 processes=$2 endpoint=$3 addresses=" $4 " restarts=$5 python=$6 agent="" stopped="" address host=false
    shift 6
    address=${addresses#* "$SLURMD_NODENAME"=}
    [ "$SLURM_NODEID" -ne 0 ] || host=true
    trap 'tell_workers USR1' USR1
    trap 'stopped=yes; tell_workers TERM || kill -TERM $agent 2> /dev/null' TERM
    (
        trap '' USR1 # ignored by all that this becomes and starts, until a worker has a handler of its own
        exec "$python" -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$processes" \
            --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
            --rdzv-conf="is_host=$host,read_timeout=300" --local-addr="${address%% *}" --max-restarts="$restarts" \
            -m distaccum.train "$@"
    ) &
    agent=$!
    [ -z "$stopped" ] || kill -TERM $agent # it came before there was anybody to tell
    await $agent
}

# Signals the children of torchrun; false if there are none.
tell_workers() {
    local file line pid told=1
    for file in /proc/[0-9]*/stat; do
        read -r line < "$file" || continue
        line=${line##*) } # after the name: state, parent, ...
        read -r _ line _ <<< "$line"
        [ "$line" = "$agent" ] || continue
        told=0 pid=${file%/stat}
        [ "$1" = TERM ] || catches_usr1 "$pid" || continue
        kill "-$1" "${pid#/proc/}"
    done 2> /dev/null
    return $told
}

# Whether the process has a handler for USR1 now: while it starts it has none yet, and Python gives it up before it ends.
catches_usr1() {
    local key value
    while read -r key value; do
        [ "$key" != SigCgt: ] || return $((!(16#$value & 0x200)))
    done < "$1/status"
    return 1
}
