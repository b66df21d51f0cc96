"""Names the ranks that have stopped, with everybody's stacks, instead of a silent wait for the group's timeout.

A thread beside each rank's loop reads what that does (:class:`~distaccum.distributed.activity.Activity`) and shows it
to the others in the launcher's store. A rank that has stood still for too long looks at the others: while one of them
moves nothing hangs. Otherwise it raises the alarm, upon which each rank that still answers writes its stacks.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import active_children
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import TextIO

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not marked as exported

from distaccum.distributed.activity import MEETINGS, OF_A_WINDOW, Phase, Place
from distaccum.distributed.world import World
from distaccum.errors import shorten

# What the kernel and the interpreter say of a process: whether it runs, and where its threads stand.

DIED = "has died"
STOPPED = "is stopped (SIGSTOP, or Ctrl-Z)"
_STATES = {
    "T": STOPPED,
    "t": "is stopped by a debugger",
    "D": "waits for a disk or a network file system (state D)",
    "Z": DIED,
    "X": DIED,
}
_DEBUGGERS = ("pdb.py", "bdb.py", "ipdb", "pydevd", "debugpy", "pudb")


def trouble_of(pid: int) -> str:
    """What is wrong with a process of this machine, such as ``has died``; empty where nobody knows of anything."""
    if sys.platform != "linux":
        return ""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
    except FileNotFoundError:
        return DIED
    except OSError:
        return ""
    return _STATES.get(after_name[:1], "")


def troubled_children() -> str:
    """The loading processes of this one with which something is wrong, in words; empty without one."""
    found = [(child.pid, trouble_of(child.pid)) for child in active_children() if child.pid is not None]
    return ", ".join(f"its process {pid} {trouble}" for pid, trouble in found if trouble)


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a thread stands: in whose code, in which collective if it waits in one, and whether a debugger has it."""

    code: str
    collective: str
    debugged: bool


NOWHERE = Stand("", "", debugged=False)


def stand_of(thread: int) -> Stand:
    """Of the thread with this identifier; empty where it has ended, or goes on while it is looked at."""
    try:
        return _walked(sys._current_frames().get(thread))
    except AttributeError:  # a running thread's frames may be reused under the walk
        return NOWHERE


def _walked(frame: FrameType | None) -> Stand:
    code = collective = ""
    debugged = False
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/distributed/" in file and not code:
            collective = collective if file.endswith("c10d_logger.py") else frame.f_code.co_name
        elif not code and not is_of_library(file):
            code = _line(frame)
        debugged = debugged or any(name in file for name in _DEBUGGERS)
        frame = frame.f_back
    return Stand(code, collective, debugged)


def is_of_library(file: str) -> bool:
    """Whether a source file is of Python or of an installed package."""
    return "/site-packages/" in file or "/lib/python" in file or file.startswith("<")


def _line(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} in {frame.f_code.co_name}"


_log = logging.getLogger(__name__)
FLOOR_S, MULTIPLE = 300.0, 10.0  # by default: ten times the longest pause seen, and never less than five minutes
FIRST = 10.0  # times as long for the first window, evaluation and save: they compile, start loaders and fill caches
OF_THE_GROUP = 0.8  # of the group's timeout, after which the ranks that wait would be blamed
_TOLD_S, _TOLD_MULTIPLE = 10.0, 2.0  # once the run is told to leave: its sender waits for 30 s or more
_SLOWEST_BEAT_S, _BEATS = 1.0, 10  # between two signs of life; as many in the shortest limit
_ANSWER_S, _STORE_S = 5.0, 5.0
_BEATS_TO_WAIT = 3  # for a sign of another rank
_STILL = 0.5  # of the limit, from where on a rank says in whose code it stands
_CAUSE_S, _TOLD_FIRST_S, _POLL_S = 4.0, 1.0, 0.1
_KILLED = ". It left no word: it was killed, as the kernel does when memory is over (see dmesg), or its node is lost"
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')
_EXIT_CODE = 1
_WINDOW, _MEASURED = "window", 3  # windows at least, whose pauses say how long the next one may take


