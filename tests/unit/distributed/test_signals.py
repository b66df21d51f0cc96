"""Signals set a flag, and are put back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from threading import Thread

import pytest

from distaccum.distributed.signals import STOP_SIGNALS, StopSignals


@pytest.fixture(autouse=True)
def _as_before() -> object:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_noted_and_told(number: signal.Signals) -> None:
    told: list[str] = []
    with StopSignals() as signals:
        with signals.notify(told.append):
            assert signals.received == ""
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.received == number.name
        assert told == [number.name]
    os.kill(os.getpid(), number)  # asked again while leaving: without effect


def test_who_listens_late_is_told_too() -> None:
    told: list[str] = []
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        with signals.notify(told.append):
            assert told == ["SIGTERM"]


def test_without_a_signal_all_is_as_before() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with StopSignals():
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN  # torchrun's workers may inherit that
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == before


def test_a_handler_of_the_programs_own_stays() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (signals.received, seen) == ("", [signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGUSR2)
        assert signals.received == "SIGUSR2"


def test_in_another_thread_there_is_none_and_no_error() -> None:
    found: list[str] = []

    def use() -> None:
        with StopSignals() as signals:
            found.append(signals.received)

    thread = Thread(target=use)
    thread.start()
    thread.join()
    assert found == [""]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own service")
def test_a_process_whose_parent_is_killed_is_told() -> None:
    child = "import signal, time; from distaccum.distributed.signals import *; "
    child += "s = StopSignals().__enter__(); die_with_parent(); "
    child += "print('ready', flush=True)\nwith s.notify(lambda name: (print(name, flush=True), exit())): time.sleep(60)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    assert process.stdout.readline() == "SIGTERM\n"  # the pipe is the child's too
    process.wait()
    process.stdout.close()


def test_a_process_that_is_leaving_is_not_killed_by_being_asked_again() -> None:
    """Python gives its handlers up before its last exit handlers have run."""
    program = (
        "import atexit, os, signal; from distaccum.distributed.signals import StopSignals\n"
        "class Last:\n    def __del__(self): os.kill(os.getpid(), signal.SIGUSR1)\n"
        "with StopSignals(): os.kill(os.getpid(), signal.SIGUSR1)\n"
        "import sys; sys.last = Last()\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
