"""Building and running images with neither a container engine's daemon nor a registry: buildah, and namespaces.

Needs root, buildah and debootstrap. All storage lies in one folder; nothing of the machine's own is touched.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.container import host
from tests.support.commands import ROOT, until

TOOLS = ("buildah", "debootstrap", "unshare")
SUITE = "bookworm"
DEBIAN = f"debian:{SUITE}-slim"  # made here under the name that the README's CPU build asks for
UID = 10001

# Runs as process 1 of a new PID namespace: what an engine mounts, then the image's command in place of the shell.
_START = """
set -e
root=$1 user=$2 workdir=$3 volume=$4 name=$5 folder=$6; shift 6
hostname "$name" # to torchrun, two containers with one name are one: their processes have the same PIDs
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
touch "$root/etc/hosts"
mount --bind "$folder/hosts" "$root/etc/hosts"
mount --bind "$volume" "$root/workspace/runs"
exec chroot --userspec="$user" --groups= "$root" env --chdir="$workdir" "$@"
"""


@dataclass
class Engine:
    """Images in a folder."""

    folder: Path

    def buildah(self, *arguments: object) -> str:
        """Runs buildah and returns what it wrote to stdout; what else it says goes to a log in the folder."""
        storage = [f"--root={self.folder}/storage", f"--runroot={self.folder}/run", "--storage-driver=vfs"]
        command = ["buildah", *storage, *map(str, arguments)]
        with (self.folder / "buildah.log").open("a") as log:
            finished = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                check=False,
                env=os.environ | {"TMPDIR": str(self.folder)},
            )
            log.write(finished.stdout)
        assert finished.returncode == 0, (self.folder / "buildah.log").read_text()[-6000:]
        return finished.stdout.strip()

    def make_base(self) -> None:
        """A minimal Debian under the name :data:`DEBIAN`."""
        tree = self.folder / "base"
        mirror = host.debian_mirror(SUITE)
        with (self.folder / "debootstrap.log").open("w") as log:
            command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", SUITE, str(tree)]
            subprocess.run(command + ([mirror] if mirror else []), stdout=log, stderr=log, check=True)
        (tree / "etc/apt/apt.conf.d/90host").write_text(host.apt_settings())
        subprocess.run(["tar", "-C", tree, "-cf", self.folder / "base.tar", "."], check=True)  # noqa: S607
        shutil.rmtree(tree)
        container = self.buildah("from", "scratch")
        self.buildah("add", "--quiet", container, self.folder / "base.tar", "/")
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.buildah("config", "--env", path, container)
        self.buildah("commit", "--quiet", "--rm", container, f"docker.io/library/{DEBIAN}")
        (self.folder / "base.tar").unlink()

    def build(self, tag: str, *, secret: str = "", **build_arguments: str) -> None:
        """The repository's Dockerfile; ``secret`` is a line that goes into pip's configuration and nowhere else."""
        source = host.pip_source()
        config = self.folder / "pip.conf"
        config.write_text(f"{secret}\n{source.config}")
        # One layer a stage: this storage driver copies the whole tree for each.
        options = ["--isolation=chroot", "--pull-never", "--format=docker", "--layers=false"]
        options += [f"--secret=id=pip,src={config}"]
        options += [f"--volume={here}:{there}:ro" for here, there in source.mounts.items()]
        options += [f"--build-arg={name}={value}" for name, value in (host.proxies() | build_arguments).items()]
        self.buildah("bud", *options, "--tag", tag, ROOT)

    @contextmanager
    def image(self, tag: str) -> Iterator[Image]:
        """The image's tree and settings, for the block's length."""
        container = self.buildah("from", "--pull-never", tag)
        try:
            tree = Path(self.buildah("mount", container))
            settings = json.loads(self.buildah("inspect", "--type=image", tag))
            yield Image(tree, settings["Docker"]["config"], json.dumps(settings), self.folder)
        finally:
            self.buildah("umount", container)
            self.buildah("rm", container)


@dataclass
class Image:
    """An image that can be run."""

    tree: Path
    config: dict[str, Any]
    described: str  # all of its description, history included, as JSON
    folder: Path
    volumes: Path = field(init=False)

    def __post_init__(self) -> None:
        self.volumes = self.folder / "volumes"
        self.volumes.mkdir(exist_ok=True)

    def start(self, *arguments: str, volume: str = "runs", user: str = "", **environment: str) -> Container:
        """``docker run``: the entry point with these arguments, as the image's user or another ("uid:gid").

        The folder ``volume`` of :attr:`volumes`, the image's user's, is mounted at runs/.
        """
        runs = self.volumes / volume
        runs.mkdir(exist_ok=True)
        os.chown(runs, UID, UID)
        settings = dict(pair.split("=", 1) for pair in self.config["Env"]) | environment
        inside = [f"{name}={value}" for name, value in settings.items()]
        number = len(list(self.folder.glob("container-*.log")))
        name, log = f"container-{number}", self.folder / f"container-{number}.log"
        with (self.folder / "hosts").open("a") as hosts:  # they share the machine's loopback interface
            hosts.write(f"127.0.1.{number + 1} {name}\n" if number else f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        command = ["unshare", "--fork", "--kill-child", "--pid", "--mount", "--ipc", "--uts"]
        place = [self.tree, user or self.config["User"], self.config["WorkingDir"], runs, name, self.folder]
        command += ["sh", "-c", _START, "start", *map(str, place)]
        command += ["--ignore-environment", *inside, *self.config["Entrypoint"], *arguments]
        with log.open("w") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        return Container(process, log, runs)

    def run(self, *arguments: str, timeout: float = 300, **environment: str) -> tuple[int, str]:
        """Runs to the end; the exit code and everything printed."""
        container = self.start(*arguments, **environment)
        return container.wait(timeout), container.printed()


@dataclass
class Container:
    """A running container."""

    process: subprocess.Popen[bytes]
    log: Path
    runs: Path

    def printed(self) -> str:
        """All it has written so far."""
        return self.log.read_text()

    def wait(self, timeout: float) -> int:
        """The exit code; after ``timeout`` seconds the container is killed and this raises."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout} s:\n{self.printed()[-6000:]}") from None

    def first_process(self) -> int:
        """The PID, here, of its process 1."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(until(lambda: children.read_text().split(), 10)[0])

    def stop(self, timeout: float) -> tuple[int, float]:
        """``docker stop``: SIGTERM to process 1. The exit code, and the seconds it took."""
        name = Path(f"/proc/{self.first_process()}/comm")
        self.await_that(lambda: name.read_text() == "tini\n", timeout=10)  # not still what stands in for the engine
        began = time.monotonic()
        os.kill(self.first_process(), signal.SIGTERM)
        code = self.wait(timeout)
        return code, time.monotonic() - began

    def kill(self) -> None:
        """Ends it at once, with every process in it."""
        if self.process.poll() is None:
            os.kill(self.first_process(), signal.SIGKILL)  # the kernel ends the rest of the namespace with it
            self.process.wait()

    def await_that(self, holds: Callable[[], bool], timeout: float) -> None:
        """Waits until ``holds()``; raises if the container ends first, or after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not holds():
            assert self.process.poll() is None, f"it ended:\n{self.printed()[-6000:]}"
            assert time.monotonic() < deadline, self.printed()[-6000:]
            time.sleep(0.1)


def missing_tools() -> list[str]:
    """What this machine lacks for building and running images."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [tool for tool in TOOLS if shutil.which(tool, path=path) is None] + (["root"] if os.geteuid() else [])