@dataclass(frozen=True, slots=True)
class Sign:
    """What a rank shows of itself."""

    number: int
    host: str
    pid: int
    window: int
    step: int
    phase: str
    done: int
    quiet_s: float
    code: str
    collective: str
    debugged: bool
    children: str

    @property
    def place(self) -> Place:
        """Where the rank is."""
        return Place(self.window, self.step, Phase(self.phase), self.done)

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return self.place.phase in MEETINGS or bool(self.collective)


def longest_pause(timeout: float | None, group_timeout: timedelta) -> float:
    """Seconds that what is done for the first time may take; the arguments are those of :class:`Watchdog`."""
    return min(FIRST * (timeout or FLOOR_S), OF_THE_GROUP * group_timeout.total_seconds())


class Watchdog:
    """Watches this rank's activity for the length of the block.

    Args:
        world: this rank; its ``store`` shows it the others.
        timeout: seconds without progress, from the first window's end on; None: ``FLOOR_S``, or ``MULTIPLE`` times the
            longest pause there was. The first window, evaluation and save have ``FIRST`` times as long.
        group_timeout: of the process group.
        on_hang: given what has happened, in words, on the rank that has found it, and just before the process ends.
        folder: takes every rank's stacks.
        told: says whether the run was told to leave: a hang then ends it in seconds.
    """

    def __init__(
        self,
        world: World,
        *,
        timeout: float | None,
        group_timeout: timedelta,
        on_hang: Callable[[str], None],
        folder: Path,
        told: Callable[[], str] = str,
    ) -> None:
        self._world, self._timeout, self._on_hang, self._folder, self._told = world, timeout, on_hang, folder, told
        self._most = OF_THE_GROUP * group_timeout.total_seconds()
        self._first = longest_pause(timeout, group_timeout)
        self._beat_s = min(_SLOWEST_BEAT_S, (timeout or FLOOR_S) / _BEATS)
        self._store: Store | None = None
        if world.store is not None:
            clone = getattr(world.store, "clone", None)  # a connection of its own: the loop may wait in the other one
            self._store = clone() if clone is not None else world.store
            self._store.set_timeout(timedelta(seconds=_STORE_S))
        self._watched = threading.get_ident()
        self._host, self._number = socket.gethostname(), 0
        self._place, self._since, self._windows = world.activity.now(), monotonic(), 0
        self._pauses: dict[str, float] = {}  # the longest, by kind; a kind that is not in it has not been done yet
        self._crashes: TextIO | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        """Starts to watch."""
        if self._world.is_main:
            _log.info("%s", self.describe())
        self._catch_crashes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it."""
        self._ended.set()
        self._thread.join(timeout=2 * _STORE_S)
        self._forget_crashes()

    def describe(self) -> str:
        """The limits, in words."""
        rule = f"{self._timeout:g} s" if self._timeout else f"{MULTIPLE:g}x the longest pause, {FLOOR_S:g} s at least"
        return (
            f"hangs are told after {rule} without progress on any rank ({self._first:g} s for the first window, "
            f"evaluation and save; at most {self._most:g} s): trainer.hang_timeout"
        )

    # --- errors, in the loop's thread

    def tell(self, reason: str) -> bool:
        """Shows the other ranks why this one ends; the first rank's reason stays. Whether it is this one, or may be."""
        if self._store is not None:
            with suppress(RuntimeError):
                return bool(self._store.compare_set("watchdog/fault", "", reason).decode() == reason)
        return True

    def cause(self) -> tuple[str, list[int]]:
        """Why a collective has failed: what another rank has told, or which ranks are gone; empty if nobody knows.

        Returns:
            The reason, and the ranks that can say nothing any more.
        """
        if self._store is None:
            return "", []
        with suppress(RuntimeError):
            before, number = self._signs(), 0
            while number < _CAUSE_S / _POLL_S:
                number += 1
                if self._store.check(["watchdog/fault"]):
                    return self._store.get("watchdog/fault").decode(), []
                gone = [
                    rank
                    for rank, sign in before.items()
                    if rank != self._world.rank and sign.host == self._host and trouble_of(sign.pid) == DIED
                ]
                if gone and number * _POLL_S > _TOLD_FIRST_S:
                    return shorten([self._of_dead(rank, before[rank]) for rank in gone]), gone
                sleep(_POLL_S)
            after = self._signs()
            silent = [rank for rank, sign in after.items() if rank in before and sign == before[rank]]
            silent = [rank for rank in silent if rank != self._world.rank]
            return shorten([self._of_dead(rank, after[rank]) for rank in silent]), silent
        return "", []

    def _of_dead(self, rank: int, sign: Sign) -> str:
        last = crash_of(rank, self._folder)
        return f"{_silent(rank, sign, self._host)}{last or _KILLED}"

    def _catch_crashes(self) -> None:
        """A process that dies in native code, as gloo's does of collectives that do not match, leaves its stacks."""
        if faulthandler.is_enabled():
            return
        with suppress(OSError):
            self._folder.mkdir(
                exist_ok=True
            )  # no parents: on a machine that does not see the run directory it stays away
            self._crashes = _crash_file(self._folder, self._world.rank).open("w")
            faulthandler.enable(self._crashes)

    def _forget_crashes(self) -> None:
        if self._crashes is None:
            return
        faulthandler.disable()
        with suppress(OSError):
            self._crashes.close()
            _crash_file(self._folder, self._world.rank).unlink()
            self._folder.rmdir()  # unless there is something in it

    # --- the thread

    def _watch(self) -> None:
        woken = monotonic()
        with suppress(RuntimeError):
            self._show()
        while not self._ended.wait(self._beat_s):
            now = monotonic()
            self._since += max(0.0, now - woken - 2 * self._beat_s)  # while this process itself was stopped
            woken = now
            self._look(now)
            try:
                if self._store is not None:
                    self._show()
                    if self._store.check(["watchdog/alarm"]):
                        self._answer(self._store)
                quiet = monotonic() - self._since
                if quiet > min(self.limit(), self._limit_of_stopped()) and not self._ended.is_set():
                    self._suspect(quiet)
            except RuntimeError as error:  # the store is gone, and so is the launcher; or it is slow
                _log.info("the watchdog cannot reach the launcher's store: %s", str(error).splitlines()[0])

    def _look(self, now: float) -> None:
        """Notes a pause when it has ended."""
        place, before = self._world.activity.now(), self._place
        if place == before:
            return
        kind, pause = _kind(before), now - self._since
        self._place, self._since = place, now
        self._windows += place.window > before.window
        if kind in self._pauses:
            self._pauses[kind] = max(self._pauses[kind], pause)
        elif kind not in (_WINDOW, _kind(place)):
            self._pauses[kind] = pause
        if place.window > self._world.activity.first:  # its own pauses are forgotten: it is longer than the others
            self._pauses.setdefault(_WINDOW, 0.0)

    def limit(self) -> float:
        """Seconds that the present phase may take without a change."""
        kind = _kind(self._place)
        longest = self._pauses.get(kind)
        allowed = self._timeout or FLOOR_S
        if longest is None:
            return self._first
        if kind == _WINDOW and self._windows >= _MEASURED and self._told():
            return min(max(_TOLD_S, _TOLD_MULTIPLE * longest), allowed)
        if self._timeout is None:
            allowed = max(allowed, MULTIPLE * longest)
        return min(allowed, self._most)

    def _limit_of_stopped(self) -> float:
        """The limit where the run is told to leave and a rank here is stopped, which in no phase goes on."""
        if self._told() and any(self._is_stopped(sign) for sign in self._signs().values()):
            return _TOLD_S
        return float("inf")

    def _is_stopped(self, sign: Sign) -> bool:
        return sign.host == self._host and trouble_of(sign.pid) == STOPPED

    def _sign(self, *, closely: bool) -> Sign:
        self._number += 1
        # Only of a thread that has long stood still: CPython does not protect the frames of one that runs.
        still = closely or monotonic() - self._since > _STILL * self.limit()
        stand, place = stand_of(self._watched) if still else NOWHERE, self._place
        if stand.debugged:  # a person looks at it, and what follows takes its time from then on
            self._since = monotonic()
        return Sign(
            number=self._number,
            host=self._host,
            pid=os.getpid(),
            window=place.window,
            step=place.step,
            phase=place.phase.value,
            done=place.done,
            quiet_s=monotonic() - self._since,
            code=stand.code,
            collective=stand.collective,
            debugged=stand.debugged,
            children=troubled_children() if closely else "",
        )

    def _show(self, *, closely: bool = False) -> Sign:
        sign = self._sign(closely=closely)
        if self._store is not None:
            self._store.set(f"watchdog/{self._world.rank}", json.dumps(asdict(sign)))
        return sign

    def _signs(self) -> dict[int, Sign]:
        """The last sign of every rank that has ever given one."""
        if self._store is None:
            return {self._world.rank: self._sign(closely=True)}
        ranks = list(range(self._world.size))
        if not self._store.check([f"watchdog/{rank}" for rank in ranks]):
            ranks = [rank for rank in ranks if self._store.check([f"watchdog/{rank}"])]
        given = self._store.multi_get([f"watchdog/{rank}" for rank in ranks])  # once, for thousands of ranks
        return {rank: Sign(**json.loads(sign)) for rank, sign in zip(ranks, given, strict=True)}

    # --- the alarm

    def _suspect(self, quiet: float) -> None:
        """Raises the alarm unless a rank moves."""
        before = self._signs()
        for _ in range(_BEATS_TO_WAIT):
            sleep(self._beat_s)
            self._look(monotonic())
            self._show()
        if monotonic() - self._since < quiet or self._ended.is_set():  # it has moved meanwhile
            return
        own = self._show(closely=True)
        signs = self._signs()
        answering = {rank for rank, sign in signs.items() if rank not in before or sign.number != before[rank].number}
        answering.add(self._world.rank)
        for rank in answering:
            if signs.get(rank, own).debugged or signs.get(rank, own).quiet_s < quiet - _BEATS_TO_WAIT * self._beat_s:
                return  # it moves, or a person looks at it
        name = str(self._world.rank)
        if self._store is None or self._store.compare_set("watchdog/alarm", "", name) == name.encode():
            self._raise_alarm(answering, signs)
        else:
            self._answer(self._store)

    def _raise_alarm(self, answering: set[int], signs: Mapping[int, Sign]) -> None:
        self._dump()
        deadline = monotonic() + _ANSWER_S + 2 * self._beat_s
        waiting = answering - {self._world.rank}
        while self._store is not None and waiting and monotonic() < deadline:
            waiting = {rank for rank in waiting if not self._store.check([f"watchdog/answer/{rank}"])}
            sleep(0.05)
        reason = explain(self._signs() if self._store else signs, answering, self._world.size, self._host)
        told = self._told()
        how_long = f"for {monotonic() - self._since:.0f} s" + (f", after {told}" if told else "")
        _log.error("%s, %s", reason, self._advice(how_long))
        self._end(reason, f"no progress on any rank {how_long}")

    def _advice(self, how_long: str) -> str:
        switch = f"trainer.hang_timeout={self._timeout:g}" if self._timeout else "trainer.hang_timeout"
        return (
            f"and no rank has made progress {how_long}: the run ends here. All ranks' stacks are in {self._folder}; "
            f"resume=auto goes on from the checkpoint. {switch} is the limit; null switches it off, as for a debugger"
        )

    def _answer(self, store: Store) -> None:
        """Upon another rank's alarm: writes this one's stacks, and ends once that rank has written why."""
        self._show(closely=True)
        self._dump()
        store.set(f"watchdog/answer/{self._world.rank}", "")
        deadline = monotonic() + 2 * (_ANSWER_S + 2 * self._beat_s)
        while monotonic() < deadline and not store.check(["watchdog/told"]):
            sleep(0.05)
        self._leave()

    def _end(self, reason: str, more: str) -> None:
        try:
            self._on_hang(f"{reason}; {more}")
        finally:
            if self._store is not None:
                self._store.set("watchdog/told", "")
                sleep(0.5)  # until the others have read it: the store may live in this process
            self._leave()

    def _leave(self) -> None:
        """Ends the process at once: its loop waits where no exception gets to it."""
        for child in active_children():
            child.kill()  # a loading process may be the one that is stuck
        self._forget_crashes()
        for stream in (sys.stdout, sys.stderr):
            getattr(stream, "leave", stream.flush)()  # a live line takes its row off the terminal
        os._exit(_EXIT_CODE)

    def _dump(self) -> None:
        """This rank's stacks, of all threads; and NCCL's flight recorder where it runs."""
        try:
            write_stacks(self._folder, self._world.rank, str(self._place))
            if self._world.device.type == "cuda":
                recorded = _flight_record()
                if recorded:
                    (self._folder / f"rank-{self._world.rank}.nccl").write_bytes(recorded)
        except OSError as error:
            _log.warning("the stacks cannot be written: %s", error)


