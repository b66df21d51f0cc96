"""Plays rounds: starts a run again after each fault, until it is done and is what the undisturbed one is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from textwrap import shorten
from time import monotonic, sleep
from typing import Any

from launch.soak.attempt import Attempt, OverError, SoakError
from launch.soak.compare import Bounds, Reference, distances, problems, read
from launch.soak.injections import Outcome, damage, inject
from launch.soak.run import Run, clear, step_of
from launch.soak.schedule import COURSES, DOWN, EVALUATION, SAVE, STARTUP, Fault, Round

_LONG_S = 300.0
_LEAST_CHECKPOINTS = 2  # so that a fault may take the newest


@dataclass(kw_only=True)
class Entry:
    """A line of ``soak.jsonl``: a fault, and what became of it."""

    fault: int
    kind: str
    moment: str
    round: int
    course: str
    time: str
    at_step: int
    phases: dict[str, str]
    did: str = ""
    handled: str = ""
    exit_code: int | None = None
    down_s: float | None = None
    training_after_s: float | None = None
    resumed_at: int | None = None
    updates_repeated: int = 0
    attempts: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Another kind of line: a run that has ended as it should.

    ``allowed`` and ``found`` are relative distances from the undisturbed run, of ``records`` and ``tensors``.
    """

    round: int
    course: str
    worlds: list[int]
    bitwise: bool
    allowed: dict[str, float]
    found: dict[str, float]
    faults: int
    starts: int


class Soak:
    """Plays rounds below ``out``; runs have their directories on the small disk ``disk``.

    Args:
        time_is_over: asked before each fault; the run then goes on to its end undisturbed.
        say: prints a line.
    """

    def __init__(self, out: Path, disk: Path, *, time_is_over: Callable[[], bool], say: Callable[[str], None]) -> None:
        self.out, self.disk, self._time_is_over, self._say = out, disk, time_is_over, say
        self.entries: list[Entry] = []
        self.compared: list[Compared] = []
        self.now: Fault | None = None
        """The fault that is being looked at."""
        self._references: dict[str, Reference] = {}
        self._number = 0

    def play(self, played: Round) -> None:
        """Plays the faults of a round, in as many runs as they need: one that is done before takes no more.

        Raises:
            SoakError: something is not as it is documented.
        """
        reference = self._reference(played.course.name)
        pending = list(played.faults)
        while pending and not self._time_is_over():
            _Play(self, played, self._new_run(played.course.name), reference).through(pending)
            clear(self.disk)

    def _new_run(self, course: str, *, world: int | None = None) -> Run:
        self._number += 1
        name = f"run-{self._number:03}"
        return Run(COURSES[course], self.disk / name, self.out / "logs" / name, world=world)

    def _reference(self, course: str) -> Reference:
        if course not in self._references:
            began = monotonic()
            worlds = COURSES[course].worlds
            own, *others = (self._undisturbed(course, world) for world in worlds)
            self._references[course] = Reference(own, others)
            where = " and ".join(map(str, worlds))
            self._say(f"{course}: trained undisturbed, on {where} ranks, in {monotonic() - began:.0f} s")
        return self._references[course]

    def _undisturbed(self, course: str, world: int) -> Any:
        run = self._new_run(course, world=world)
        attempt = run.start(resume="never")
        try:
            code = attempt.end(_LONG_S)
        finally:
            attempt.kill()
        if code:
            raise SoakError(f"the undisturbed run has ended with {code}: {attempt.err}")
        result = read(run.folder)
        for problem in problems(run.folder, result, Reference(result).bounds({world}, world)):
            raise SoakError(f"the undisturbed run: {problem}")
        clear(self.disk)
        return result

    def note(self, entry: Entry | Compared) -> None:
        """Writes a line of the log."""
        with (self.out / "soak.jsonl").open("a") as file:
            file.write(json.dumps(asdict(entry)) + "\n")
        if isinstance(entry, Compared):
            self.compared.append(entry)
            found = ", ".join(f"{name} {entry.found[name]:.0e} of {most:.0e}" for name, most in entry.allowed.items())
            how = "bitwise" if entry.bitwise else f"within the bound ({found}) on {entry.worlds} ranks,"
            done = f"{entry.course}: done after {entry.faults} faults and {entry.starts} starts"
            self._say(f"{done}, {how} as undisturbed")
            return
        self.entries.append(entry)
        phase = next(iter(entry.phases.values()), entry.moment)
        again = "" if entry.training_after_s is None else f"; trains again after {entry.training_after_s:.1f} s"
        repeated = f", {entry.updates_repeated} updates repeated" if entry.updates_repeated else ""
        where = f"step {max(entry.at_step, 0)}, {phase}"
        line = f"{entry.fault:3} {entry.time} {entry.course:<12} {entry.kind}: {entry.did} ({where})"
        self._say(f"{line}\n    -> {shorten(entry.handled, 150)}{again}{repeated}")

    def time_is_over(self) -> bool:
        """Whether no further fault is to come."""
        return self._time_is_over()


