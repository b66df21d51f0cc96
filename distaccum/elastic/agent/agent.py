"""The agent of a node: it starts the workers, tells the others of every end, and starts the next lives.

One thread waits for the workers, for signals and for the next look at the store, so that an end is told within
milliseconds. The workers are the job; the agent decides nothing of theirs, but for what is over: a configuration that
cannot run, and a view of which nobody is left.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from time import monotonic, sleep

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # public, though not marked as exported

from distaccum.distributed.signals import LAUNCHER, leave_terminal
from distaccum.elastic.agent.board import Board
from distaccum.elastic.agent.heard import Heard
from distaccum.elastic.agent.lease import LEASE_S, Lease
from distaccum.elastic.agent.respawns import MOST_SHORT, SHORT_S, Respawns
from distaccum.elastic.agent.settings import Settings
from distaccum.elastic.agent.stall import STALL_S, StallGuard
from distaccum.elastic.agent.workers import Worker, how
from distaccum.errors import ConfigError

MEMBER, ELASTIC = "DISTACCUM_MEMBER", "DISTACCUM_ELASTIC"
"""The variables by which a worker knows that it is a member: its id, and where and how it meets the others (JSON)."""
BAD_CONFIGURATION = 2
_LOOK_S, _BEAT_S = 0.1, 1.0
_ONE_PRESS_S = 0.3  # a terminal and a wrapper may both pass on the same Ctrl-C
_EXPELLED_S = 5.0  # for a member that goes on without being in the view: it may be leaving
_LEAVE_S, _LEAVE_FAILED_S = 30.0, 5.0  # for workers of a job that has ended, well or not
_LEAVE_UNSEEN_S = 1.0  # for those that were in no view, and may still be starting
_PRESSED_S = 5.0  # after a second Ctrl-C, for their last words
_KILL_S = 10.0  # between SIGTERM and SIGKILL


class Agent:
    """One node's part of an elastic job.

    Args:
        settings: what it was told, with ``nproc`` known.
        store: the job's store.
        address: the store's host and port, as the workers reach it.
        command: what a worker runs.
        environment: what the workers' variables are added to.

    Raises:
        ConfigError: another agent is at work as this node, or the job has another shape than this agent was told.
    """

    def __init__(
        self,
        settings: Settings,
        store: TCPStore,
        address: tuple[str, int],
        command: Sequence[str],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._settings, self._address, self._command = settings, address, (*command, *settings.overrides)
        self._environment = dict(environment)
        self._board = Board(store, environment)
        self._check_shape()
        self._check_alone()
        self.why = ""
        """The reason of a job that has failed; empty where the workers have said it."""
        self.folder: tuple[str, str] | None = None
        """Where the reason is to stand, if nobody is left who could write it: path and owner's token."""
        self._lease = Lease(settings.nnodes, settings.node, self._board.beats)
        self._respawns = Respawns()
        self._workers: dict[int, Worker] = {}  # by descriptor
        self._poll = select.poll()
        self._gone: dict[str, str] = {}  # how each member has ended, in the order of the words
        self._seen: set[str] = set()  # who was in a view
        self._told, self._pressed_at, self._all_left_well = 0, 0.0, True
        self._deadline: float | None = None  # for the workers of a job that is over
        self._ended: int | None = None
        self._looked_at = self._beaten_at = float("-inf")

    def _check_shape(self) -> None:
        mine = (self._settings.nnodes, self._settings.nproc)
        shape = self._board.agree_shape(*mine)
        size = shape[0] * shape[1]
        if self._settings.least > size:
            problem = f"the job starts with {size} ranks, and could not go on"
            remedy = f"Give at most {size}, or start more processes"
            raise ConfigError("elastic.min_ranks", self._settings.least, problem, remedy)
        if shape != mine:
            problem = f"the job has {shape[0]} nodes of {shape[1]} processes, by the agent that came first"
            given = f"{mine[0]} x {mine[1]}"
            raise ConfigError("--nnodes x --nproc", given, problem, "Start all agents with the same numbers")

    def _check_alone(self) -> None:
        node = self._settings.node
        before, latest = self._board.beats(node), monotonic() + 3 * _BEAT_S
        while before and monotonic() < latest:
            if self._board.beats(node) != before:
                problem = "an agent with this number is at work in this job"
                raise ConfigError("--node-rank", node, problem, "Give each node its own")
            sleep(_LOOK_S)

    def run(self) -> int:
        """Starts the workers, and stays until the job or this node's part of it is over; returns the exit code."""
        guard = StallGuard(self._give_up)
        try:
            with Heard() as heard:
                self._poll.register(heard.descriptor, select.POLLIN)
                try:
                    self._begin()
                    while (code := self._turn(heard)) is None:
                        guard.turn()
                except DistError as error:
                    why = str(error).splitlines()[0]
                    _say(f"the store at {self._where()} is gone: {why}; the workers save and leave")
                    guard.close()
                    self._leave()
                    code = 1
                return code
        finally:
            guard.close()
            for worker in self._workers.values():
                worker.kill()

    def _leave(self) -> None:
        """Without a store: tells the workers, who are connected all the same, to save and leave, and waits for that."""
        latest = monotonic() + self._settings.grace_s
        for worker in self._workers.values():
            worker.tell(signal.SIGTERM)
        while self._workers and monotonic() < latest:
            for descriptor, _ in self._poll.poll(_LOOK_S * 1000):
                if descriptor in self._workers:
                    self._poll.unregister(descriptor)
                    self._workers.pop(descriptor).ended()

    def _begin(self) -> None:
        """The words of an agent that was here before and is not now: its workers have died with it."""
        self._board.beat(self._settings.node)
        self._look(monotonic())
        for local in range(self._settings.nproc):
            for life in range(1, self._board.lives(self._settings.node, local) + 1):
                member = f"{self._settings.node}.{local}.{life}"
                if member not in self._gone:
                    self._board.tell_gone(member, "has died with its agent")
        if self._ended is None:
            for local in range(self._settings.nproc):
                self._start(local)

    def _start(self, local: int) -> None:
        life = self._board.new_life(self._settings.node, local)
        member = f"{self._settings.node}.{local}.{life}"
        worker = Worker(member, local, self._command, self._environment | self._variables(local, member))
        self._workers[worker.descriptor] = worker
        self._poll.register(worker.descriptor, select.POLLIN)

    def _variables(self, local: int, member: str) -> dict[str, str]:
        """Torchrun's variables, by which torch is a client of the store, and a member's own."""
        settings, (host, port) = self._settings, self._address
        meeting = {
            "store": [host, port],
            "prefix": self._board.prefix,
            "least": settings.least,
            "expel_after_s": settings.expel_after_s,
            "rejoin": settings.rejoin,
            "node": settings.node,
        }
        numbers = {
            "RANK": settings.node * settings.nproc + local,
            "WORLD_SIZE": settings.nnodes * settings.nproc,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": settings.nproc,
            "GROUP_RANK": settings.node,
            "GROUP_WORLD_SIZE": settings.nnodes,
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            LAUNCHER: os.getpid(),
        }
        return {
            **{name: str(number) for name, number in numbers.items()},
            "MASTER_ADDR": host,
            "TORCHELASTIC_RUN_ID": self._board.run,
            "TORCHELASTIC_USE_AGENT_STORE": str(True),
            MEMBER: member,
            ELASTIC: json.dumps(meeting),
        }

    def _turn(self, heard: Heard) -> int | None:
        """Waits for what comes next, and does it; returns the exit code at the end."""
        due = self._respawns.next()
        wait_s = min(self._looked_at + _LOOK_S, due if due is not None else float("inf")) - monotonic()
        for descriptor, _ in self._poll.poll(max(0.0, wait_s) * 1000):
            if descriptor == heard.descriptor:
                for number in heard.new():
                    self._hear(number)
            else:
                self._note_end(self._workers.pop(descriptor))
        now = monotonic()
        if now - self._looked_at >= _LOOK_S:
            self._look(now)
            self._repeat()
            self._end_late_workers(now)
        if self._ended is None and not self._told:
            for local in self._respawns.due(now):
                self._start(local)
        return self._code()

    def _code(self) -> int | None:
        """The exit code, once nobody of this node is left and nobody is to come."""
        if self._workers:
            return None
        if self._ended is not None:
            return self._ended
        if self._told:
            code = 0 if self._all_left_well else 128 + self._told
            self._look(monotonic())  # of the last who leave, one ends the job
            return code
        return None

    def _note_end(self, worker: Worker) -> None:
        self._poll.unregister(worker.descriptor)
        ran_s, code = monotonic() - worker.began, worker.ended()
        self._read_end()
        self._all_left_well = self._all_left_well and code == 0
        if self._ended is not None:
            return
        self._board.tell_gone(worker.member, how(code))
        self._gone[worker.member] = how(code)
        if code == 0 or self._told:
            return
        self._follow(worker, code, ran_s)

    def _follow(self, worker: Worker, code: int, ran_s: float) -> None:
        """Sees to the place of a worker that has failed."""
        said = f"{worker.member} (process {worker.pid}) {how(code)}"
        is_first = worker.member.endswith(".1") and self._board.view.generation <= 0
        if code == BAD_CONFIGURATION:  # which the worker has said; another would say it, too
            if is_first:
                self._board.end(code, "")
                self._read_end()
            else:
                _say(f"{said}: its configuration cannot run, and its place stays empty")
        elif not self._settings.rejoin:
            _say(f"{said}; its place stays empty, as elastic.rejoin=false says")
        elif self._respawns.note(worker.local, ran_s, monotonic()):
            _say(f"{said}; another is started in its place")
        else:
            _say(f"{said} within {SHORT_S:.0f} s, as {MOST_SHORT} have in a row: its place is given up")

    def _look(self, now: float) -> None:
        """Reads what is new in the store, and counts this agent's seconds."""
        self._looked_at = now
        self._read_end()
        if self._ended is not None:  # the store may leave before the last worker does
            return
        for word in self._board.new_words():
            self._gone.setdefault(word.member, word.how)
        for view in self._board.new_views():
            self._seen |= set(view.members)
        for worker in self._workers.values():
            is_out = worker.member in self._seen and worker.member not in self._board.view.members
            if worker.kill_at is None and (is_out or worker.member in self._gone):
                _say(f"{worker.member} (process {worker.pid}) was left behind by the others, and has to leave")
                worker.kill_at = now + _EXPELLED_S
        if now - self._beaten_at >= _BEAT_S:
            self._beaten_at = now
            self._board.beat(self._settings.node)
            self._tell_silent(now)
        self._end_without_members()

    def _read_end(self) -> None:
        if self._ended is None and (ended := self._board.ended()) is not None:
            self._ended = ended
            self.why = self._board.why() if ended else ""

    def _tell_silent(self, now: float) -> None:
        for node in self._lease.silent(now):
            for member in {*self._board.view.members, *self._board.candidates()} - self._gone.keys():
                if member.split(".")[0] == str(node):
                    self._gone[member] = f"is on node {node}, whose agent has been silent for {LEASE_S:.0f} s"
                    self._board.tell_gone(member, self._gone[member])
                    _say(f"{member} {self._gone[member]}")

    def _end_without_members(self) -> None:
        """Ends the job where all of the newest view are gone: nobody has the weights any more."""
        members = set(self._board.view.members)
        if self._ended is not None or not members or not members <= self._gone.keys():
            return
        (first, *_) = (member for member in self._gone if member in members)
        if any(self._gone[member] == how(0) for member in members):  # which nobody does before the run is over
            code, why = 0, ""
        elif self._told:
            code, why = 128 + self._told, ""
        else:
            code, why = 1, f"no rank is left: first {first} {self._gone[first]}"
            self.folder = self._board.folder()
        self._board.end(code, why)
        self._read_end()

    def _hear(self, number: int) -> None:
        """Passes a signal on; after a second Ctrl-C the workers have no time to save."""
        now = monotonic()
        if number == signal.SIGHUP:
            leave_terminal()
        if number == signal.SIGINT:
            if 0 < self._pressed_at < now - _ONE_PRESS_S:
                self._set_deadline(now + _PRESSED_S)
            self._pressed_at = self._pressed_at or now
        self._respawns.drop()
        if not self._told:
            self._told = number
            self._set_deadline(now + self._settings.grace_s)
        for worker in self._workers.values():
            worker.has_been_told = number not in (signal.SIGUSR1, signal.SIGUSR2)
            if worker.has_been_told:
                worker.tell(number)
        self._repeat()

    def _repeat(self) -> None:
        """Tells those that had no handler yet."""
        for worker in self._workers.values():
            if self._told and not worker.has_been_told and worker.catches(self._told):
                worker.tell(self._told)
                worker.has_been_told = True

    def _set_deadline(self, at: float) -> None:
        self._deadline = at if self._deadline is None else min(at, self._deadline)

    def _end_late_workers(self, now: float) -> None:
        for worker in self._workers.values():
            if worker.kill_at is not None and now >= worker.kill_at:
                worker.kill()
        if self._ended is not None:
            self._respawns.drop()
            for worker in self._workers.values():
                if worker.kill_at is None and worker.member not in self._seen:  # it has nothing to save
                    worker.kill_at = now + _LEAVE_UNSEEN_S
            if self._deadline is None or not self._told:
                self._set_deadline(now + (_LEAVE_FAILED_S if self._ended else _LEAVE_S))
        if self._deadline is None or now < self._deadline:
            return
        for worker in self._workers.values():
            if self._ended is not None and worker.kill_at is None:
                worker.tell(signal.SIGTERM)
            worker.kill_at = worker.kill_at or now + (_KILL_S if self._ended is not None else 0)

    def _give_up(self) -> None:
        """The store has not answered for so long: called in another thread, while this one waits for it."""
        for worker in list(self._workers.values()):
            worker.kill()
        _say(f"the store at {self._where()} has not answered for {STALL_S} s, and the job is over")
        os._exit(1)

    def _where(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"


def _say(text: str) -> None:
    sys.stderr.write(f"distaccum: {text}\n")
    sys.stderr.flush()
