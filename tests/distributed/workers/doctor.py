"""Runs the doctor on a rank; rank 1 is first made to differ as ``DIFFERENT`` says."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from distaccum.tools.doctor import collective
from distaccum.tools.doctor.command import main

_CLONE_NEWNS = 0x20000  # unshare(2)

if "OPEN_S" in os.environ:  # how long a rank waits for one that cannot connect
    collective._OPEN_S = float(os.environ["OPEN_S"])
different = os.environ.get("DIFFERENT", "") if os.environ.get("RANK") == "1" else ""
if different.startswith("version "):  # of a package: metadata that is found before the true one's
    folder, package, number = different.removeprefix("version ").split()
    metadata = Path(folder) / f"{package}-{number}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n")
    sys.path.insert(0, folder)
if different.startswith("disk "):  # a file system of its own there
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS):
        raise OSError("unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)  # noqa: S607
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", different.removeprefix("disk ")], check=True)  # noqa: S607
if different.startswith("gloo "):  # an interface that there is not
    os.environ["GLOO_SOCKET_IFNAME"] = different.removeprefix("gloo ")
if different == "killed":
    os.kill(os.getpid(), 9)
main()