class _Play:
    """One run of a round."""

    def __init__(self, soak: Soak, played: Round, run: Run, reference: Reference) -> None:
        self._soak, self._round, self._run, self._reference = soak, played, run, reference
        self._attempt: Attempt | None = None
        self._open: list[tuple[Entry, float]] = []  # faults after which it has not trained yet, and when they came
        self._trains = False
        self._logged = 0  # the last update in the log
        self._resumes_at = 0
        self._to_say: list[str] = []
        self._faults = 0

    def through(self, pending: list[Fault]) -> None:
        """Takes faults off ``pending`` until there are none, or until the run is done; then compares it."""
        try:
            while pending and not self._soak.time_is_over():
                self._soak.now = pending[0]
                if not self._one(pending[0]):
                    break
                pending.pop(0)
            self._to_the_end()
        except BaseException:
            self._give_up()
            raise

    def _one(self, fault: Fault) -> bool:
        """One fault; False if the run is done before."""
        if fault.moment == DOWN:
            if not self._bring_down(fault):
                return False
            self._damage(fault)
            return True
        attempt = self._up()
        if fault.moment == STARTUP and self._trains:
            attempt = self._again(attempt)
        if fault.moment == STARTUP:
            self._somewhere_in_startup(fault, attempt)
        elif not self._await(fault, attempt):
            return False
        entry = self._entry(fault, attempt)
        began = monotonic()
        try:
            outcome = inject(fault, self._run, attempt)
        except OverError:
            return False
        self._after(entry, outcome, began)
        return True

    # --- up and down

    def _up(self) -> Attempt:
        if self._attempt is None:
            valid = self._run.valid()
            self._resumes_at = step_of(valid[-1]) if valid else 0
            self._attempt, self._trains = self._run.start(), False
            for entry, _ in self._open:
                entry.attempts.append(self._attempt.log.name)
        return self._attempt

    def _again(self, attempt: Attempt) -> Attempt:
        """Starts it anew, for a fault in its first seconds: kill -9 of everything is the quickest way."""
        self._look(attempt)
        attempt.kill()
        self._attempt = None
        return self._up()

    def _bring_down(self, fault: Fault) -> bool:
        """Ends it with at least two whole checkpoints; False if it is done before."""
        while self._attempt is not None or len(self._run.valid()) < _LEAST_CHECKPOINTS:
            attempt = self._up()
            if not self._await_training(attempt):
                return False
            enough = self._more_steps(fault, attempt)
            if not attempt.wait_for("checkpoints", lambda: len(self._run.valid()) >= _LEAST_CHECKPOINTS) or not enough:
                return False
            self._look(attempt)
            attempt.kill()
            self._attempt = None
        return True

    def _await(self, fault: Fault, attempt: Attempt) -> bool:
        if not self._await_training(attempt) or not self._more_steps(fault, attempt):
            return False
        found = fault.moment not in (SAVE, EVALUATION) or attempt.await_phase(fault.moment)
        return found and attempt.code is None

    def _more_steps(self, fault: Fault, attempt: Attempt) -> bool:
        until = attempt.step() + fault.gap
        return attempt.wait_for(f"step {until}", lambda: attempt.step() >= until) and attempt.code is None

    def _somewhere_in_startup(self, fault: Fault, attempt: Attempt) -> None:
        """From the launcher's first imports to the first window."""
        random = fault.random()
        random.random()
        place = random.choice(("launcher", "imports", "joining", "preparing"))
        if fault.kind == "kill a rank" and place == "launcher":
            place = "imports"
        if place == "launcher":
            sleep(random.uniform(0, 3))
            return
        attempt.wait_for("the ranks", lambda: len(attempt.ranks()) == attempt.world)
        if place == "imports":
            sleep(random.uniform(0, 3))
        elif attempt.world > 1:
            attempt.wait_for(place, lambda: attempt.phases() or attempt.step() > 0)

    def _await_training(self, attempt: Attempt) -> bool:
        """Waits until it trains; notes when, and that it has lost nothing. False if it has ended."""
        if self._trains:
            return attempt.code is None
        began_at = self._resumes_at
        if not attempt.wait_for("training", lambda: attempt.step() > began_at):
            if attempt.code:
                raise SoakError(f"it does not train again: exit code {attempt.code}, {attempt.err}")
            return False
        self._trains = True
        first = self._first_new_step(began_at)
        if first != began_at + 1:
            raise SoakError(f"resumed at step {first}, not after the newest whole checkpoint, of step {began_at}")
        for words in self._to_say:
            if words not in attempt.err:
                raise SoakError(f"the next start does not say {words!r}, but {attempt.err!r}")
        self._to_say = []
        self._close()
        return True

    def _first_new_step(self, resumed: int) -> int:
        lines = (self._run.folder / "metrics.jsonl").read_bytes().splitlines()
        steps = [json.loads(line)["step"] for line in lines[: resumed + 1]]
        return int(steps[resumed]) if steps == list(range(1, resumed + 2)) else -1

    # --- faults

    def _damage(self, fault: Fault) -> None:
        entry, began = self._entry(fault, None), monotonic()
        self._after(entry, damage(fault, self._run), began)

    def _entry(self, fault: Fault, attempt: Attempt | None) -> Entry:
        if attempt is not None:
            self._look(attempt)
        return Entry(
            fault=fault.number,
            kind=fault.kind,
            moment=fault.moment,
            round=self._round.number,
            course=self._round.course.name,
            time=f"{datetime.now().astimezone():%H:%M:%S}",
            at_step=self._logged if attempt is None else attempt.step(),
            phases={} if attempt is None else attempt.phases(),
            attempts=[attempt.log.name] if attempt else [],
        )

    def _after(self, entry: Entry, outcome: Outcome, began: float) -> None:
        self._faults += 1
        entry.did, entry.handled, entry.exit_code = outcome.did, outcome.handled, outcome.code
        if outcome.ended and self._attempt is not None:
            self._look(self._attempt)
        self._to_say += outcome.next_says
        if not outcome.ended:
            entry.training_after_s = round(monotonic() - began, 1)
            self._soak.note(entry)
            return
        entry.down_s = round(monotonic() - began, 1)
        self._attempt = None
        self._run.world = outcome.world or self._run.world
        self._open.append((entry, began))

    def _look(self, attempt: Attempt) -> None:
        self._to_say = [words for words in self._to_say if words not in attempt.err]  # it need not have trained
        if attempt.step() > 0:
            self._run.worlds.add(attempt.world)
            self._logged = attempt.step()

    def _close(self) -> None:
        """It trains again: the faults before it are over."""
        for number, (entry, began) in enumerate(self._open):
            entry.training_after_s = round(monotonic() - began, 1)
            entry.resumed_at = self._resumes_at
            if number == 0:  # one that repeats updates is enough
                entry.updates_repeated = max(0, self._logged - self._resumes_at)
            self._soak.note(entry)
        self._open = []

    # --- the end

    def _to_the_end(self) -> None:
        attempt = self._up()
        self._await_training(attempt)
        code = attempt.end(_LONG_S)
        self._look(attempt)
        self._close()
        if code:
            raise SoakError(f"the run has ended with {code}: {attempt.err}")
        worlds, own = self._run.worlds, self._round.course.worlds[0]
        bounds = self._reference.bounds(worlds, own)
        for problem in problems(self._run.folder, self._reference.result, bounds, damaged=self._run.damaged):
            raise SoakError(problem)
        self._soak.note(
            Compared(
                round=self._round.number,
                course=self._round.course.name,
                worlds=sorted(worlds),
                bitwise=bounds == Bounds(),
                allowed=asdict(bounds),
                found=asdict(distances(read(self._run.folder), self._reference.result)),
                faults=self._faults,
                starts=len(self._run.attempts),
            )
        )
        shutil.rmtree(self._run.attempts[0].log.parent)

    def _give_up(self) -> None:
        for entry, _ in self._open:
            self._soak.note(entry)
        for attempt in self._run.attempts:
            attempt.kill()
        if self._run.folder.exists():
            with suppress(shutil.Error):  # of files that W&B has just removed
                shutil.copytree(self._run.folder, self._soak.out / "failed", dirs_exist_ok=True)


def summary(entries: list[Entry], compared: list[Compared], minutes: float) -> str:
    """The table at the end: Markdown."""
    lines = ["| fault | times | handled | updates repeated | seconds until it trained again, median and most |"]
    lines += ["|---|---|---|---|---|"]
    for kind in dict.fromkeys(sorted(entry.kind for entry in entries)):
        own = [entry for entry in entries if entry.kind == kind]
        times = sorted(entry.training_after_s for entry in own if entry.training_after_s is not None)
        repeated = sum(entry.updates_repeated for entry in own)
        seconds = f"{times[len(times) // 2]:.1f}, {times[-1]:.1f}" if times else "-"
        lines.append(f"| {kind} | {len(own)} | {len(own)} | {repeated} | {seconds} |")
    bitwise = sum(one.bitwise for one in compared)
    starts = sum(one.starts for one in compared)
    ends = f"{bitwise} bitwise as undisturbed, {len(compared) - bitwise} on changing numbers of ranks within the bound"
    whole = (
        f"{len(entries)} faults in {minutes:.1f} minutes, {starts} starts, {len(compared)} runs to their end: {ends}"
    )
    return "\n".join([*lines, "", f"{whole}. Nothing lost."])
