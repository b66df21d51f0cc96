"""Who belongs to an elastic run, as its store says: words of who is gone, candidates, reports and decided views.

Keys of the store, all under the run's prefix:

- ``word-numbers``, ``word/<n>``, ``words``: who is gone, and how it ended. Numbered, set, then counted.
- ``candidates``, ``candidate-number/<n>``: who is ready to join, in the order it came.
- ``report/<g>/<member>``, ``reports/<g>``: how far a member of view ``g - 1`` was when it left; their number. The
  first one tells the other members that their group is of no use any more.
- ``view/<g>``: the members of generation ``g``. Whoever sets it first decides.
- ``group/<g>/``: what the members need to connect.

All but counters and ``group/<g>/`` are signed: see ``words.py``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock
from time import monotonic, sleep

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, not marked as exported

from distaccum.elastic.group.polled_group import PolledGroup, form_group, make_default
from distaccum.elastic.group.views import NEWCOMER, Report, View, propose
from distaccum.elastic.words import Words
from distaccum.errors import ConfigError, DistaccumError

_log = logging.getLogger(__name__)

_SHORTEST_S, _LONGEST_S = 1e-3, 2e-2  # between two looks at the store
_REPORTS = "reports/"


class ExpelledError(DistaccumError):  # what happened, not what is wrong
    """The others go on without this member: they have waited for it for too long, or the run has ended."""


class TooFewMembersError(DistaccumError):
    """Fewer members are left than the run goes on with, and nobody has come."""


class Membership:
    """One member's part in deciding who belongs to the run.

    Every method may be called from any thread; only :meth:`regroup` and :meth:`open_group` wait.

    Args:
        store: the run's, with nothing before its keys but the run's prefix. A connection of its own is opened to it.
        member: this process's id.
        expel_after_s: how long members that have reported wait for one that has not; the same for the group to form.
        least: the fewest members that go on.
        wait_for_least_s: how long fewer wait for candidates.
        limit_s: how long a collective may take, now; None: as long as nobody is lost.
        secret: of the job, by which words of strangers are left out.

    Raises:
        ConfigError: this torch has no ``Store.clone``.
    """

    def __init__(
        self,
        store: Store,
        member: str,
        *,
        expel_after_s: float = 60.0,
        least: int = 1,
        wait_for_least_s: float = 600.0,
        limit_s: Callable[[], float | None] | float | None = None,
        secret: str = "",
    ) -> None:
        if not hasattr(store, "clone"):
            problem = "it has no Store.clone, by which nobody who waits keeps others from the store"
            raise ConfigError("torch", torch.__version__, problem, "Use torch 2.8 or later.")
        self.member, self.expel_after_s, self.least = member, expel_after_s, least
        self.wait_for_least_s, self.limit_s = wait_for_least_s, limit_s
        self.told_to_leave: Callable[[], object] = bool
        """Whether this process is to save and leave, which fewer than ``least`` members do, too."""
        self._store = store.clone()
        self.words = Words(self._store, secret)
        """What the job's processes tell each other."""
        self._lock = RLock()
        self._gone, self._words_seen, self._words_read = dict[str, str](), 0, set[int]()
        self._candidates, self._ever, self._views = dict[int, str](), set[str](), 0
        self._left, self._has_lost_store = list[PolledGroup](), False

    def begin(self, members: Sequence[str]) -> View:
        """View 0, of the members that were started; any of them, or who starts them, may be the first to say it."""
        with _asking():
            return self._decide(View(generation=0, members=tuple(members)))

    def gone(self) -> Mapping[str, str]:
        """Who is known to be gone, and how it ended."""
        with self._lock, _asking():
            self._read_words()
            return dict(self._gone)

    def is_left_out(self) -> bool:
        """Whether the others go on without this member: it is said to be gone, or the newest view is without it."""
        with self._lock, _asking():
            self._read_words()
            newest = self._newest_view()
            is_out = newest is not None and self.member in self._ever and self.member not in newest.members
            return is_out or self.member in self._gone

    def lost(self, view: View) -> str:
        """Why the view's group is of no use any more, or an empty string: one of its members is gone, or has left."""
        try:  # written out: whoever waits in a collective asks this, again and again
            with self._lock:
                if self._has_lost_store:
                    return ""
                if self._store.add("words", 0) != self._words_seen:
                    self._read_words()
                for member in view.members:
                    if member in self._gone:
                        return f"member {member} {self._gone[member]}"
                if self._store.check([f"{_REPORTS}{view.generation + 1}"]):
                    return f"a member has left the group of generation {view.generation}"
        except dist.DistError as error:
            self._lose_store(error)
        return ""

    def _lose_store(self, error: Exception) -> None:
        """The group is whole without its store: this process goes on until it is told to save and leave."""
        self._has_lost_store = True
        _log.warning("%s: who is connected goes on, until its agent tells it to save and leave", _silent(error))

    def wishes(self) -> bool:
        """Whether a candidate waits to join."""
        return bool(self.waiting())

    def waiting(self) -> tuple[str, ...]:
        """The candidates that were in no view yet and are not known to be gone, in the order they came."""
        with self._lock, _asking():
            count = self._store.add("candidates", 0)
            for number in range(1, count + 1):
                if number not in self._candidates and self._store.check([f"candidate-number/{number}"]):
                    self._candidates[number] = self.words.get(f"candidate-number/{number}", str) or ""
            ordered = list(filter(None, (self._candidates[number] for number in sorted(self._candidates))))
            if all(member in self._ever or member in self._gone for member in ordered):
                return ()  # by what was known before, so that nothing more is asked while nobody waits
            self._read_words()
            self._newest_view()
            return tuple(member for member in ordered if member not in self._ever and member not in self._gone)

    def say_ready(self) -> None:
        """This process is a newcomer and can join: :meth:`regroup` without a view waits until the others take it in."""
        with _asking():
            number = self._store.add("candidates", 1)
            self.words.set(f"candidate-number/{number}", self.member)

    def regroup(self, view: View | None, report: Report) -> tuple[View, Mapping[str, Report]]:
        """Leaves ``view`` with a report, and waits until the next one is decided.

        Args:
            view: the view that is left, whose group was left before this; None for a newcomer, which waits to be named.
            report: of this member. A newcomer's first one is not sent: all know that it has no state.

        Returns:
            The next view, and the reports of its members; the same for all of them.

        Raises:
            ExpelledError: the next view is without this member, or later ones were decided meanwhile.
            TooFewMembersError: there are not as many as the run goes on with, and none has come.
        """
        with _asking():
            decided = self._named() if view is None else self._decided(view, report)
            latest = self._newest_view() or decided
            if latest.generation > decided.generation or self.member not in decided.members:
                raise ExpelledError(f"generation {latest.generation} goes on without member {self.member}")
            return decided, self._reports_of(decided)

    def open_group(self, view: View) -> PolledGroup:
        """Connects the view's members, and makes their group the default process group in the place of the last one.

        Raises:
            ViewChangedError: a member is gone, or has not come; the next view is to be decided.
            ConfigError: as :func:`~distaccum.elastic.group.polled_group.make_default`.
        """
        rank = view.rank_of(self.member)
        if rank is None:
            raise ExpelledError(f"generation {view.generation} goes on without member {self.member}")
        group = form_group(
            PrefixStore(f"group/{view.generation}", self._store),
            rank,
            len(view.members),
            lost=partial(self.lost, view),
            limit_s=self.limit_s,
            form_limit_s=self.expel_after_s,
        )
        make_default(group)
        with self._lock:
            left, self._left = self._left, [group]
        for each in left:  # everybody has left them, for all are in this one
            each.release()
        return group

    def _decided(self, view: View, report: Report) -> View:
        """What follows ``view``, decided by this member or by another."""
        generation, begun, short_since, warned = view.generation + 1, monotonic(), None, False
        already = self._view(generation)
        if already is not None:
            return already
        self.words.set(f"report/{generation}/{self.member}", report.to_json())
        self._store.add(_reports(generation), 1)
        reports, counted, pause = dict[str, Report](), 0, _SHORTEST_S
        while True:
            decided = self._view(generation)
            if decided is not None:
                return decided
            count = self._store.add(_reports(generation), 0)
            if count != counted:
                for member in {*view.members} - reports.keys():
                    if (said := self.words.get(f"report/{generation}/{member}", Report.from_json)) is not None:
                        reports[member] = said
                counted = count
            gone, candidates = self.gone(), self.waiting()
            expels = monotonic() - begun > self.expel_after_s
            least = 1 if self.told_to_leave() else self.least
            next_view = propose(view, reports, candidates, gone, expels=expels, least=least)
            if next_view is not None:
                for silent in {*view.members} - reports.keys() - gone.keys():
                    _log.warning("%s has been silent for %g s (elastic.expel_after)", silent, self.expel_after_s)
                return self._decide(next_view)
            complete = expels or all(member in reports or member in gone for member in view.members)
            short_since = (short_since or monotonic()) if complete else None
            if short_since is not None:
                there = [member for member in view.members if member in reports and member not in gone]
                few = f"{len(there)} of {len(view.members)} members are left, and {len(candidates)} wait to join"
                few += f"; the run goes on with {self.least} or more, one of which has its state"
                if monotonic() - short_since > self.wait_for_least_s:
                    raise TooFewMembersError(f"{few}, and nobody has come in {self.wait_for_least_s:g} s")
                if not warned and there[:1] == [self.member]:  # one of them says it
                    _log.warning("%s (elastic.min_ranks): waiting for others, %g s at most", few, self.wait_for_least_s)
                warned = True
            sleep(pause)
            pause = min(_LONGEST_S, pause * 1.3)

    def _named(self) -> View:
        """The view that names this newcomer, once there is one."""
        while True:
            newest = self._newest_view()
            if newest is not None and self.member in self._ever:
                return newest
            if self.words.get("ended", int) is not None:
                raise ExpelledError("the run has ended")
            sleep(_LONGEST_S)

    def _decide(self, view: View) -> View:
        """The view of that generation: this one, unless another was there before."""
        return self.words.first(f"view/{view.generation}", view.to_json(), View.from_json)

    def _view(self, generation: int) -> View | None:
        return self.words.get(f"view/{generation}", View.from_json)

    def _newest_view(self) -> View | None:
        """The last view that is decided, after a look at all that this member has not seen."""
        with self._lock:
            newest = self._view(self._views - 1) if self._views else None
            while (view := self._view(self._views)) is not None:
                self._ever.update(view.members)
                self._views, newest = self._views + 1, view
            return newest

    def _reports_of(self, view: View) -> Mapping[str, Report]:
        """A view is decided after the reports of all its members but the newcomers, who send none."""
        reports = dict[str, Report]()
        for member in view.members:
            said = self.words.get(f"report/{view.generation}/{member}", Report.from_json)
            reports[member] = said or Report(member=member, position=NEWCOMER)
        return reports

    def _read_words(self) -> None:
        words = self._store.add("words", 0)
        if words == self._words_seen:
            return
        for number in range(1, self._store.add("word-numbers", 0) + 1):
            if number not in self._words_read and self._store.check([f"word/{number}"]):
                self._words_read.add(number)
                if (word := self.words.get(f"word/{number}", _word)) is not None:
                    self._gone[word[0]] = word[1]
        self._words_seen = words


def _word(text: str) -> tuple[str, str]:
    said = json.loads(text)
    return str(said["member"]), str(said["how"])


def _reports(generation: int) -> str:
    return f"{_REPORTS}{generation}"


@contextmanager
def _asking() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise _silent(error) from error


def _silent(error: Exception) -> DistaccumError:
    """A store that does not answer has ended with the run: its process, or its node."""
    return DistaccumError(f"the store of the run does not answer: {' '.join(str(error).split())}")
