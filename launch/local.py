"""The main job on this machine: checks the command line, then starts torchrun, in one interpreter.

``python launch/local.py [Hydra overrides]`` is what ``launch/train.sh`` runs, once there is an environment.

torchrun turns every failure into its own exit code and report, so mistakes are found before it starts: exit code 2, and
one message. The check runs in a forked process, which gives back the memory of its model, and whose CUDA context does
not stay on a GPU; its imports are those of this process.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from distaccum.train.startup import without_garbage_collection

with without_garbage_collection():
    import torch
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from distaccum.distributed.signals import die_with_parent
    from distaccum.train import cli
    from distaccum.train.failure import RUN_NOTE, lines_of
    from distaccum.train.owner import read_holder
    from distaccum.train.run_dir import RunDir

TRAIN = Path(__file__).with_name("train.py")
SHOWS = re.compile(r"-h|--help|--hydra-help|--version|-c|--cfg(=.*)?|-i|--info(=.*)?")
# Asked to leave, the workers save; torchrun has to pass that on, and to wait for as long as a save may take.
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"


def main() -> None:
    """Checks, then trains; what only prints needs one process and no check."""
    arguments, environment = sys.argv[1:], os.environ
    if any(SHOWS.fullmatch(argument) for argument in arguments):
        cli.main()
        return
    checks = [argument for argument in arguments if argument.partition("=")[0] == "--check"]
    processes = checks[-1].partition("=")[2] if checks else ""
    processes, code = _check(arguments, processes or environment.get("NPROC", ""))
    if code or checks:
        sys.exit(code)
    if "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = str(-(-_cores() // int(processes)))
    sys.argv[0] = run.__file__  # torchrun's own messages name it
    options = ["--standalone", f"--nproc-per-node={processes}", f"--signals-to-handle={SIGNALS}"]
    options.append(f"--shutdown-timeout={environment.get('SHUTDOWN_TIMEOUT', '120')}")
    with tempfile.TemporaryDirectory() as folder:
        environment[RUN_NOTE] = str(Path(folder, "run"))
        try:
            run.main([*options, str(TRAIN), *arguments])
        except ChildFailedError as error:
            sys.exit(_report(error, Path(environment[RUN_NOTE])))


def _report(error: ChildFailedError, note: Path) -> int:
    """Prints a failure in a few lines in place of torchrun's traceback; returns the exit code.

    Where all ranks were killed none has written why: this process then does.
    """
    rank, first = error.get_first_failure()
    if not note.exists():  # it never came to training, and the rank has printed why
        return 1
    path = Path(note.read_text())
    holder = read_holder(path)  # of a run that this process has started
    run_dir = RunDir(path, token=holder.token if holder else "")
    if not run_dir.failure():
        how = f"was killed by {first.signal_name()}" if first.exitcode < 0 else f"ended with exit code {first.exitcode}"
        run_dir.write_failure(f"rank {rank} {how} (process {first.pid})")
    for line in lines_of(run_dir):
        sys.stderr.write(f"distaccum: {line}\n")
    return 1


def _check(arguments: list[str], processes: str) -> tuple[str, int]:
    """The number of processes (by default one for each GPU, or two on the CPU), and the check's exit code."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        die_with_parent()
        processes = processes or str(torch.cuda.device_count() or 2)
        os.write(writer, processes.encode())
        if {"-m", "--multirun"} & set(arguments):  # every job of a sweep is checked when its turn comes
            os._exit(0)
        rest = [argument for argument in arguments if argument.partition("=")[0] != "--check"]
        sys.argv = [str(TRAIN), *rest, f"--check={processes}"]
        cli.main()
        sys.exit(0)
    os.close(writer)
    with os.fdopen(reader) as given:
        processes = given.read()
    _, state = os.waitpid(child, 0)
    return processes, os.waitstatus_to_exitcode(state)


def _cores() -> int:
    """The cores that this process may use: a container or a batch system may give it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


if __name__ == "__main__":
    main()
