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
# which save and leave in order. torchrun would kill them, and its other children need not know what USR1 means. An agent
# of an elastic job passes them on itself; killed, it is started again, and finds the job by its address.
on_node() {
    local nodes=$1 processes=$2 endpoint=$3 addresses=" $4 " restarts=$5 elastic=$6 python=$7 agent="" stopped="" code starts=3
    shift 7
    if [ "$elastic" != 1 ]; then
        trap 'tell_workers USR1' USR1
        trap 'stopped=yes; tell_workers TERM || kill -TERM $agent 2> /dev/null' TERM
        start_torchrun "$@"
        return
    fi
    trap '[ -z "$agent" ] || kill -USR1 $agent 2> /dev/null' USR1
    trap 'stopped=yes; [ -z "$agent" ] || kill -TERM $agent 2> /dev/null' TERM
    while start_elastic "$@"; code=$?; [ $code -eq 137 ] && [ -z "$stopped" ] && [ $((starts -= 1)) -gt 0 ]; do
        echo "distaccum: the agent of this node was killed, and is started again" >&2
    done
    return $code
}

# Both ignore USR1, and so does all that they start, until a worker has a handler of its own.
start_torchrun() {
    local address=${addresses#* "$SLURMD_NODENAME"=} host=false
    [ "$SLURM_NODEID" -ne 0 ] || host=true
    (
        trap '' USR1
        exec "$python" -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$processes" \
            --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
            --rdzv-conf="is_host=$host,read_timeout=300" --local-addr="${address%% *}" --max-restarts="$restarts" \
            "$@"
    ) &
    await_agent $!
}

start_elastic() {
    (
        trap '' USR1
        exec "$python" -m distaccum.elastic --nnodes="$nodes" --nproc="$processes" --node-rank="$SLURM_NODEID" \
            --rdzv="$endpoint" "$@"
    ) &
    await_agent $!
}

await_agent() {
    agent=$1
    [ -z "$stopped" ] || kill -TERM "$agent" # it came before there was anybody to tell
    await "$agent"
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
