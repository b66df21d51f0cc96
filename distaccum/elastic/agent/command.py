"""The command ``python -m distaccum.elastic``: its arguments, the store, and the agent's exit code."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from secrets import token_hex

from distaccum import program
from distaccum.elastic.agent.settings import TOKEN, Settings
from distaccum.errors import ConfigError

_HELP = """\
usage: python -m distaccum.elastic [--nproc N] [--nnodes M --node-rank K --rdzv HOST:PORT] [Hydra overrides]

Trains as launch/train.sh does, but goes on when a process dies: the others finish the window, and another process joins
them. Start one on each node. Experimental: CPUs over gloo.

  --nproc N          processes of each node (NPROC): one for each GPU, or two on the CPU
  --nnodes M         how many nodes make the job (1)
  --node-rank K      which of them this is, from 0
  --rdzv HOST:PORT   where they meet: the host with --node-rank=0, and a port that is free there
  --version          print the versions of distaccum, torch and Python

settings that the agent reads, among the overrides:
  elastic.rejoin=true|false   whether another process is started for one that has died (true)
  elastic.min_ranks=N         with fewer than so many the run waits for others (1)
  elastic.expel_after=TIME    a process that does not answer for so long is left behind (30s)

variables: OMP_NUM_THREADS, threads of a process (this node's cores over the processes); SHUTDOWN_TIMEOUT, seconds to
save and leave on SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2 (120); DISTACCUM_TOKEN, a secret that is the same on all
nodes, by which words of strangers in the job's store are left out

exit codes: 0 done, or saved and left; 1 failed; 2 bad configuration; 128 + N told to leave by signal N and not saved
"""
_SHOWS = re.compile(r"--hydra-help|-c|--cfg(=.*)?|-i|--info(=.*)?|--check(=.*)?|-sc|--shell-completion")
_TRAIN = (sys.executable, "-m", "distaccum.elastic.run")


def main(command: Sequence[str] = _TRAIN) -> None:
    """Runs the agent with the arguments of this process, and ends with its exit code.

    Args:
        command: what a worker runs, before the overrides; tests have another.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C within the imports: no traceback
    program.start()
    arguments = sys.argv[1:]
    if (topic := program.help_asked(arguments)) is not None and not topic:
        program.say(_HELP)
        sys.exit(0)
    if topic or any(_SHOWS.fullmatch(argument) for argument in arguments):  # one process and no agent
        os.execv(command[0], [*command, *arguments])  # noqa: S606  the main job
    try:
        settings = Settings.of(arguments)
        code = _run(settings, command)
    except ConfigError as error:
        _complain(f"configuration error: {error}")
        code = 2
    sys.exit(code)


def _run(settings: Settings, command: Sequence[str]) -> int:
    if sys.platform != "linux":
        remedy = "Use launch/train.sh, and resume=auto after a failure"
        raise ConfigError("distaccum.elastic", None, f"runs on Linux alone, and this is {sys.platform}", remedy)
    from distaccum.elastic.agent.store_start import StoreError, is_served, start_store  # noqa: PLC0415  on Linux alone

    host, port = settings.host or "127.0.0.1", settings.port
    is_first = settings.node == 0 and not (port and is_served(host, port))
    alone = settings.nnodes == 1 and not settings.host
    environment = ({TOKEN: token_hex(16)} if alone else {}) | dict(os.environ)
    # The store imports torch while this process does.
    started = start_store(port, alone=alone, environment=environment) if is_first else None
    from distaccum.elastic.agent.agent import Agent  # noqa: PLC0415  as torch
    from distaccum.elastic.agent.meeting import join, serve  # noqa: PLC0415  as torch

    settings = replace(settings, nproc=settings.nproc or program.load(program.ACCELERATORS)()[1] or 2)
    environment.setdefault("OMP_NUM_THREADS", str(-(-len(os.sched_getaffinity(0)) // settings.nproc)))
    try:
        store, port = serve(host, port, started, alone=alone) if settings.node == 0 else (join(host, port), port)
    except StoreError as error:
        _complain(str(error))
        return 1
    try:
        agent = Agent(settings, store, (host, port), command, environment)
    except ConfigError:
        if started is not None:  # nobody is to meet there
            started.kill()
        raise
    code = agent.run()
    if agent.folder is not None:
        from distaccum.elastic.agent.last_word import told  # noqa: PLC0415  few jobs end so

        for line in told(agent.why, *agent.folder):
            _complain(line)
    elif agent.why:
        _complain(agent.why)
    return code


def _complain(text: str) -> None:
    sys.stderr.write(f"distaccum: {text}\n")
