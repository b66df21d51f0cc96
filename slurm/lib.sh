# shellcheck shell=bash
# Sourced by train.sbatch and sweep.sbatch, which set $home (the checkout), $job (its number, as Slurm's commands take it),
# $run_dir, and $chain (not empty: the next element of the array continues, so nothing is requeued).
#
# Variables, given before sbatch (DISTACCUM_ENV=... sbatch ...) or with --export:
#   DISTACCUM_ENV  venv:FOLDER (default: .venv of the checkout), module:NAME[,NAME...], apptainer:IMAGE.sif, pyxis:IMAGE.
#                  An image needs bash, python3 and distaccum. Folders that it is to see: APPTAINER_BIND, or CONTAINER_MOUNTS
#                  for pyxis (the working directory and the run directory are mounted anyway).
#   RUN_DIR        the run directory (default: runs/slurm-<job>); hydra.run.dir=... among the overrides is the same.
#   PROGRAM        a Python file to run in place of the Trainer; what follows the script are its arguments. It finds the run
#                  directory in RUN_DIR, for acc.resume(os.environ["RUN_DIR"]) and acc.save(os.environ["RUN_DIR"]).
#   NPROC          processes on each node (default: the GPUs that the job has there, else 2).
#   MAX_RESTARTS   so often torchrun itself starts failed processes again (default 0).
#   ELASTIC        1: the job goes on with what is left when a process or a node dies, and takes them back (launch/elastic.sh).
#                  Submit it with sbatch --no-kill, or Slurm itself ends a job of which it has lost a node.
#   MAX_REQUEUES   so often the job is requeued before it fails (default 100).
#   STOP_WITHIN    seconds that a run has to save when it is told to stop; less than --signal says (default 80).
#   RDZV_PORT      the port on the first node (default: a free one).
# Interfaces: every variable of the job reaches the processes. On a cluster with several networks name the one between the
# nodes, e.g. NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 (gloo carries the small host reductions), and for InfiniBand
# what NCCL does not find by itself, e.g. NCCL_IB_HCA=mlx5_0,mlx5_1 NCCL_IB_GID_INDEX=3; NCCL_DEBUG=INFO shows what it took.

home=${home:?} job=${job:?}
# shellcheck source=slurm/node.sh
source "$home/slurm/node.sh"

say() { echo "distaccum: $*"; }

refuse() {
    say "$*" >&2
    exit 2
}

# Trains, and ends the job: 0 done (or, in a chain, saved), 2 bad configuration, 1 failed. Arguments: Hydra overrides, or
# those of PROGRAM.
train() {
    local state entry=(-m distaccum.train) overrides=("$@")
    asked="" asking="" ended="" # told to save and stop, and by which process we pass it on; Slurm is ending the job
    trap ask USR1
    trap 'ended=yes' TERM
    if [ -n "${PROGRAM:-}" ]; then
        [ "${ELASTIC:-0}" != 1 ] || refuse "ELASTIC=1: runs of the Trainer alone are elastic; leave it out with PROGRAM"
        absolute_run_dir
        export RUN_DIR=$run_dir
        entry=("$PROGRAM")
    else
        read_overrides "$@"
        [ "${ELASTIC:-0}" != 1 ] || entry=() # its agents know
    fi
    mkdir -p "$run_dir/slurm" || refuse "RUN_DIR=$run_dir: cannot be written; choose another folder"
    state=$(state_of "$run_dir")
    if [ -n "$chain" ] && [ "$state" = "done" ] && [ "$SLURM_ARRAY_TASK_ID" -gt "$SLURM_ARRAY_TASK_MIN" ]; then
        say "$run_dir is done"
        exit 0
    fi
    choose_processes
    choose_environment
    [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || check
    [ -z "$asked" ] || go_on
    run_step
    finish
}

# Sets $overrides: those given, the run directory, and resume=auto. A run that has begun continues, whatever it began from.
read_overrides() {
    local argument resume=resume=auto
    overrides=()
    for argument in "$@"; do
        case $argument in
            hydra.run.dir=*) run_dir=${argument#hydra.run.dir=} ;;
            resume=*) resume=$argument ;;
            *) overrides+=("$argument") ;;
        esac
    done
    absolute_run_dir
    if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || [ -n "$chain" ]; then
        if compgen -G "$run_dir/checkpoints/step-*" > /dev/null || grep -qs '"saved": [0-9]' "$run_dir/history.json"; then
            resume=resume=auto
        elif [ -e "$run_dir/metrics.jsonl" ]; then # it begins again: what it has logged is kept beside
            mv "$run_dir/metrics.jsonl" "$run_dir/metrics.before-restart-$(date +%s).jsonl"
        fi
    fi
    overrides+=("hydra.run.dir=$run_dir" "$resume")
}

