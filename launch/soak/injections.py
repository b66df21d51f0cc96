"""What each kind of fault does to a run, and what the run has to do about it."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import monotonic, sleep

from launch.soak.attempt import GRACE_S, Attempt, OverError, SoakError, send, status_of
from launch.soak.run import HANG_S, Run
from launch.soak.schedule import STARTUP, Fault

ON_A_SCREEN = 25  # lines
_SOON_S = 40.0
_OF_THE_DEAD = (".ranks/", ".status.reserve", "owner.json")
_FAILED = 1
_REFUSED = 2


@dataclass(kw_only=True)
class Outcome:
    """What was done, and what came of it.

    ``ended``: whether the run is down now. ``world``: of the next start. ``next_says``: what that start has to print.
    """

    did: str
    handled: str = ""
    ended: bool = True
    code: int | None = None
    world: int | None = None
    next_says: list[str] = field(default_factory=list)


def inject(fault: Fault, run: Run, attempt: Attempt) -> Outcome:
    """Injects a fault into a running attempt.

    Raises:
        SoakError: the run does not do what is documented.
    """
    return _LIVE[fault.kind](fault, run, attempt)


def damage(fault: Fault, run: Run) -> Outcome:
    """Injects a fault into the files of a run that is down."""
    return _DOWN[fault.kind](fault, run)


# ------------------------------------------------------------------------------------------ processes


def _kill_a_rank(fault: Fault, run: Run, attempt: Attempt) -> Outcome:
    rank, pid = _a_rank(fault.random(), attempt)
    send(pid, signal.SIGKILL)
    did = f"SIGKILL to rank {rank} (process {pid})"
    return _fails(did, run, attempt, fault, rf"rank {rank} was killed by SIGKILL")


def _kill_the_launcher(fault: Fault, run: Run, attempt: Attempt) -> Outcome:
    send(attempt.pid, signal.SIGKILL)
    code = attempt.end(_SOON_S)
    _expect(code == -signal.SIGKILL, f"exit code {code}")
    status = _status(run, "preempted", "failed", *_before_it_ran(fault, run, attempt))
    return Outcome(did=f"SIGKILL to the launcher (process {attempt.pid})", code=code, handled=status)


def _kill_all(fault: Fault, run: Run, attempt: Attempt) -> Outcome:
    number = len(attempt.processes())
    attempt.kill()
    status = _status(run, "running", *_before_it_ran(fault, run, attempt))
    said = ["which is gone: taken over"] if (run.folder / "owner.json").exists() else []
    return Outcome(did=f"SIGKILL to all {number} processes", code=attempt.code, handled=status, next_says=said)


def _kill_a_loader(fault: Fault, run: Run, attempt: Attempt) -> Outcome:
    if not attempt.wait_for("a loading process", attempt.loaders):
        raise OverError
    pid = fault.random().choice(attempt.loaders())
    send(pid, signal.SIGKILL)
    return _fails(f"SIGKILL to loading process {pid}", run, attempt, fault, r"rank \d.*(SIGKILL|killed)")


def _stop_and_go(fault: Fault, run: Run, attempt: Attempt) -> Outcome:
    random = fault.random()
    rank, pid = _a_rank(random, attempt)
    stopped_s = random.uniform(0.3, HANG_S / 3)
    send(pid, signal.SIGSTOP)
    sleep(stopped_s)
    send(pid, signal.SIGCONT)
    before = attempt.step()
    attempt.wait_for("progress after SIGCONT", lambda: attempt.step() > before)
    _expect(attempt.code in (None, 0), f"the run ended with {attempt.code}: {_last_words(attempt)}")
    return Outcome(did=f"SIGSTOP to rank {rank}, SIGCONT after {stopped_s:.1f} s", ended=False, handled="trains on")


def _stop(fault: Fault, run: Run, attempt: Attempt) -> Outcome:
    rank, pid = _a_rank(fault.random(), attempt)
    send(pid, signal.SIGSTOP)
    reason = rf"process {pid} .*is stopped \(SIGSTOP"
    within_s = 10 * HANG_S + _SOON_S  # it may just have begun its first save, which may take ten times as long
    return _fails(f"SIGSTOP to rank {rank} (process {pid})", run, attempt, fault, reason, within_s=within_s)


# ------------------------------------------------------------------------------------------ signals


def _told(name: str) -> Callable[[Fault, Run, Attempt], Outcome]:
    number = signal.Signals[name]

    def tell(fault: Fault, run: Run, attempt: Attempt) -> Outcome:
        send(attempt.pid, number)
        return _leaves(f"{name} to the launcher", run, attempt, fault, number)

    return tell


def _tell_one_rank(fault: Fault, run: Run, attempt: Attempt) -> Outcome:
    random = fault.random()
    rank, pid = _a_rank(random, attempt)
    number = random.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP))
    send(pid, number)
    return _leaves(f"{number.name} to rank {rank}", run, attempt, fault, number)


def _ctrl_c_twice(fault: Fault, run: Run, attempt: Attempt) -> Outcome:
    """The second press ends it at once, unless the first one has by then."""
    random = fault.random()
    rank, pid = _a_rank(random, attempt)
    send(pid, signal.SIGSTOP)  # or it would have left before anybody presses again
    send(attempt.pid, signal.SIGINT)
    sleep(random.uniform(0.4, 1.0))
    send(attempt.pid, signal.SIGINT)
    began = monotonic()
    code = attempt.end(GRACE_S + _SOON_S)
    _expect(code == 128 + signal.SIGINT, f"exit code {code}")
    _expect(monotonic() - began < GRACE_S + 5, f"took {monotonic() - began:.1f} s to end at once")
    status = _status(run, "failed", reason="second Ctrl-C")
    _quiet(attempt)
    return Outcome(did=f"SIGINT twice, while rank {rank} is stopped", code=code, handled=status)


def _other_world(fault: Fault, run: Run, attempt: Attempt) -> Outcome:
    world = fault.random().choice([world for world in run.course.worlds if world != run.world])
    send(attempt.pid, signal.SIGTERM)
    outcome = _leaves("SIGTERM to the launcher", run, attempt, fault, signal.SIGTERM)
    outcome.did, outcome.world = f"{outcome.did}, then on {world} ranks instead of {run.world}", world
    return outcome


# ------------------------------------------------------------------------------------------ files


def _full_disk(fault: Fault, run: Run, attempt: Attempt) -> Outcome:
    random = fault.random()
    with run.disk_full(leave=random.choice((0, 0, 100, 5000, 50_000))):
        left = shutil.disk_usage(run.folder).free
        outcome = _fails(f"the disk filled, {left} bytes left", run, attempt, fault, "No space left on device")
        if random.random() < 0.5:  # noqa: PLR2004  once more, while it is full
            again = run.start()
            code = again.end(_SOON_S)
            _expect(code in (_FAILED, _REFUSED), f"exit code {code} of a start on a full disk")
            _expect("No space left on device" in again.err, f"a start on a full disk says {again.err!r}")
            _quiet(again)
            outcome.did += ", and started once more"
    return outcome


def _flip_newest(fault: Fault, run: Run) -> Outcome:
    newest = run.newest_valid()
    return _passed_over(run, newest, _flip(newest, fault.random()))


def _flip_older(fault: Fault, run: Run) -> Outcome:
    random = fault.random()
    older = random.choice(run.valid()[:-1])
    run.damaged.add(older.name)
    return Outcome(did=_flip(older, random), handled="not looked at")


def _cut_newest(fault: Fault, run: Run) -> Outcome:
    random = fault.random()
    newest = run.newest_valid()
    file = random.choice(_files(newest))
    size = file.stat().st_size
    kept = random.randrange(size)
    with file.open("r+b") as opened:
        opened.truncate(kept)
    return _passed_over(run, newest, f"{_short(file)} cut from {size} to {kept} bytes")


def _remove_of_newest(fault: Fault, run: Run) -> Outcome:
    newest = run.newest_valid()
    file = fault.random().choice(_files(newest))
    file.unlink()
    return _passed_over(run, newest, f"{_short(file)} removed")


def _remove_newest(fault: Fault, run: Run) -> Outcome:
    newest = run.newest_valid()
    shutil.rmtree(newest)
    return Outcome(did=f"{newest.name} removed", handled="resumes from the one before")


def _damage_all(fault: Fault, run: Run) -> Outcome:
    """Refused; then somebody restores the folder."""
    random, copies = fault.random(), run.folder.parent / "copies"
    shutil.copytree(run.folder / "checkpoints", copies)
    before = _content(run.folder)
    did = "; ".join([_flip(path, random) for path in run.valid()])
    damaged = _content(run.folder)
    attempt = run.start()
    code = attempt.end(_SOON_S)
    _expect(code == _refused(attempt), f"exit code {code} where all checkpoints are damaged")
    _expect("has no checkpoint to resume from" in attempt.err, f"it says {attempt.err!r}")
    _quiet(attempt)
    if attempt.bare:  # nobody has checked before the ranks took the folder over from the dead ones
        damaged = {name: content for name, content in damaged.items() if not name.startswith(_OF_THE_DEAD)}
    _expect(_content(run.folder) == damaged, "a refused start has changed the run directory")
    shutil.rmtree(run.folder / "checkpoints")
    copies.rename(run.folder / "checkpoints")
    restored = _content(run.folder) | {name: before[name] for name in before if name.startswith(_OF_THE_DEAD)}
    _expect(restored == before, "the folder is not restored")
    return Outcome(did=did, code=code, handled="refused; then restored by hand")


def _tear_metrics(fault: Fault, run: Run) -> Outcome:
    file, random = run.folder / "metrics.jsonl", fault.random()
    line = file.read_bytes().splitlines()[-1]
    torn = random.choice((line[: random.randrange(1, len(line))], b"\xff\xfe" + line[:40], b"\0" * 100))
    with file.open("ab") as opened:
        opened.write(torn)
    number = len(file.read_bytes().splitlines())
    did = f"{len(torn)} bytes of a torn line appended"
    return Outcome(did=did, handled="moved to metrics.superseded.jsonl", next_says=[f"line {number} is damaged"])


def _second_run(fault: Fault, run: Run, attempt: Attempt) -> Outcome:
    second = run.start(resume=fault.random().choice(("auto", "never")), beside=True)
    code = second.end(_SOON_S)
    if attempt.code is None:
        _expect(code == _refused(second), f"exit code {code} of a second run: {second.err}")
        _expect("is another run's (process" in second.err, f"a second run says {second.err!r}")
    _quiet(second)
    _expect(attempt.code in (None, 0), f"the first run ended with {attempt.code}: {_last_words(attempt)}")
    return Outcome(did="a second run started", code=code, ended=False, handled="refused; the first one trains on")


def _kill_wandb(fault: Fault, run: Run, attempt: Attempt) -> Outcome:
    if not attempt.wait_for("W&B's process", attempt.wandb):
        raise OverError
    sleep(fault.random().uniform(0, 0.5))
    killed = attempt.wandb()
    for pid in killed:
        send(pid, signal.SIGKILL)
    before = attempt.step()
    attempt.wait_for("progress without W&B", lambda: attempt.step() > before)
    _expect(attempt.code in (None, 0), f"the run ended with {attempt.code}: {_last_words(attempt)}")
    return Outcome(did=f"SIGKILL to W&B's process {killed}", ended=False, handled="trains on")


# ------------------------------------------------------------------------------------------ what has to come of it


def _fails(did: str, run: Run, attempt: Attempt, fault: Fault, reason: str, *, within_s: float = _SOON_S) -> Outcome:
    """The run fails, names the cause in its status and in a few lines, and no process is left."""
    code = attempt.end(within_s + GRACE_S)
    _expect(code == _FAILED, f"exit code {code}: {_last_words(attempt)}")
    status = _status(run, "failed", *_before_it_ran(fault, run, attempt), reason=reason)
    told = rf"{reason}|Signal 9 \(SIGKILL\) received" if attempt.bare and fault.moment == STARTUP else reason
    _expect(re.search(told, attempt.err) is not None, f"nobody reads {told!r} in {attempt.err!r}")
    _quiet(attempt)
    return Outcome(did=did, code=code, handled=status)


def _leaves(did: str, run: Run, attempt: Attempt, fault: Fault, number: signal.Signals) -> Outcome:
    """The run saves and leaves; in its first seconds it has nothing to save."""
    code = attempt.end(GRACE_S + _SOON_S)
    allowed = (0, 128 + number, -number) if fault.moment == STARTUP else (0,)
    allowed = (*allowed, _FAILED) if attempt.bare else allowed  # torchrun is told as well, and fails
    _expect(code in allowed, f"exit code {code} after {number.name}: {_last_words(attempt)}")
    status = _status(run, "preempted", "done", *_before_it_ran(fault, run, attempt))
    _quiet(attempt)
    return Outcome(did=did, code=code, handled=status)


def _passed_over(run: Run, newest: Path, did: str) -> Outcome:
    run.damaged.add(newest.name)
    return Outcome(did=did, handled="passed over", next_says=["passing over a damaged checkpoint"])


def _before_it_ran(fault: Fault, run: Run, attempt: Attempt) -> tuple[str, ...]:
    """What the status may still be where the fault came in the first seconds: that of the attempt before."""
    return (str(run.status_before.get("state", "")), "running") if fault.moment == STARTUP else ()


def _status(run: Run, *states: str, reason: str = "") -> str:
    status = status_of(run.folder)
    state, said = status.get("state", ""), str(status.get("reason", ""))
    _expect(state in states, f"status.json says {state!r} ({said}), not one of {states}")
    if state == "failed" and status != run.status_before:
        _expect(re.search(reason, said) is not None, f"status.json says {said!r}, nothing of {reason!r}")
    return f"{state}: {said}" if said else str(state)


def _quiet(attempt: Attempt) -> None:
    if attempt.bare:  # torchrun prints its own report
        return
    lines = attempt.err.splitlines()
    _expect(len(lines) <= ON_A_SCREEN, f"{len(lines)} lines on the screen: {attempt.err}")
    _expect("Traceback" not in attempt.err, f"a traceback on the screen: {attempt.err}")


def _refused(attempt: Attempt) -> int:
    return _FAILED if attempt.bare else _REFUSED


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise SoakError(problem)


def _last_words(attempt: Attempt) -> str:
    return "\n".join(attempt.err.splitlines()[-30:])


# ------------------------------------------------------------------------------------------ helpers


def _a_rank(random: Random, attempt: Attempt) -> tuple[int, int]:
    rank = random.randrange(attempt.world)
    ranks = attempt.ranks()
    if rank not in ranks:
        attempt.wait_for("the ranks", lambda: rank in attempt.ranks())
        ranks = attempt.ranks()
    if rank not in ranks:
        raise SoakError(f"the run ended by itself: {attempt.code}, {_last_words(attempt)}")
    return rank, ranks[rank]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def _flip(folder: Path, random: Random) -> str:
    file = random.choice(_files(folder))
    content = bytearray(file.read_bytes())
    at, bit = random.randrange(len(content)), random.randrange(8)
    content[at] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {at} of {_short(file)} flipped"


def _short(file: Path) -> str:
    return f"{file.parent.name}/{file.name}"


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


_LIVE: dict[str, Callable[[Fault, Run, Attempt], Outcome]] = {
    "kill a rank": _kill_a_rank,
    "kill the launcher": _kill_the_launcher,
    "kill all processes": _kill_all,
    "kill a loading process": _kill_a_loader,
    "stop a rank and let it go on": _stop_and_go,
    "stop a rank for good": _stop,
    "SIGTERM": _told("SIGTERM"),
    "SIGUSR1": _told("SIGUSR1"),
    "SIGINT": _told("SIGINT"),
    "SIGHUP": _told("SIGHUP"),
    "a signal to one rank": _tell_one_rank,
    "Ctrl-C twice": _ctrl_c_twice,
    "a full disk": _full_disk,
    "W&B's process killed": _kill_wandb,
    "a second run in the folder": _second_run,
    "another world size": _other_world,
}
_DOWN: dict[str, Callable[[Fault, Run], Outcome]] = {
    "a bit flipped in the newest checkpoint": _flip_newest,
    "a bit flipped in an older checkpoint": _flip_older,
    "the newest checkpoint cut short": _cut_newest,
    "a file of the newest checkpoint removed": _remove_of_newest,
    "the newest checkpoint removed": _remove_newest,
    "all checkpoints damaged": _damage_all,
    "a torn line of metrics": _tear_metrics,
}
KNOWN = _LIVE.keys() | _DOWN.keys()
