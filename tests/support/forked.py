"""Starts scripts in processes that are forked where everything they import is imported already.

A fresh interpreter spends four to five seconds on imports, and torchrun as much again, so most of a test of two ranks
would be imports. :class:`Forks` is the side of the tests. The other side is this file run as a program: a server that
reads one request a line, forks one process a rank, and reports each rank's end. It is one for all workers of a test
run: it forks a process for each that connects. A rank is a process of its own, with a launcher's environment variables.
It ends as an interpreter does, by joining threads and calling exit handlers, but for the teardown of modules: that
copies all memory that the ranks share with the server, a third of a second each.

What torchrun itself does (its own exit code and report, restarts, signals to its workers) is not imitated beyond one
rule: when a rank fails, the others get SIGTERM. Tests of the launcher start the real one.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
GRACE_S = 30  # between SIGTERM and SIGKILL, as torchrun's
# What a run imports by name, when it gets there.
_NAMED_IN_A_RUN = (
    "distaccum.data.datasets.digits",
    "distaccum.data.datasets.text",
    "distaccum.losses.cross_entropy",
    "distaccum.losses.linear_cross_entropy",
    "distaccum.models.cnn",
    "distaccum.models.gpt",
    "distaccum.tools.flops",
    "distaccum.tools.modules",
    "distaccum.tools.report.page",
    "distaccum.train.metrics.console",
    "distaccum.verification.proof",
)
# Libraries read these while they are imported, so that a server serves only requests with the same values.
_READ_AT_IMPORT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "LD_PRELOAD")


class _Server:
    """A connection to a server: the process that serves it, ``pid``, and what goes to and fro."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self.stream = link.makefile("rw")
        (self.pid,) = self.answer()

    def ask(self, request: Mapping[str, Any]) -> None:
        self.stream.write(json.dumps(request) + "\n")
        self.stream.flush()

    def answer(self) -> list[int]:
        line = self.stream.readline()
        if not line:
            raise RuntimeError("the server that forks ranks has ended")
        found: list[int] = json.loads(line)
        return found

    def close(self) -> None:
        self.stream.close()
        self._link.close()


class Forks:
    """The servers and requests to them. A server is started by its first request, and ends with who has started it."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str | None, ...], _Server] = {}
        self._started: list[subprocess.Popen[str]] = []

    def run(
        self,
        arguments: Sequence[str],
        *,
        world: int,
        warm: str,
        cwd: Path | None,
        environment: Mapping[str, str],
        timeout: float,
        grace: float = GRACE_S,
        imports: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        """As ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True, ...)``, on ``world`` ranks.

        Args:
            world: the number of ranks; 1 is a process that no launcher has started.
            warm: what the server has imported, a name of :data:`WARM`.
            imports: modules of other libraries that the script imports as well: once in the server, not on each rank.
            timeout: in seconds; the ranks that are left are killed then.
            grace: seconds between SIGTERM and SIGKILL of the ranks that are left when one has failed.

        Returns:
            the exit code of the first rank that failed, or 0; the output of all ranks together.
        """
        server = self._server(warm, environment)
        with TemporaryDirectory() as folder, _Launcher(world) as launcher:
            out, error = Path(folder, "out"), Path(folder, "error")
            request = {
                "arguments": list(arguments),
                "environments": [dict(environment) | launcher.variables(rank) for rank in range(world)],
                "cwd": str(cwd or Path.cwd()),
                "imports": list(imports),
                "out": str(out),
                "error": str(error),
            }
            server.ask(request)
            code = _await_ranks(server, timeout, grace)
            return subprocess.CompletedProcess(arguments, code, out.read_text(), error.read_text())

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
        for process in self._started:
            process.communicate()

    def _server(self, warm: str, environment: Mapping[str, str]) -> _Server:
        key = (warm, *(environment.get(name) for name in _READ_AT_IMPORT))
        if key not in self._servers:
            run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"{os.getpid()}-{id(self)}")
            name = f"forks-{run}-{zlib.crc32(repr(key).encode())}"
            self._servers[key] = _connected(name) or self._start(name, warm, environment)
        return self._servers[key]

    def _start(self, name: str, warm: str, environment: Mapping[str, str]) -> _Server:
        """Another worker of the run may do so at the same time: whose server has the name first goes on."""
        process = subprocess.Popen(
            [sys.executable, __file__, warm, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=dict(environment) | {"PYTHONPATH": str(ROOT)},
        )
        self._started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        server = _connected(name)
        assert server is not None, f"the server that forks ranks ended with {process.wait()}"
        return server


def _connected(name: str) -> _Server | None:
    """To the server of this name, if there is one."""
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(f"\0{name}")
    except ConnectionRefusedError:
        link.close()
        return None
    return _Server(link)


class _Launcher:
    """Holds the store that the ranks of one request meet in, as torchrun's agent does; a world of one needs none."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._store: Any = None

    def __enter__(self) -> _Launcher:
        if self._world > 1:
            from torch.distributed import TCPStore  # noqa: PLC0415  tests of one process need no torch here

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._store = None

    def variables(self, rank: int) -> dict[str, str]:
        """Torchrun's environment variables for ``rank``."""
        if self._store is None:
            return {}
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._world),
            "LOCAL_WORLD_SIZE": str(self._world),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }


