"""``python -m distaccum.train``, ``distaccum train`` and ``launch/train.py``: the main job, with fast imports."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from distaccum import program
from distaccum.config.secrets import redact_text
from distaccum.distributed.signals import LAUNCHER, die_with_parent

# Starting fast: Python's garbage collector leaves alone what the imports make.
#
# They make some 500,000 objects that live as long as the process, and hardly any garbage. Looking for it takes a
# quarter of the time of the imports, and once more most of a second when the interpreter ends.


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turns the collector off within the block, and exempts for good all objects that exist at its end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def refuse_mistyped() -> None:
    """Ends this process, unless it is one of several ranks, where a setting or choice is mistyped: before torch."""
    if "RANK" not in os.environ and (error := program.load(program.REFUSED)(sys.argv[1:])):
        sys.stderr.write(redact_text(f"distaccum: configuration error: {error}\n"))
        sys.exit(2)


def main(job: str = "distaccum.train.cli:main", *, dies_by: signal.Signals = signal.SIGTERM) -> None:
    """Imports the main job, and runs it.

    Args:
        job: its function, as ``module:name``.
        dies_by: what the kernel sends this process when its launcher has died.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C within the imports: no traceback
    if "RANK" in os.environ:
        # Within the imports, too: a launcher that is gone by their end sends no signal.
        die_with_parent(dies_by)
        if os.environ.pop(LAUNCHER, "") not in ("", str(os.getppid())):
            sys.exit(128 + signal.SIGTERM)  # and neither does one that was gone before that line
    program.start()
    if (topic := program.help_asked(sys.argv[1:])) is not None:
        sys.exit(program.load(program.HELP)("train", topic))  # without torch
    if any(argument in program.COMPLETION for argument in sys.argv[1:]):
        program.load(program.COMPLETE)("config", sys.argv[1:])
        return
    refuse_mistyped()
    with without_garbage_collection():
        run = program.load(job)  # here, where the collector is off
    run()


if __name__ == "__main__":
    main()
