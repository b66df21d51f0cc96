"""The process's rank, world size and device, as its launcher set them."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from secrets import token_hex
from time import monotonic, sleep

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]  # public, though not marked as exported

from distaccum.errors import ConfigError, PeerError

# A key prefix unique to one (re)start of the ranks, so that a restart never reads old keys: torchrun keeps one store
# over its restarts (seen with torch 2.13), and each agent counts restarts for itself. So the ranks agree on a random
# name: each rank but 0 shows a fresh word, and rank 0 answers to that word with the name.

_log = logging.getLogger(__name__)

_POLL_S = 0.01
_FIRST_WORD_S = 60.0  # of waiting in silence; then after twice as long, each time


def private_store(store: Store, rank: int, size: int, *, timeout_s: float) -> Store:
    """The part of ``store`` that only these ``size`` ranks use; a collective.

    Raises:
        TimeoutError: on rank 0, if a rank has not come within ``timeout_s`` seconds. On the others the store's own
            time-out raises.
    """
    if rank == 0:
        name = token_hex(8)
        _admit(store, range(1, size), name, timeout_s)
    else:
        word = token_hex(8)
        store.set(f"meeting/{rank}", word)
        name = store.get(f"meeting/answer/{word}").decode()
        store.set(f"meeting/{name}/{rank}", "here")
    return PrefixStore(f"ranks/{name}", store)


def _admit(store: Store, ranks: range, name: str, timeout_s: float) -> None:
    """Answers each rank's words until it has come: the first word may be one of an earlier start."""
    began, word_s, absent, answered = monotonic(), _FIRST_WORD_S, list(ranks), dict[int, bytes]()
    while True:
        absent = [rank for rank in absent if not store.check([f"meeting/{name}/{rank}"])]
        if not absent:
            return
        waited = monotonic() - began
        if waited > timeout_s:
            raise TimeoutError(f"ranks {absent} have not come within {timeout_s:.0f} s")
        if waited > word_s:
            _log.warning("ranks %s have not come after %.0f s: do their processes still import?", absent, waited)
            word_s *= 2
        for rank in absent:
            if store.check([f"meeting/{rank}"]) and (word := store.get(f"meeting/{rank}")) != answered.get(rank):
                store.set(f"meeting/answer/{word.decode()}", name)
                answered[rank] = word
        sleep(_POLL_S)


_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OF_PODS = (
    "In a pod of Kubeflow, RANK and WORLD_SIZE count pods: start `torchrun --nnodes=$WORLD_SIZE --node-rank=$RANK "
    "--master-addr=$MASTER_ADDR --master-port=$MASTER_PORT --nproc-per-node=gpu launch/train.py` there"
)
_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
_TASKS = {"SLURM_STEP_NUM_TASKS": "srun"} | dict.fromkeys(_OF_MPI, "mpirun")
GROUP_TIMEOUT = timedelta(minutes=30)
AUTO, NCCL, GLOO = "auto", "nccl", "gloo"
BACKENDS = (AUTO, NCCL, GLOO)
"""What carries a GPU's tensors between ranks; by default NCCL. A CPU's go over gloo in any case."""


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """The launcher's description of this process; known before any process group exists."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1  # ranks on this machine; 1 where the launcher does not say
    machine: str = ""  # the same for all ranks on it
    launched: bool = False  # by torchrun or the like; otherwise this process is a world of one
    planned: bool = False  # the ranks are not started: one process checks a configuration for them

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> LaunchEnvironment:
        """Reads torchrun's variables; without ``RANK`` and ``WORLD_SIZE`` this process is a world of one.

        Raises:
            ConfigError: only some of them are set, or one is not a number; or none is, within several tasks of Slurm or
                MPI, each of which would train alone.
        """
        present = [name for name in _LAUNCHER_VARIABLES if name in environment]
        if "RANK" not in present and "WORLD_SIZE" not in present:
            if not dist.is_initialized():  # else the program has made ranks of its tasks
                _refuse_tasks(environment)
            return cls()
        missing = [name for name in _LAUNCHER_VARIABLES if name not in present]
        if missing:
            remedy = "Start with torchrun, which sets them all, or unset RANK and WORLD_SIZE for one process"
            if missing == ["LOCAL_RANK"]:
                remedy = f"{_OF_PODS}. {remedy}"
            raise ConfigError(missing[0], None, f"not set, while {', '.join(present)} are", remedy)
        numbers = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            if not environment[name].isdecimal():
                raise ConfigError(name, environment[name], "not a number", "Start with torchrun, which sets it")
            numbers[name] = int(environment[name])
        there = environment.get("LOCAL_WORLD_SIZE", "")
        return cls(
            rank=numbers["RANK"],
            size=numbers["WORLD_SIZE"],
            local_rank=numbers["LOCAL_RANK"],
            local_size=int(there) if there.isdecimal() else 1,
            machine=environment.get("GROUP_RANK", socket.gethostname()),
            launched=True,
        )

    @classmethod
    def current(cls) -> LaunchEnvironment:
        """As :meth:`from_environment`; without a launcher, the process group that the program has opened, if any.

        Raises:
            ConfigError: as :meth:`from_environment`.
        """
        launched = cls.from_environment()
        if launched.launched or not dist.is_initialized():
            return launched
        return cls(rank=dist.get_rank(), size=dist.get_world_size())

    def device(self, backend: str = AUTO, *, key: str = "backend") -> torch.device:
        """This rank's GPU if the machine has any, else the CPU.

        Args:
            backend: what carries the GPUs' tensors, one of ``BACKENDS``. Over gloo, ranks share GPUs where there are
                more ranks than GPUs.
            key: the setting that says so, for error messages.

        Raises:
            ConfigError: the machine has more processes than GPUs, which NCCL cannot do; NCCL without a GPU; or there is
                no such backend.
        """
        kind, number = accelerators()
        gpu = self.gpu(number, backend, key=key)
        return torch.device(kind) if gpu is None else torch.device(kind, gpu)

    def gpu(self, gpus: int, backend: str = AUTO, *, key: str = "backend") -> int | None:
        """The number of this rank's GPU of a machine that has ``gpus``; None for the CPU. See :meth:`device`."""
        check_backend(backend, "cuda" if gpus else "cpu", key=key)
        if not gpus:
            return None
        if self.local_rank >= gpus and backend != GLOO:
            remedy = f"Start at most {gpus} processes on this machine, hide the GPUs with CUDA_VISIBLE_DEVICES='', or "
            remedy += "share them with trainer.backend=gloo, which is slower"
            raise ConfigError("LOCAL_RANK", self.local_rank, f"this machine has {gpus} GPUs", remedy)
        return self.local_rank % gpus

    def store(self) -> Store:
        """The launcher's key-value store under a prefix unique to these ranks; one in memory for a world of one."""
        if not self.launched:
            return HashStore()
        from distaccum.program import STORE, load  # noqa: PLC0415  not for an Accumulator in one process

        store: Store = load(STORE)(self.rank, self.size)
        return private_store(store, self.rank, self.size, timeout_s=GROUP_TIMEOUT.total_seconds())