absolute_run_dir() {
    case $run_dir in
        *\$\{*) refuse "hydra.run.dir=$run_dir: must be the same after a requeue, and so cannot be interpolated" ;;
        /*) ;;
        *) run_dir=$PWD/$run_dir ;;
    esac
}

# One field of a run directory's status.json; empty without one.
state_of() { field_of "$1" state; }
field_of() { sed -n "s/^ *\"$2\": *\"\{0,1\}\(.*[^\",]\)\"\{0,1\},\{0,1\}\$/\1/p" "$1/status.json" 2> /dev/null; }

# Sets $nodes, $processes (on each), $addresses ("n1=10.0.0.1 n2=10.0.0.2"), $endpoint, and threads.
choose_processes() {
    nodes=$SLURM_JOB_NUM_NODES
    processes=${NPROC:-${SLURM_GPUS_ON_NODE:-2}}
    if [[ ! $processes =~ ^[1-9][0-9]*$ ]]; then
        refuse "NPROC=$processes: not a number of processes; give one, such as the GPUs of a node"
    fi
    addresses=$(node_addresses)
    local first=${addresses%% *}
    endpoint=${first#*=}:${RDZV_PORT:-$(free_port)}
    local threads=$((${SLURM_CPUS_ON_NODE:-1} / processes))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
}

# Node names need not resolve, and a node's own idea of its name may be "localhost": Slurm knows where it reaches each.
node_addresses() {
    local name
    for name in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        echo "$name=$(scontrol show node "$name" --oneliner | sed 's/.* NodeAddr=\([^ ]*\).*/\1/')"
    done | paste -s -d ' '
}

# This script runs on the first node. By chance: between this and torchrun's start lie seconds, in which other jobs look too.
free_port() {
    local port
    while port=$((10000 + RANDOM % 20000)) && (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; do
        :
    done
    echo "$port"
}

# Sets $python, $container (what starts a program in the image) and $srun_options from DISTACCUM_ENV.
choose_environment() {
    local environment=${DISTACCUM_ENV:-venv:$home/.venv} value names
    value=${environment#*:}
    python=python3 container=() srun_options=()
    case $environment in
        venv:?*)
            python=$value/bin/python
            [ -x "$python" ] || refuse "DISTACCUM_ENV=$environment: no bin/python in it; name a virtual environment, on every node"
            ;;
        module:?*)
            have_modules || refuse "DISTACCUM_ENV=$environment: this node has no module command"
            IFS=, read -r -a names <<< "$value"
            module load "${names[@]}" || refuse "DISTACCUM_ENV=$environment: module load ${names[*]} failed"
            ;;
        apptainer:?*)
            [ -e "$value" ] || refuse "DISTACCUM_ENV=$environment: no such image"
            container=(apptainer exec --bind "$run_dir")
            [ -z "${SLURM_GPUS_ON_NODE:-}" ] || container+=(--nv)
            container+=(--pwd "$PWD" "$value")
            ;;
        pyxis:?*)
            local mounts=$PWD:$PWD,$run_dir:$run_dir${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
            srun_options=("--container-image=$value" "--container-mounts=$mounts" "--container-workdir=$PWD")
            ;;
        *) refuse "DISTACCUM_ENV=$environment: not one of venv:FOLDER, module:NAME, apptainer:IMAGE.sif, pyxis:IMAGE" ;;
    esac
}

# The module command is a function of login shells, and not written for set -u.
have_modules() {
    local file
    set +u
    for file in /etc/profile.d/{lmod,z00_lmod,modules}.sh; do
        # shellcheck disable=SC1090
        type module > /dev/null 2>&1 || ! [ -r "$file" ] || source "$file"
    done
    type module > /dev/null 2>&1
}

