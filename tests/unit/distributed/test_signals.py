"""Signals set a flag, and are put back."""

import os
import signal
import subprocess
import sys
import time
from threading import Thread

import pytest

from distaccum.distributed import signals as the_signals
from distaccum.distributed.signals import STOP_SIGNALS, StopSignals
from distaccum.distributed.watchdog import DIED, trouble_of
from tests.support.commands import until


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(the_signals, "_ignored", set())
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@pytest.mark.parametrize("number", [number for number in STOP_SIGNALS if number != signal.SIGINT])
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


@pytest.mark.parametrize("ends", [False, True])
def test_the_first_ctrl_c_is_noted_and_after_the_block_it_does_what_it_did(ends: bool) -> None:
    """In a command that ends, it ends the process without a traceback."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert (signals.received, until(lambda: signals.told, 5)) == ("SIGINT", "SIGINT")
        if ends:
            signals.ignore()
    assert signal.getsignal(signal.SIGINT) is (signal.SIG_DFL if ends else signal.default_int_handler)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_what_a_block_left_ignored_the_next_one_catches() -> None:
    for _ in range(2):
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received == "SIGHUP"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_of_the_terminal_that_is_ignored_stays_so(number: signal.Signals) -> None:
    """As SIGHUP under ``nohup``, and SIGINT of a shell's background job."""
    signal.signal(number, signal.SIG_IGN)
    with StopSignals() as signals:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == "SIGTERM"
    assert signal.getsignal(number) is signal.SIG_IGN


WAITS_IN_NATIVE_CODE = """
import ctypes, multiprocessing, time
from distaccum.distributed.signals import StopSignals
with StopSignals() as signals:
    signals.last_words = lambda why: print(why, flush=True)
    loader = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,), daemon=True)
    loader.start()
    print(loader.pid, flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)  # the second time for ever, whatever signal comes
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a mutex of glibc's")
def test_a_second_ctrl_c_ends_a_process_whose_main_thread_waits_in_native_code() -> None:
    """No handler of Python's runs there. The loading process gets the signals as well, and is gone, too."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS_IN_NATIVE_CODE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  no threads here
    )
    assert process.stdout is not None
    loader = int(process.stdout.readline())
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.4)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    said, error = process.communicate(timeout=5)
    assert process.returncode == 130
    assert said == "ended at once by a second Ctrl-C (SIGINT), without a save\n"
    assert [line.partition(",")[0] for line in error.splitlines()] == ["distaccum: ended at once by a second Ctrl-C"]
    until(lambda: trouble_of(loader) == DIED, 5)


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