def write_stacks(folder: Path, rank: int, where: str) -> None:
    """Writes this process's stacks, of all threads, into ``rank-N.txt``; ``where`` says what it does.

    Raises:
        OSError: the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank-{rank}.txt").open("w") as file:
        file.write(f"rank {rank}, process {os.getpid()} on {socket.gethostname()}: {where}\n")
        if troubled := troubled_children():
            file.write(f"{troubled}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def _kind(place: Place) -> str:
    """What its longest pause is measured with: windows take as long as each other, and so do the others of a kind."""
    return _WINDOW if place.phase in OF_A_WINDOW or place.phase is Phase.RECORD else place.phase.value


def _flight_record() -> bytes:
    """What NCCL has recorded of its collectives, as torch's own analysers read it; empty without."""
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace", None)
    try:
        return bytes(dump()) if dump is not None else b""
    except (RuntimeError, TypeError):
        return b""


def explain(signs: Mapping[int, Sign], answering: set[int], size: int, host: str) -> str:
    """Which ranks have stopped, where, and who waits for them.

    Args:
        signs: the last of every rank that has given one.
        answering: the ranks that still give signs.
        size: the number of ranks.
        host: this machine, of whose processes more is known.
    """
    silent = [rank for rank in range(size) if rank not in answering]
    if silent:
        culprits = silent
        said = [_silent(rank, signs.get(rank), host) for rank in culprits]
    else:
        busy = [rank for rank in sorted(answering) if not signs[rank].waits]
        least = min(signs[rank].place.key for rank in (busy or answering))
        culprits = [rank for rank in busy or sorted(answering) if signs[rank].place.key == least]
        if len(culprits) == len(answering) and not busy and size > 1:
            return f"all ranks wait for each other: {_together(signs)}; the network between them has stopped"
        said = [_standing(rank, signs[rank]) for rank in culprits]
    others = {rank: sign for rank, sign in signs.items() if rank not in culprits}
    waiting = f"; {_together(others)}" if others else ""
    return shorten(said, 4) + waiting