def _await_ranks(server: _Server, timeout: float, grace: float) -> int:
    """Waits for every rank; when one fails the others get SIGTERM, and SIGKILL after a grace."""
    left: set[int] = set(server.answer())
    timers = [threading.Timer(timeout, _signal, (left, signal.SIGKILL))]
    timers[0].start()
    failed = 0
    try:
        while left:
            pid, code = server.answer()
            left.discard(pid)
            if code and not failed:
                failed = code
                _signal(left, signal.SIGTERM)
                timers.append(threading.Timer(grace, _signal, (left, signal.SIGKILL)))
                timers[-1].start()
    finally:
        for timer in timers:
            timer.cancel()
    return failed


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in list(pids):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _warm_torch() -> None:
    """Only torch: for a copy of the package that the script's own ``PYTHONPATH`` names."""
    import torch._dynamo  # noqa: PLC0415  every optimizer imports it
    import torch.distributed.algorithms.ddp_comm_hooks.default_hooks  # noqa: PLC0415
    import torch.distributed.checkpoint.state_dict  # noqa: PLC0415
    import torch.distributed.fsdp  # noqa: F401, PLC0415


def _warm_distaccum() -> None:
    _warm_torch()
    import distaccum.engines.ddp.engine  # noqa: PLC0415  a run imports the one that it names
    import distaccum.engines.fsdp2.engine  # noqa: PLC0415
    import distaccum.tools.report.at_end  # noqa: PLC0415
    import distaccum.train.cli  # noqa: PLC0415
    import distaccum.train.trainer  # noqa: F401, PLC0415

    for name in _NAMED_IN_A_RUN:
        importlib.import_module(name)
    with suppress(ImportError):  # newer releases of torch have it
        import torch.profiler._cupti_monitor  # noqa: F401, PLC0415
    with suppress(ImportError):
        import sklearn.datasets  # noqa: F401, PLC0415  data=digits
    _warm_hydra()
    sys.modules["distaccum.tools.settings"].groups()  # which the report at a run's end compares with


def _warm_hydra() -> None:
    """Composes once: Hydra looks for its plugins, and its parser learns the grammar of overrides.

    A run composes twice, the first time for ``hydra.mode`` alone, which no file states in a test: once is left.
    """
    from hydra import compose, initialize_config_dir  # noqa: PLC0415
    from hydra._internal.hydra import Hydra  # noqa: PLC0415

    whole = Hydra.get_mode

    def get_mode(self: Hydra, **given: Any) -> Any:
        return whole(self, **given) if "hydra.mode" in str(given) else None

    Hydra.get_mode = get_mode  # type: ignore[method-assign]
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        compose("config", ["trainer.max_steps=3", "hydra.run.dir=a/b-c.d", "optim=sgd", "+x.y=true", "~model.n_head"])


def _warm_deepspeed() -> None:
    _warm_distaccum()
    import torch  # noqa: PLC0415

    from distaccum.engines.deepspeed.compat import load_deepspeed  # noqa: PLC0415
    from distaccum.errors import ConfigError  # noqa: PLC0415

    with suppress(ConfigError):  # an optional extra; the script says so again where it needs it
        load_deepspeed(torch.device("cpu"), planned=True)
        with suppress(ImportError):  # which each engine asks for its class; it brings torch's compiler
            import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401, PLC0415


WARM: dict[str, Callable[[], None]] = {"torch": _warm_torch, "distaccum": _warm_distaccum, "deepspeed": _warm_deepspeed}


def _become(request: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """In a rank: the streams, environment and import path of a fresh interpreter; then the script."""
    for path, stream in ((request["out"], 1), (request["error"], 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)  # all ranks write to the same files
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(environment)
    os.fsync = lambda _: None  # as in tests/conftest.py
    script, *_ = sys.argv = request["arguments"]
    sys.path[0] = str(Path(script).parent)
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.last_value = error  # as an interpreter does, for exit handlers
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # joins threads, as an interpreter does first
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _accept(listening: socket.socket) -> Mapping[str, Any] | None:
    """Forks a process for each that connects. Returns in a rank with what it is to run, elsewhere at the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        ready, _, _ = select.select([listening, 0], [], [])
        if 0 in ready:  # who has started this server has ended
            return None
        link, _ = listening.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            return _serve(link)
        link.close()


def _serve(link: socket.socket) -> Mapping[str, Any] | None:
    """Forks the ranks of each request. Returns in a rank with what it is to run, else when nobody asks any more."""

    def answer(value: object) -> None:
        link.sendall(f"{json.dumps(value)}\n".encode())

    answer([os.getpid()])
    for line in link.makefile():
        request = json.loads(line)
        for name in request["imports"]:
            with suppress(ImportError):  # the script says so again where it needs it
                importlib.import_module(name)
                gc.freeze()
        pids = []
        for environment in request["environments"]:
            pid = os.fork()
            if pid == 0:
                os.close(link.fileno())
                return request | {"environment": environment}
            pids.append(pid)
        answer(pids)
        for _ in pids:
            pid, state = os.wait()
            answer([pid, os.waitstatus_to_exitcode(state)])
    return None


def main() -> None:
    """The server, which has its name before it imports anything."""
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(f"\0{sys.argv[2]}")
    except OSError:  # another worker's has it
        return
    listening.listen()
    print("listens", flush=True)
    os.dup2(2, 1)
    WARM[sys.argv[1]]()
    sys.path.remove(str(ROOT))  # the server's own PYTHONPATH
    gc.collect()
    gc.freeze()  # a rank's collector would touch, and so copy, everything that was imported
    request = _accept(listening)
    if request is not None:
        _become(request, request["environment"])


if __name__ == "__main__":
    main()
