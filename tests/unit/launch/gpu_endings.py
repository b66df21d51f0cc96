"""Measurements for the tests of the frame: those that do not come to their end."""

import os
import subprocess
import sys
import time

from launch.bench.gpu.figures import Figure, Measurement, Options


def dying(_: Options) -> list[Figure]:
    """The end of the process itself, as after an abort in native code."""
    os.abort()


def hanging(_: Options) -> list[Figure]:
    """Waits for ever, as does a process that it has started."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"child {child.pid}", flush=True)
    time.sleep(600)
    return []


MEASUREMENTS: dict[str, Measurement] = {"dying": dying, "hanging": hanging}
