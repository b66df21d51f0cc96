"""A gloo group that no collective ever blocks in: who waits asks meanwhile whether all are still there.

Gloo tells the neighbours of a dead process that it is gone, by the closed connection, and leaves everybody else to wait
for the timeout. Here each operation is started on gloo's own threads and polled, and a word from outside, that a member
is lost, ends the wait. Then the group is of no use: every connection of this process is closed, so that nothing
arrives any more in a tensor that the next group uses, and that those who wait for this process learn of it at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Lock, Thread
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]  # public, not marked as exported

from distaccum.errors import ConfigError, DistaccumError

NAME = "polled"
"""What ``init_process_group`` and ``get_backend_config`` call it."""

# Gloo's own timeout closes the group, however well all are: who waits decides here, by `lost` and `limit_s`.
_NEVER = timedelta(days=30)
_ASKS_AFTER_S, _ASKS_OFTEN_FOR_S, _ASKS_SELDOM_S = 0.01, 0.25, 0.02  # limits are looked at after the second
_SHORTEST_S, _LONGEST_S = 5e-5, 2e-3  # between two looks at an operation
_DRAIN_S = 60.0  # gloo's threads end within milliseconds of the connections' end, unless the machine is overloaded
_UNTOLD_S = 5.0  # far longer than they compute between two steps of an operation
_CLOSES, _TIMED_OUT = timedelta(milliseconds=1), "Timed out"
_UNUSED_TAG = 2_147_480_021
_NEVER_AWAITED = 32  # operations, of which those that are done are looked for then
_LIMIT = "elastic.expel_after"
_OF_CONNECTIONS, _DOUBTS_S = ("gloo/transport/", "Application timeout", "onnection"), 3.0
_TO_ONE, _UNTOLD = ("send", "recv", "recv_anysource"), ("reduce_scatter", "_reduce_scatter_base")  # see _InThread


class ViewChangedError(DistaccumError):  # what happened, not what is wrong
    """The group is of no use any more: a member is gone, or another view is to be decided."""

    @property
    def overdue(self) -> bool:
        """Whether a member took too long, and is not known to be gone; of the text, which is all that C++ passes on."""
        return _LIMIT in str(self)


class _Waits:
    """One wait: how long until the next look, and when to ask whether all are there."""

    def __init__(self) -> None:
        self._begun = self._asked = monotonic()

    @property
    def seconds(self) -> float:
        return monotonic() - self._begun

    def sleep(self) -> None:
        sleep(min(_LONGEST_S, max(_SHORTEST_S, self.seconds / 8)))

    def asks(self) -> bool:
        """Whether it is time to ask; it then counts as asked."""
        now = monotonic()
        often = now - self._begun < _ASKS_OFTEN_FOR_S
        if now - self._asked < (_ASKS_AFTER_S if often else _ASKS_SELDOM_S):
            return False
        self._asked = now
        return True


class _InThread:
    """An operation of which gloo can tell only by blocking whether it is done."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._done, self._error = inner, Event(), list[Exception]()
        Thread(target=self._wait, daemon=True, name="distaccum-waits").start()

    def _wait(self) -> None:
        try:
            self._inner.wait()
        except Exception as error:  # it is raised where somebody waits
            self._error.append(error)
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self) -> None:
        self._done.wait()
        if self._error:
            raise self._error[0]

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([])
        return future

    def source_rank(self) -> int:
        return int(self._inner._source_rank())


