"""The main job on this machine: checks the command line, then starts torchrun, in one interpreter.

``python launch/local.py [Hydra overrides]`` is what ``launch/train.sh`` runs, once there is an environment.

torchrun turns every failure into its own exit code and report, so mistakes are found before it starts: exit code 2, and
one message. The check runs in a forked process, which gives back the memory of its model, and whose CUDA context does
not stay on a GPU; its imports are those of this process.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from distaccum.train.__main__ import refuse_mistyped, without_garbage_collection


def drop_launcher(environment: MutableMapping[str, str]) -> None:
    """Drops what an earlier torchrun has left in the shell: the check would wait for ranks that are long gone.

    Some of its variables alone stay, by which the check refuses them: a pod of Kubeflow has four.
    """
    given = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name in environment]
    if len(given) == 5:  # noqa: PLR2004  all of them
        sys.stderr.write(f"distaccum: {', '.join(given)} of the environment are left out: this starts its own ranks\n")
        for name in list(environment):
            if name in given or name.startswith("TORCHELASTIC_"):
                del environment[name]


signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C within the imports: no traceback
if __name__ == "__main__":
    drop_launcher(os.environ)
    refuse_mistyped()
with without_garbage_collection():
    import torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from distaccum.distributed.signals import LAUNCHER, die_with_parent
    from distaccum.errors import ConfigError
    from distaccum.tools.launch import Relay, cores, how_it_ended, stated_processes
    from distaccum.train import cli
    from distaccum.train.failure import RUN_NOTE, lines_of
    from distaccum.train.live_line import erasing_streams
    from distaccum.train.micro_batch import noted_for_launcher
    from distaccum.train.owner import read_holder
    from distaccum.train.rank_exits import UNSEEN
    from distaccum.train.run_dir import RunDir

TRAIN = Path(__file__).with_name("train.py")
SHOWS = re.compile(r"-h|--help|--hydra-help|--version|-c|--cfg(=.*)?|-i|--info(=.*)?")
SWEEPS = re.compile(r"-m|--multirun|hydra\.mode=(?i:multirun)")
STARTS, MOST_STARTS = "DISTACCUM_MEMORY_STARTS", 8
_SAID_WHY = (1, 2)  # exit codes of ranks that print their own errors


def main() -> None:
    """Checks, then trains; what only prints needs one process and no check."""
    arguments, environment = sys.argv[1:], os.environ
    if any(SHOWS.fullmatch(argument) for argument in arguments):
        cli.main()
        return
    try:
        relay, stated = Relay(), stated_processes("").removeprefix("auto")
    except ConfigError as error:
        sys.stderr.write(f"distaccum: configuration error: {error}\n")
        sys.exit(2)
    checks = [argument for argument in arguments if argument.partition("=")[0] == "--check"]
    processes = checks[-1].partition("=")[2] if checks else ""
    processes, code = _check(arguments, processes or stated)
    if code or checks:
        sys.exit(code)
    if "OMP_NUM_THREADS" not in environment:
        environment["OMP_NUM_THREADS"] = str(-(-cores() // int(processes)))
    with tempfile.TemporaryDirectory() as folder:
        environment[RUN_NOTE], environment[LAUNCHER] = str(Path(folder, "run")), str(os.getpid())
        note = Path(environment[RUN_NOTE])
        try:
            relay.torchrun(int(processes), [str(TRAIN), *arguments])
        except ChildFailedError as error:
            if relay.told_by:  # told to leave before it could, or it failed at it: the workers have said so
                sys.exit(128 + relay.told_by)
            again = _with_less_memory(arguments, note)
            if not again:
                sys.exit(_report(error, note))
        else:
            return
    os.execv(sys.executable, [sys.executable, __file__, *again])  # noqa: S606  this program, with its own arguments


def _with_less_memory(arguments: list[str], note: Path) -> list[str]:
    """The arguments that go on with a run which ran out of memory, and whose micro-batches can be cut; else none."""
    cut, starts = noted_for_launcher(note), int(os.environ.get(STARTS, "0"))
    sweeps = any(SWEEPS.fullmatch(argument) for argument in arguments)
    if not cut.exists() or not note.exists() or starts >= MOST_STARTS or sweeps:
        return []
    path = Path(note.read_text())
    run_dir = RunDir(path)
    step = run_dir.saved_step()
    os.environ[STARTS] = str(starts + 1)
    with erasing_streams():
        sys.stderr.write(
            f"distaccum: {_first_line(run_dir.failure())}\n"
            f"distaccum: going on {'from the beginning' if step is None else f'from step {step}'}: micro-batches from "
            f"{cut.read_text()} on are run in parts, and the gradient stays the same\n"
        )
    return [*arguments, "resume=auto", f"hydra.run.dir={path}"]  # the last one of a setting holds


def _first_line(text: str) -> str:
    return (text.splitlines() or ["out of memory"])[0]


def _report(error: ChildFailedError, note: Path) -> int:
    """Prints a failure in a few lines in place of torchrun's traceback; returns the exit code.

    Where all ranks were killed none has written why, or one has seen another's end too late to know how it came about:
    this process then writes it.
    """
    rank, first = error.get_first_failure()
    how = how_it_ended(first, " without an error of Python's")
    ended = f"rank {rank} {how} (process {first.pid})"
    if not note.exists():  # it never came to training
        if first.exitcode not in _SAID_WHY:
            sys.stderr.write(f"distaccum: the run did not begin: {ended}. Start it again\n")
        return 1
    path = Path(note.read_text())
    holder = read_holder(path)  # of a run that this process has started
    run_dir = RunDir(path, token=holder.token if holder else "")
    reason = run_dir.failure()
    if not reason:
        run_dir.write_failure(ended)
    elif UNSEEN in reason and f"process {first.pid} " in reason:
        run_dir.correct_failure(reason.replace(UNSEEN, how, 1))
    with erasing_streams():  # rank 0 may have left its live line
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
        if rest == arguments:  # what a check that nobody asked for finds right needs no line
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.argv = [str(TRAIN), *rest, f"--check={processes}"]
        cli.main()
        sys.exit(0)
    os.close(writer)
    with os.fdopen(reader) as given:
        processes = given.read()
    _, state = os.waitpid(child, 0)
    return processes, os.waitstatus_to_exitcode(state)


if __name__ == "__main__":
    main()