def _silent(rank: int, sign: Sign | None, host: str) -> str:
    if sign is None:
        return f"rank {rank} has never given a sign of life"
    trouble = trouble_of(sign.pid) if sign.host == host else ""
    return (
        f"rank {rank} (process {sign.pid} on {sign.host}) {trouble or 'gives no sign of life'}; it was last "
        f"seen in {sign.place}"
        f"{f', at {sign.code}' if sign.code and trouble != DIED else ''}"
    )


def _standing(rank: int, sign: Sign) -> str:
    where = f", at {sign.code}" if sign.code else ""
    alone = sign.collective and sign.place.phase not in MEETINGS
    verb = f"waits in {sign.collective}(), which the other ranks have not called," if alone else "stands still"
    children = f" ({sign.children})" if sign.children else ""
    return f"rank {rank} {verb} in {sign.place}{where}{children}"


def crash_of(rank: int, folder: Path) -> str:
    """Where a rank has crashed in native code, as its watchdog notes it in ``folder``; empty if it has not."""
    crash = _crash_file(folder, rank)
    with suppress(OSError):
        if text := crash.read_text():
            return f". {text.splitlines()[0]}{_innermost(text)}; its stacks are in {crash}"
    return ""


def _crash_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.crash"


def _innermost(crash: str) -> str:
    """Where the main thread, which ``faulthandler`` writes last, has crashed."""
    for frame in _FRAME.finditer(crash.rpartition("\n\n")[0].rpartition("\n\n")[2] or crash):
        if not is_of_library(frame["file"]):
            return f" at {frame['file']}:{frame['line']} in {frame['name']}"
    return ""


def _together(signs: Mapping[int, Sign]) -> str:
    """Ranks by where they are."""
    places: dict[str, list[int]] = {}
    for rank, sign in sorted(signs.items()):
        places.setdefault(str(sign.place), []).append(rank)
    parts = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {shorten(ranks)} {'is' if len(ranks) == 1 else 'are'} in {place}"
        for place, ranks in places.items()
    ]
    return shorten(parts, 3)