class _PolledWork(dist.Work):
    """One operation of a :class:`PolledGroup`, which sets the attributes: a constructor would be a call more."""

    _group: PolledGroup
    _inner: Any

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Until the operation is done.

        Raises:
            ViewChangedError: it will not be, or ``timeout`` is over.
        """
        group, inner = self._group, self._inner
        is_completed, pause, begun = inner.is_completed, _SHORTEST_S, monotonic()
        asks_at = begun + _ASKS_AFTER_S
        while not is_completed():  # written out: a look is calls of C, and none of Python's
            if group._failure is not None:
                raise ViewChangedError(group._failure)
            now = monotonic()
            if now > asks_at:  # one call, or two in a wait that is long
                if now - begun > _ASKS_OFTEN_FOR_S:
                    group._ask(now - begun, timeout.total_seconds() or None)
                    asks_at = now + _ASKS_SELDOM_S
                elif reason := group.lost():
                    raise group._fail(reason)
                else:
                    asks_at = now + _ASKS_AFTER_S
            sleep(pause)
            pause = pause * 1.25 if pause < _LONGEST_S else _LONGEST_S
        try:
            inner.wait()
        except RuntimeError as error:
            if not group._tells_of_a_loss(error):
                raise
            raise group._fail(_words(error)) from error
        group._started.discard(inner)
        return True

    def is_completed(self) -> bool:
        """Whether :meth:`wait` returns, or raises, at once."""
        return self._inner.is_completed() or self._group.failure is not None

    def is_success(self) -> bool:
        return self.exception() is None

    def exception(self) -> Exception | None:
        """Why a completed operation has failed."""
        try:
            self.wait()
        except ViewChangedError as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return list(self._inner.get_future().value())

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return int(self._inner.source_rank())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Of the result. Whoever waits for it in C++, as DDP's reducer does, gets a ``RuntimeError`` with the reason.

        Its callbacks run in the group's own thread, and must not wait for another future of the group.
        """
        # A future fails in C++ only by an error in what comes `then`: `set_exception` gives the error as a value.
        trigger: torch.futures.Future[Any] = torch.futures.Future()
        future = trigger.then(lambda _: self.result())
        self._group._watch(self._inner, trigger)
        return future