# Mistakes are found by one process before any other starts: torchrun turns each into its own exit code and report.
check() {
    if [ -n "${PROGRAM:-}" ]; then
        [ ${#container[@]} -gt 0 ] || [ ${#srun_options[@]} -gt 0 ] || [ -r "$PROGRAM" ] || # an image may have it
            refuse "PROGRAM=$PROGRAM: no such file in $PWD; name a Python file"
        return
    fi
    local code command=("${container[@]}" "$python" -m distaccum.train "${overrides[@]}" "--check=$((nodes * processes))")
    if [ ${#srun_options[@]} -gt 0 ]; then
        command=(srun --nodes=1 --ntasks=1 "${srun_options[@]}" "${command[@]}")
    fi
    "${command[@]}"
    code=$?
    [ $code -eq 0 ] || exit $code
}

# Starts the processes on all nodes and waits for them. Sets $step_code.
run_step() {
    local on_failure=(--kill-on-bad-exit=1)
    [ "${ELASTIC:-0}" != 1 ] || on_failure=(--kill-on-bad-exit=0 --no-kill)
    written=$(stat -c %i.%Y "$run_dir/status.json" 2> /dev/null)
    say "$nodes x $processes processes, rendezvous at $endpoint, logs in $run_dir/slurm"
    srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none "${on_failure[@]}" \
        --open-mode=append --output="$run_dir/slurm/%j-%n-%N.log" "${srun_options[@]}" "${container[@]}" \
        bash -c "$(declare -f on_node start_torchrun start_elastic await_agent tell_workers catches_usr1 await); on_node \"\$@\"" on_node \
        "$nodes" "$processes" "$endpoint" "$addresses" "${MAX_RESTARTS:-0}" "${ELASTIC:-0}" "$python" \
        "${entry[@]}" "${overrides[@]}" &
    await $!
    step_code=$?
    [ -z "$asking" ] || kill "$asking" 2> /dev/null
}

# Tells all processes to save and stop, again and again: one that is still starting ignores it. Through the controller:
# srun itself would die of a signal that comes before it is ready.
ask() {
    [ -z "$asked" ] || return
    asked=yes
    say "told to stop: saving"
    keep_asking &
    asking=$!
}

keep_asking() {
    local left
    for ((left = ${STOP_WITHIN:-80}; left > 0; left -= 2)); do
        scancel --quiet --signal=USR1 "$job"
        sleep 2
    done
    say "not saved within ${STOP_WITHIN:-80} s: stopped without"
    pkill -TERM -P $$ srun # which ends all tasks, within Slurm's KillWait
}

# Ends the job as the run ended.
finish() {
    local state=""
    if [ "$(stat -c %i.%Y "$run_dir/status.json" 2> /dev/null)" != "$written" ]; then # else this start never got so far
        state=$(state_of "$run_dir")
    fi
    if [ -n "${PROGRAM:-}" ]; then # without a Trainer it has no status: it is done if nobody told it to stop
        [ "$step_code:$asked:$state" != "0::" ] || state="done"
        say "$PROGRAM ended with $step_code, and has saved step $(saved_step)"
    else
        say "the run is ${state:-not started} at step $(field_of "$run_dir" step) (srun: $step_code)"
    fi
    [ "$state" != "done" ] || exit 0
    [ -z "$ended" ] || exit 143
    case $state:$asked in
        preempted:* | running:yes | failed:yes | :yes) go_on ;; # some ranks may have found the others gone
        config_error:*) show_reason 2 ;;
    esac
    all_nodes_answer || await_slurm
    show_reason 1
}

show_reason() {
    local reason
    reason=$(field_of "$run_dir" reason)
    say "${reason:-srun ended with $step_code}; the end of the first node's log:" >&2
    tail -n 20 "$run_dir/slurm/$SLURM_JOB_ID"-0-*.log >&2
    exit "$1"
}

# In a chain the next element continues. Otherwise this job does, unless it gets nowhere.
go_on() {
    [ -z "$chain" ] || exit 0
    local step last
    step=$(saved_step) # reached is not saved
    echo "$step" >> "$run_dir/slurm/requeues"
    last=$(tail -n 3 "$run_dir/slurm/requeues" | paste -s -d ' ')
    if [ "$last" = "$step $step $step" ]; then
        say "saved step $step for the third time: stopped before it gets further; give it more time (--time," \
            "--signal and STOP_WITHIN) or save more often (${PROGRAM:+acc.save in RUN_DIR, or }checkpoint.every)" >&2
        exit 1
    fi
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "${MAX_REQUEUES:-100}" ]; then
        say "requeued ${SLURM_RESTART_COUNT} times already (MAX_REQUEUES); submit it again with RUN_DIR=$run_dir" >&2
        exit 1
    fi
    requeue
}

saved_step() {
    local step
    step=$(sed -n 's/^step-//p' "$run_dir/checkpoints/latest" 2> /dev/null)
    echo "${step:-0}"
}

requeue() {
    trap '' TERM USR1 # Slurm ends this script when it requeues the job
    if ! is_running; then
        exit 143
    fi
    local step
    step=$(field_of "$run_dir" step)
    say "requeued at step ${step:-$(saved_step)}"
    scontrol requeue "$job" || {
        say "Slurm does not requeue it; to go on, submit it again with RUN_DIR=$run_dir" >&2
        exit 1
    }
    sleep 60
}

# Not so once the job has been cancelled.
is_running() { [ "$(squeue --noheader --jobs="$job" --format=%T)" = RUNNING ]; }

# Whether each node still starts a task. A dead one looks, to the others, like a failure of the run.
all_nodes_answer() {
    [ "$nodes" -eq 1 ] ||
        timeout 60 srun --overlap --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 true 2> /dev/null
}

# Slurm declares a silent node down, and then requeues the job by itself.
await_slurm() {
    local limit
    limit=$(scontrol show config | sed -n 's/^SlurmdTimeout *= \([0-9]*\) .*/\1/p')
    say "a node does not answer: waiting for Slurm to give the job other nodes"
    sleep $((${limit:-300} + 60)) &
    while [ -z "$ended" ] && kill -0 $! 2> /dev/null; do
        wait $!
    done
    [ -z "$ended" ] || exit 143
}