REJECTED = "rejected"
"""What a store holds once a rank cannot go on, so that no other waits for it."""
_LONGEST_POLL_S = 0.5


@contextmanager
def main_first(ranks: LaunchEnvironment, store: Store) -> Iterator[None]:
    """Runs the block on one rank of each machine, and then on its others, which find what the first has cached.

    They wait as long as it takes, and in no collective. Where the launcher does not say who shares a machine, rank 0 is
    the first of all.

    Raises:
        PeerError: on the others, where the block failed on the first, or a rank cannot go on.
    """
    turn = store.add(f"main_first/{ranks.rank}", 1)
    key, poll_s = f"main_first/{ranks.machine}/{turn}", _POLL_S
    if (ranks.local_rank if ranks.launched else ranks.rank) == 0:
        try:
            yield
        except BaseException as error:
            store.set(key, " ".join(f"rank {ranks.rank}: {type(error).__name__}: {error}".split()))  # one line
            raise
        store.set(key, "")
        return
    while not (is_there := store.check([key])) and not store.check([REJECTED]):
        sleep(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)
    if reason := store.get(key if is_there else REJECTED).decode():
        raise PeerError(reason, "while this rank waited for what that one prepares")
    yield


def _refuse_tasks(environment: Mapping[str, str]) -> None:
    for name, launcher in _TASKS.items():
        if environment.get(name, "1") not in ("0", "1"):
            problem = f"{launcher} started several tasks without RANK and WORLD_SIZE, and each would train alone"
            remedy = "Start one task a node with torchrun in it, as `srun --ntasks-per-node=1 torchrun ...` or "
            remedy += f"slurm/train.sbatch (docs/cluster.md), or unset {name} for one process"
            raise ConfigError(name, environment[name], problem, remedy)


def accelerators() -> tuple[str, int]:
    """The type of this machine's accelerators, ``cpu`` without one, and how many this process sees."""
    from distaccum.program import ACCELERATORS, load  # noqa: PLC0415  where a world is made

    found: tuple[str, int] = load(ACCELERATORS)()
    return found


def check_backend(backend: str, device_type: str, *, key: str = "backend") -> None:
    """Refuses a backend that there is not, or that carries no tensors of this kind of device; ``key`` is its setting.

    Raises:
        ConfigError: it is none of ``BACKENDS``, or NCCL on a CPU.
    """
    if backend not in BACKENDS:
        raise ConfigError(key, backend, "no such choice", f"Use one of {', '.join(BACKENDS)}")
    if backend == NCCL and device_type != "cuda":
        problem = "NCCL carries tensors of GPUs alone, and here is none"
        raise ConfigError(key, backend, problem, f"Use {key}=auto, or a machine with a GPU")
