"""Two hosts on one machine: network namespaces that a rate-limited link joins. Needs root, ``ip`` and ``tc``.

A host has its own interfaces and loopback; files, processors and memory are shared. The link is a veth pair, and the
token bucket filter of ``tc`` limits the rate at each of its two ends, so both directions have the full rate at once.

The MTU is by default 9000 bytes, as in data centres ("jumbo frames"): headers of Ethernet, IP and TCP are then 0.7% of
what is sent, and 4.5% with an MTU of 1500. Segmentation offload is off (``gso_max_segs 1``): every packet has the
headers that it would have on a real wire, and the interface's counters hold them all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from shutil import which
from tempfile import TemporaryDirectory

MTU = 9000
BURST = 64 * 1024  # bytes that may leave at once; a few packets
QUEUE = "20ms"  # what may wait to leave, before packets are dropped
PORT = 29400
GRACE_S = 10.0
TOOLS = ("ip", "tc")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
Finished = subprocess.CompletedProcess[str]


class LinkError(Exception):
    """Two hosts cannot be made on this machine, or one of them failed; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One end of the link."""

    namespace: str
    device: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs ``arguments`` on this host."""
        return [_path("ip"), "netns", "exec", self.namespace, *arguments]

    def sent(self) -> int:
        """Bytes that have left over the link."""
        file = f"/sys/class/net/{self.device}/statistics/tx_bytes"
        return int(_run(self.command("cat", file)))

    def received(self) -> int:
        """Bytes that have come over the link."""
        file = f"/sys/class/net/{self.device}/statistics/rx_bytes"
        return int(_run(self.command("cat", file)))

    def processes(self) -> list[int]:
        """The ids of all processes on this host."""
        return [int(pid) for pid in _run(["ip", "netns", "pids", self.namespace]).split()]


Hosts = tuple[Host, Host]


def obstacle() -> str | None:
    """Tries to make two hosts; returns why this machine cannot have them, None where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    try:
        with two_hosts(mbit=100):
            return None
    except LinkError as error:
        return str(error)


@contextmanager
def two_hosts(*, mbit: float, mtu: int = MTU) -> Iterator[Hosts]:
    """Two hosts with a link of ``mbit`` Mbit/s each way between them, for the length of the ``with`` block.

    Raises:
        LinkError: the system refuses.
    """
    name = f"da{token_hex(3)}"
    hosts = (
        Host(namespace=f"{name}-a", device=f"{name}a", address="10.77.0.1"),
        Host(namespace=f"{name}-b", device=f"{name}b", address="10.77.0.2"),
    )
    a, b = hosts
    with ExitStack() as cleanup:
        for host in hosts:
            _run(["ip", "netns", "add", host.namespace])
            cleanup.callback(_remove, host)
        ends = [word for host in (b, a) for word in ("name", host.device, "netns", host.namespace)]
        _run(["ip", "link", "add", *ends[4:], "type", "veth", "peer", *ends[:4]])
        for host in hosts:
            _set_up(host, mbit, mtu)
        yield hosts


def _set_up(host: Host, mbit: float, mtu: int) -> None:
    ip = ["ip", "-n", host.namespace]
    _run([*ip, "link", "set", "lo", "up"])
    _run([*ip, "address", "add", f"{host.address}/24", "dev", host.device])
    _run([*ip, "link", "set", host.device, "mtu", str(mtu), "gso_max_segs", "1", "up"])
    bucket = ["tbf", "rate", f"{mbit}mbit", "burst", str(max(BURST, 2 * mtu)), "latency", QUEUE]
    _run(["tc", "-n", host.namespace, "qdisc", "add", "dev", host.device, "root", *bucket])


def _remove(host: Host) -> None:
    """Ends what still runs on the host, and deletes it with its end of the link."""
    with suppress(LinkError):
        for pid in host.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    with suppress(LinkError):
        _run(["ip", "netns", "delete", host.namespace])


def _path(tool: str) -> str:
    return which(tool) or tool


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run([_path(command[0]), *command[1:]], capture_output=True, text=True, check=False)  # noqa: S603  our own words
    except OSError as error:
        raise LinkError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise LinkError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def torchrun(
    hosts: Hosts, program: Sequence[str], *, timeout: float, environment: Mapping[str, str] | None = None
) -> list[Finished]:
    """Runs ``program`` with torchrun, one process on each host, to the end; the caller looks at the exit codes.

    The environment names the interface for gloo and NCCL, as on a real cluster. When one host has failed, the other
    has ``GRACE_S`` seconds to notice.

    Args:
        hosts: the first one has the rendezvous.
        program: a script, or ``-m`` and a module; then its arguments.
        timeout: seconds.
        environment: variables to add.

    Raises:
        LinkError: not done after ``timeout`` seconds; all its processes have been ended.
    """
    with TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}" for i in range(len(hosts))]
        started = [_start(hosts, rank, program, file, environment or {}) for rank, file in enumerate(files)]
        try:
            late = _wait(started, timeout)
        finally:
            for process, host in zip(started, hosts, strict=True):
                _end(process, host)
        said = [(file.with_suffix(".out").read_text(), file.with_suffix(".err").read_text()) for file in files]
    if late:
        raise LinkError(f"not done after {timeout:g} s: {' '.join(text for pair in said for text in pair)[-2000:]}")
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *texts)
        for process, texts in zip(started, said, strict=True)
    ]


def _start(
    hosts: Hosts, rank: int, program: Sequence[str], file: Path, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    host, first = hosts[rank], hosts[0]
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        f"--node-rank={rank}",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={first.address}:{PORT}",
        f"--rdzv-conf=is_host={int(rank == 0)}",  # hosts of one name cannot tell whose address it is
        f"--local-addr={host.address}",
    ]
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    interface = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), host.device)
    with file.with_suffix(".out").open("w") as out, file.with_suffix(".err").open("w") as err:
        return subprocess.Popen(  # noqa: S603  as the user asks
            host.command(*start, *program),
            stdout=out,
            stderr=err,
            text=True,
            env=kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | interface | dict(environment),
        )


def _wait(started: Sequence[subprocess.Popen[str]], timeout: float) -> bool:
    """Waits for all to end, or for ``GRACE_S`` after one has failed; returns whether it took too long."""
    deadline = time.monotonic() + timeout
    failed = False
    while any(process.poll() is None for process in started):
        if not failed and any(process.poll() for process in started):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            return not failed
        time.sleep(0.05)
    return False


def _end(process: subprocess.Popen[str], host: Host) -> None:
    if process.poll() is None:
        for pid in host.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()
