"""The group that is polled: all that torch asks of it works, and none of its waits outlasts a member that is gone."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from distaccum.distributed.world import World
from distaccum.elastic.group.polled_group import (
    NAME,
    PolledGroup,
    ViewChangedError,
    form_group,
    leave_default,
    make_default,
)
from distaccum.engines.ddp.reducer import reduced_in_dtype
from tests.support.members import Notes, held, members

RANKS = 3


def _lost(store: Any) -> Any:
    """Asks for words as a membership does; any word is one too many."""
    return lambda: "a member is gone" if store.add("words", 0) else ""


def _default(store: Any, rank: int, size: int = RANKS, name: str = "group", **more: Any) -> PolledGroup:
    group = form_group(PrefixStore(name, store), rank, size, lost=_lost(store), **more)
    make_default(group)
    return group


def _operations(store: Any, name: str, notes: Notes) -> None:  # noqa: PLR0915  # one after the other
    rank = int(name)
    group = _default(store, rank)
    assert dist.get_backend_config() == f"cpu:{NAME}"
    assert dist.get_backend() == NAME
    world = World.join()
    assert (world.rank, world.size, world.host_group) == (rank, RANKS, None)
    assert world.all_reduce_host([rank, 1]) == [3, 3]
    assert world.all_reduce_max_host([rank]) == [2]
    assert world.all_gather_object({"rank": rank}) == [{"rank": each} for each in range(RANKS)]
    assert world.broadcast_str(f"from {rank}") == "from 0"
    rows = world.all_gather_rows(torch.full((rank, 2), float(rank)), range(RANKS))
    assert [each.tolist() for each in rows] == [[[float(r)] * 2] * r for r in range(RANKS)]
    world.barrier()
    dist.barrier()
    ones = torch.ones(1000)
    work = dist.all_reduce(ones, async_op=True)
    assert work is not None
    assert work.wait()
    assert work.is_completed()
    assert ones.eq(3).all()
    future = dist.all_reduce(ones, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    assert future.wait().eq(18).all()
    sizes = [0, 2, rank]  # to rank 0 nothing
    arriving = [[0, 0, 0], [2, 2, 2], [0, 1, 2]][rank]
    received = torch.empty(sum(arriving))
    work = dist.all_to_all_single(received, torch.full((2 + rank,), float(rank)), arriving, sizes, async_op=True)
    work.wait()
    assert received.tolist() == [float(r) for r in range(RANKS) for _ in range(arriving[r])]
    gathered = torch.empty(RANKS * 2)
    dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank)))
    assert gathered.tolist() == [0, 0, 1, 1, 2, 2]
    scattered = torch.empty(2)
    dist.reduce_scatter_tensor(scattered, torch.arange(6.0))
    assert scattered.tolist() == [6.0 * rank, 6.0 * rank + 3]
    dist.reduce_scatter(scattered, list(torch.arange(6.0).split(2)))
    assert scattered.tolist() == [6.0 * rank, 6.0 * rank + 3]
    box: list[Any] = [None] * RANKS
    dist.gather_object(rank, box if rank == 1 else None, dst=1)
    assert rank != 1 or box == [0, 1, 2]
    given: list[Any] = [None]
    dist.scatter_object_list(given, ["a", "b", "c"] if rank == 0 else None, src=0)
    assert given == ["abc"[rank]]
    token = torch.full((1,), float(rank))
    if rank == 0:
        dist.send(token, 1)
    elif rank == 1:
        dist.recv(token, 0)
        assert token.item() == 0
    began = time.perf_counter()
    for _ in range(200):
        dist.all_reduce(token)
    notes.write("speed", us=(time.perf_counter() - began) / 200 * 1e6)
    part = dist.new_group([0, 2])
    if rank != 1:
        both = torch.ones(1)
        dist.all_reduce(both, group=part)
        assert both.item() == 2
        assert dist.get_backend(part) == NAME
    with pytest.raises((RuntimeError, ValueError)):  # the caller's own mistake leaves the group as it is
        dist.all_reduce(torch.ones(1, dtype=torch.int16))
    assert group.failure is None
    for hook in (None, reduced_in_dtype(torch.bfloat16, RANKS)):
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.full((4, 8), 1.0 + rank)).sum().backward()
        grads = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        every = [torch.empty_like(grads) for _ in range(RANKS)]
        dist.all_gather(every, grads)
        assert torch.equal(every[0], every[1])
        assert grads.abs().sum() > 0
    before = sys.excepthook
    leave_default()
    assert not dist.is_initialized()
    assert before is not sys.excepthook
    again = _default(store, rank, name="again")
    dist.all_reduce(ones)
    assert again.failure is None
    dist.barrier()


def test_every_operation_of_distaccum_and_ddp_works(tmp_path: Path) -> None:
    with members(tmp_path) as started:
        for rank in range(RANKS):
            started.start(str(rank), _operations)
        assert started.join(60) == {str(rank): 0 for rank in range(RANKS)}, [
            started.notes(str(rank)).read() for rank in range(RANKS)
        ]
        print("an all-reduce of one number takes", started.notes("0").of("speed")[0]["us"], "us")


def _goes_on(store: Any, name: str, notes: Notes, when: str) -> None:
    """Rank 1 is killed; the others tell when they notice, and go on as a group of two."""
    rank = int(name)
    group = _default(store, rank, 3)
    large = torch.ones(4_000_000)
    model = DistributedDataParallel(torch.nn.Linear(300, 300))
    dist.all_reduce(large)
    if rank == 1 and when in ("before", "idle"):
        notes.write("dies")
        time.sleep(60)
    if when == "idle":
        time.sleep(0.5)  # it is dead before anything is asked
    try:
        with group.changes():
            while True:
                if rank == 1:
                    notes.write("dies")  # the test kills it now, in the midst of them
                if when == "backward":
                    model(torch.ones(2, 300)).sum().backward()
                else:
                    works = [dist.all_reduce(large, async_op=True) for _ in range(2)]
                    [work.wait() for work in works]
    except ViewChangedError as change:
        notes.write("noticed", text=str(change))
    began = time.perf_counter()
    with pytest.raises(ViewChangedError):
        dist.all_reduce(torch.ones(1))
    assert time.perf_counter() - began < 0.05
    still = large.clone()
    store.add("words", -store.add("words", 0))  # who was gone is not in the next group
    leave_default()
    _default(store, rank // 2, 2, "next")
    two = torch.ones(1)
    dist.all_reduce(two)
    notes.write("next", sum=two.item())
    assert torch.equal(still, large)
    group.release()
    dist.barrier()


@pytest.mark.parametrize(
    "when", ["inside", "backward", *(pytest.param(name, marks=pytest.mark.heavy) for name in ("before", "idle"))]
)
def test_the_survivors_of_a_kill_notice_it_and_go_on(tmp_path: Path, when: str) -> None:
    with members(tmp_path, say_gone=False) as started:
        for rank in range(RANKS):
            started.start(str(rank), _goes_on, when)
        started.await_notes("1", "dies", 1 if when in ("before", "idle") else 3)
        time.sleep(0.1)
        killed = started.signal("1")
        for name in ("0", "2"):
            noticed = started.await_notes(name, "noticed")[0]
            after = max(noticed["at"] - killed, 0)
            print(f"{when}: rank {name} noticed after {1000 * after:.1f} ms: {noticed['text']}")
            assert after < 2
            assert started.await_notes(name, "next")[0]["sum"] == 2
        assert started.ended("0", "2")


def _shards(store: Any, name: str, notes: Notes) -> None:
    """Tensors in shards become whole, and others; rank 1 is killed, and two go on with a mesh of the same name."""
    rank = int(name)
    group = _default(store, rank)
    mesh = init_device_mesh("cpu", (RANKS,))
    sharded = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)])
    assert sharded.full_tensor().tolist() == list(range(7))
    partial = DTensor.from_local(torch.arange(6.0), mesh, [Partial()])
    assert partial.redistribute(placements=[Shard(0)]).to_local().tolist() == [6.0 * rank, 6.0 * rank + 3]
    assert partial.redistribute(placements=[Replicate()]).to_local().tolist() == [3.0 * each for each in range(6)]
    notes.write("ready")
    if rank == 1:
        time.sleep(60)
    with pytest.raises(ViewChangedError), group.changes():
        sharded.full_tensor()
    store.add("words", -store.add("words", 0))
    leave_default()
    _default(store, rank // 2, 2, "next")
    again = distribute_tensor(torch.arange(5.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    assert again.full_tensor().tolist() == list(range(5))
    dist.barrier()


def test_sharded_tensors_become_whole_until_a_member_is_lost(tmp_path: Path) -> None:
    with members(tmp_path, say_gone=False) as started:
        for rank in range(RANKS):
            started.start(str(rank), _shards)
        for rank in range(RANKS):
            started.await_notes(str(rank), "ready")
        started.signal("1")
        assert started.ended("0", "2"), [started.notes(name).read() for name in ("0", "2")]


def _comes_late(store: Any, name: str, notes: Notes, how: str) -> None:
    """Rank 1 never comes; a word says that it is gone, or a limit ends the wait. Rank 2 comes when rank 0 has left."""
    rank = int(name)
    group = _default(store, rank, limit_s=(0.3 if how == "limit" else None))
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    if rank == 1:
        notes.write("silent")
        time.sleep(60)
    if rank == 2:
        store.wait(["left"])
    began = time.perf_counter()
    future = dist.all_reduce(tensor, async_op=True).get_future()
    with pytest.raises(ViewChangedError) as change, group.changes():
        future.wait()
    notes.write("noticed", text=str(change.value), seconds=time.perf_counter() - began)
    copy = tensor.clone()
    if rank == 0:
        store.set("left", "")
        time.sleep(0.5)
    assert torch.equal(copy, tensor)  # what came later was not written into it
    group.release()


@pytest.mark.parametrize("how", ["word", "limit"])
def test_a_silent_member_is_given_up_and_late_comers_learn_of_it(tmp_path: Path, how: str) -> None:
    with members(tmp_path, say_gone=False) as started:
        for rank in range(RANKS):
            started.start(str(rank), _comes_late, how)
        started.await_notes("1", "silent")
        time.sleep(0.5)
        if how == "word":
            assert not started.notes("0").of("noticed")
            started.say("1", "is gone")
        first, last = (started.await_notes(name, "noticed")[0] for name in ("0", "2"))
        print(first, last)
        assert ("has not come for 0.3" if how == "limit" else "a member is gone") in first["text"]
        assert ("elastic.expel_after" in first["text"]) == (how == "limit")
        assert last["seconds"] < 0.2
        assert started.ended("0", "2")


def _forms(store: Any, name: str, notes: Notes, how: str) -> None:
    rank = int(name)
    if rank == 1 and how == "before":
        notes.write("dies")
        time.sleep(60)
    if rank == 1:  # it has told that it is here, and does not connect
        PrefixStore("group", store).set("here/1", "")
        notes.write("dies")
        time.sleep(60)
    with pytest.raises(ViewChangedError) as change:
        _default(store, rank, form_limit_s=0.5 if how == "limit" else None)
    notes.write("noticed", text=str(change.value))
    assert not dist.is_initialized()


@pytest.mark.parametrize("how", ["before", "while", "limit"])
def test_a_group_that_cannot_form_is_left(tmp_path: Path, how: str) -> None:
    with members(tmp_path) as started:
        for rank in range(RANKS):
            started.start(str(rank), _forms, how)
        started.await_notes("1", "dies")
        time.sleep(0.3)
        killed = started.signal("1") if how != "limit" else time.monotonic()
        for name in ("0", "2"):
            noticed = started.await_notes(name, "noticed")[0]
            print(f"{how}: {1000 * (noticed['at'] - killed):.1f} ms: {noticed['text']}")
            assert ("has not formed" if how == "limit" else "is gone") in noticed["text"]
        assert started.ended("0", "2")


def _generations(store: Any, name: str, notes: Notes) -> None:
    rank, last = int(name), None
    for generation in range(12):
        group = _default(store, rank, 2, f"group/{generation}")
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(10), async_op=True).get_future().wait()
        if last is not None:
            last.release()
        last = group
        if generation in (3, 11):
            time.sleep(0.2)
            notes.write("held", fds=held("fd"), threads=held("task"))
        leave_default()


def test_generations_leave_nothing_behind(tmp_path: Path) -> None:
    with members(tmp_path) as started:
        for rank in range(2):
            started.start(str(rank), _generations)
        assert started.join() == {"0": 0, "1": 0}, [started.notes(each).read() for each in "01"]
        early, late = started.notes("0").of("held")
        print(early, late)
        assert (early["fds"], early["threads"] + 1) >= (late["fds"], late["threads"])


def test_nothing_is_registered_before_it_is_used() -> None:
    program = (
        "import torch.distributed as dist, distaccum.elastic.group.polled_group as polled;"
        "assert not hasattr(dist.Backend, polled.NAME.upper()) and polled.NAME not in dist.Backend.backend_list"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