class _Works(dist.Work):
    """Several operations of one call."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works])


def _operation(name: str) -> Any:
    """A method that starts gloo's operation of this name: one call of Python's, which all collectives come by."""

    def start(group: PolledGroup, *given: Any, **named: Any) -> dist.Work:
        begin = getattr(group._inner, name, None)
        if begin is None:
            raise ConfigError("torch", torch.__version__, f"its gloo has no {name}", "Use torch 2.8 or later.")
        with group._lock:
            if group._failure is not None:
                raise ViewChangedError(group._failure)
            try:
                inner = begin(*given, **named)
            except RuntimeError as error:
                if name not in _TO_ONE:  # nothing is sent yet: it is the caller's own mistake
                    raise
                failed = error
            else:
                inner = _InThread(inner) if name in (*_TO_ONE, *_UNTOLD) else inner
                if len(group._started) >= _NEVER_AWAITED:
                    group._forget_completed()
                group._started.add(inner)
                work = _PolledWork()
                work._group, work._inner = group, inner
                return work
        raise group._fail(_words(failed)) from failed

    start.__name__ = name
    return start


class PolledGroup(ProcessGroup):
    """A process group over gloo of which every wait ends when a member is lost; see the module.

    Make one by :func:`form_group`. After one failure all that is asked of it raises :class:`ViewChangedError` at once.

    Args:
        inner: gloo's group of ``size`` ranks, of which this is ``rank``.
        store: of this group alone.
        lost: why a member is known to be gone, or an empty string. Called while something waits, from several threads.
        limit_s: how long one operation may take, now; None: as long as nobody is lost.
    """

    def __init__(
        self,
        inner: Any,
        store: Store,
        rank: int,
        size: int,
        *,
        lost: Callable[[], str],
        limit_s: Callable[[], float | None],
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the one without a store is not in the stubs
        self._inner, self.store, self._rank, self._ranks = inner, store, rank, size
        self.lost, self.limit_s = lost, limit_s
        self._name = ""
        self._failure: str | None = None
        self._started, self._lock = set[Any](), Lock()  # what is awaited goes as it is done
        self._watched, self._watching = list[tuple[Any, torch.futures.Future[Any]]](), False

    @property
    def failure(self) -> str | None:
        """Why the group is of no use any more; None while it is."""
        return self._failure

    @contextmanager
    def changes(self) -> Iterator[None]:
        """Turns errors of torch's in the block, of which the failed group is the cause, into :class:`ViewChangedError`.

        DDP's reducer, autograd and ``Future.wait`` pass on the text of an error and not its type.
        """
        try:
            yield
        except RuntimeError as error:
            if self._failure is None:
                raise
            raise ViewChangedError(self._failure) from error

    def leave(self) -> None:
        """No more operations. Of those that run nothing is written into a tensor after this.

        Where nothing runs the connections stay open until the object is freed, which does not block: closed at once,
        they would take from a slower member what it has still to read of the last operation.
        """
        with self._lock:
            self._forget_completed()
            if self._failure is None:
                self._failure = "this process has left the group"
                if self._started:
                    self._close()

    def release(self) -> None:
        """Frees gloo's group, its connections and its threads, which are all idle once the group is left.

        For when everybody has left it, as is known once a later group has formed.
        """
        self.leave()
        self._inner = None

    def check(self) -> None:
        """Asks once whether all are there.

        Raises:
            ViewChangedError: the group is of no use any more.
        """
        if self._failure is None:
            reason = self.lost()
            if reason:
                raise self._fail(reason)
        if self._failure is not None:
            raise ViewChangedError(self._failure)

    def getBackendName(self) -> str:  # noqa: N802  # torch's C++ asks by this name
        return NAME

    _get_backend_name = name = getBackendName

    def getGroupName(self) -> str:  # noqa: N802
        """By which torch's device meshes and functional collectives find the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def shutdown(self) -> None:
        """What ``destroy_process_group`` calls."""
        self.leave()

    def abort(self) -> None:
        self.leave()

    # Torch's operations, with its own arguments; each returns its work at once.
    allreduce = _operation("allreduce")
    allreduce_coalesced = _operation("allreduce_coalesced")
    reduce = _operation("reduce")
    broadcast = _operation("broadcast")
    allgather = _operation("allgather")
    allgather_coalesced = _operation("allgather_coalesced")
    _allgather_base = _operation("_allgather_base")
    gather = _operation("gather")
    scatter = _operation("scatter")
    reduce_scatter = _operation("reduce_scatter")
    _reduce_scatter_base = _operation("_reduce_scatter_base")
    alltoall = _operation("alltoall")
    alltoall_base = _operation("alltoall_base")
    barrier = _operation("barrier")
    send = _operation("send")
    recv = _operation("recv")
    recv_anysource = _operation("recv_anysource")
    # torch 2.13's names of the three; its functions use either.
    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base

    # What functional collectives call, by which a DTensor becomes whole; gloo's Python class has neither.

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *_: Any) -> dist.Work:
        return _Works([self._allgather_base(*pair) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, *options: Any) -> dist.Work:
        return _Works([self._reduce_scatter_base(*pair, *options) for pair in zip(outputs, inputs, strict=True)])

    # The names of torch before 2.13.
    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced

    def _tells_of_a_loss(self, error: RuntimeError) -> bool:
        """Whether gloo's error comes of a lost member; else it is the caller's own, as a type that gloo cannot add.

        Gloo has one type for both. Where its words leave a doubt, somebody who is lost is known to be so soon.
        """
        text, waits = str(error), _Waits()
        if any(word in text for word in _OF_CONNECTIONS) and "enforce fail" not in text:
            return True
        while self._failure is None and not (waits.asks() and self.lost()):
            if waits.seconds > _DOUBTS_S:
                return False
            waits.sleep()
        return True

    def _look(self, waits: _Waits) -> None:
        """As :meth:`_ask`, where it is time to."""
        if waits.asks():
            self._ask(waits.seconds)

    def _ask(self, waited_s: float, timeout_s: float | None = None) -> None:
        """Raises ViewChangedError where, by what is known now, a wait has no end."""
        reason = self.lost()
        limit_s = self.limit_s()
        limits = [each for each in (limit_s, timeout_s) if each is not None]
        if not reason and limits and waited_s > min(limits):
            reason = f"what another member owes has not come for {waited_s:.1f} s"
            if limit_s is not None and waited_s > limit_s:
                reason += f", and the others wait for {limit_s:g} s ({_LIMIT})"
        if reason:
            raise self._fail(reason)

    def _fail(self, reason: str) -> ViewChangedError:
        with self._lock:  # who comes second returns when the connections are closed
            if self._failure is None:
                self._failure = reason
                self._close()
        return ViewChangedError(self._failure)

    def _forget_completed(self) -> None:
        for each in list(self._started):
            if each.is_completed():
                self._started.discard(each)

    def _close(self) -> None:
        """Closes every connection, and waits until gloo's threads have let go of the tensors.

        A receive that times out closes all connections of its group, which gloo has no call for. A send that begins as
        its peer closes a connection is told of it only by its time-out: gloo's thread then waits for that, and has
        nothing to write any more. Its group is kept, as freeing it would wait, too.
        """
        self._peers_closed()
        begun = monotonic()
        while not all(each.is_completed() for each in list(self._started)):
            if monotonic() - begun > _UNTOLD_S and self._peers_closed():
                _STUCK.append(self._inner)
                break
            if monotonic() - begun > _DRAIN_S:
                _STUCK.append(self._inner)
                raise DistaccumError("gloo does not let go of the tensors of a group that is left; start again")
            sleep(_SHORTEST_S)
        self._started.clear()

    def _peers_closed(self) -> bool:
        """Has all connections closed, and says whether they were before."""
        closed = True
        for peer in range(self._ranks):
            if peer != self._rank:
                try:
                    self._inner.recv([torch.zeros(1)], peer, _UNUSED_TAG).wait(_CLOSES)
                except RuntimeError as error:  # a dead peer's says nothing of others
                    closed = closed and _TIMED_OUT not in str(error)
        return closed

    def _watch(self, inner: Any, trigger: torch.futures.Future[Any]) -> None:
        with self._lock:
            self._watched.append((inner, trigger))
            if self._watching:
                return
            self._watching = True
        Thread(target=self._watches, daemon=True, name="distaccum-futures").start()

    def _watches(self) -> None:
        """The thread that completes the futures; it ends when nobody has asked for one for a while."""
        waits, idle_since = _Waits(), monotonic()
        while True:
            with self._lock:
                failed = self._failure is not None
                ready = [each for each in self._watched if failed or each[0].is_completed()]
                self._watched = [each for each in self._watched if not any(each is done for done in ready)]
                left = bool(self._watched)
                if not left and not ready and (failed or monotonic() - idle_since > 1):
                    self._watching = False
                    return
            for _, trigger in ready:
                trigger.set_result(None)
            if ready:
                waits, idle_since = _Waits(), monotonic()
            elif left:
                try:
                    self._look(waits)
                except ViewChangedError:
                    continue
                except Exception as error:  # `lost` itself has failed: whoever waits must not wait on
                    self._fail(f"nobody can say whether all are there: {_words(error)}")
                    continue
            waits.sleep()


_STUCK: list[Any] = []  # groups that would block whoever frees them


def _words(error: Exception) -> str:
    """An error of gloo's on one line, without the file of its source and its advice."""
    text = " ".join(str(error).split()).partition(". This is typically")[0]
    return text.partition("] ")[2] if text.startswith("[/") else text


def form_group(
    store: Store,
    rank: int,
    size: int,
    *,
    lost: Callable[[], str],
    limit_s: Callable[[], float | None] | float | None = None,
    form_limit_s: float | None = None,
) -> PolledGroup:
    """Connects ``size`` processes, each of which calls this, and asks ``lost`` meanwhile.

    Args:
        store: used by this group alone: a ``PrefixStore`` that no other group has had.
        rank: of this process.
        size: how many there are.
        lost: as in :class:`PolledGroup`.
        limit_s: as in :class:`PolledGroup`, or one number for good.
        form_limit_s: how long the others may take to come here; None: as long as nobody is lost.

    Raises:
        ViewChangedError: somebody is lost, or has not come.
        ConfigError: this torch has no ``Store.clone``.
    """
    if not hasattr(store, "clone"):
        problem = "it has no Store.clone, by which gloo gets a connection of its own to the store"
        raise ConfigError("torch", torch.__version__, problem, "Use torch 2.8 or later.")
    waits = _Waits()

    def look(missing: str) -> None:
        if waits.asks():
            reason = lost()
            if not reason and form_limit_s is not None and waits.seconds > form_limit_s:
                reason = f"the group has not formed in {form_limit_s:g} s ({_LIMIT}){missing}"
            if reason:
                raise ViewChangedError(reason)
        waits.sleep()

    # All meet in the store first: gloo's own constructor then finds everybody's address, and blocks for as long as it
    # takes to connect. A client of the store that waits keeps every other thread from using it, so gloo has its own.
    here = [f"here/{each}" for each in range(size)]
    store.set(here[rank], "")
    while not store.check(here):
        look("; not all have come")
    connections, made, errors = store.clone(), list[Any](), list[Exception]()

    def connect() -> None:
        try:
            made.append(dist.ProcessGroupGloo(connections, rank, size, timeout=_NEVER))
        except Exception as error:  # it is raised where somebody waits
            errors.append(error)

    thread = Thread(target=connect, daemon=True, name="distaccum-connects")
    thread.start()
    while not made:
        if errors:
            raise ViewChangedError(_words(errors[0])) from errors[0]
        look("; a connection is missing")
    limit = limit_s if callable(limit_s) else lambda: limit_s
    return PolledGroup(made[0], store, rank, size, lost=lost, limit_s=limit)


class _Handed:
    """What torch's registry of backends makes groups with."""

    def __init__(self) -> None:
        self.group: PolledGroup | None = None
        self.excepthook = sys.excepthook

    def make(self, options: Any, _: Any) -> ProcessGroup:
        """The group that was formed to be the default one; else, for ``new_group``, one that asks as that one does."""
        if self.group is not None:
            made, self.group = self.group, None
            return made
        default = dist.group.WORLD
        if not isinstance(default, PolledGroup):
            raise ConfigError("backend", NAME, "only an elastic run has it", "Use gloo or nccl.")
        return form_group(
            options.store, options.group_rank, options.group_size, lost=default.lost, limit_s=default.limit_s
        )


_HANDED = _Handed()


def make_default(group: PolledGroup) -> None:
    """Makes ``group`` the default process group, in the place of any other, which is left.

    Raises:
        ConfigError: this torch does not take a group that is written in Python.
    """
    leave_default()
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _HANDED.make, extended_api=True, devices=["cpu"])
    _HANDED.group, _HANDED.excepthook = group, sys.excepthook
    try:
        # Every rank has its group by now: the store serves later groups, made by `new_group`, under the same prefix.
        dist.init_process_group(NAME, store=group.store, rank=group._rank, world_size=group._ranks, timeout=_NEVER)
    finally:
        _HANDED.group = None
    if dist.group.WORLD is not group:
        dist.destroy_process_group()
        problem = "it does not make a group written in Python the default group"
        raise ConfigError("torch", torch.__version__, problem, "Use another version, or a run that is not elastic.")


def leave_default() -> None:
    """Leaves the default process group, if there is one, and whatever groups are made of it, and waits for nobody."""
    if not dist.is_initialized():
        return
    dist.destroy_process_group()
    sys.excepthook = _HANDED.excepthook  # torch wraps it once more with each default group, and never takes it back
