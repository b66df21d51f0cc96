"""Who is named for a hang, how long a phase may take, and what is no hang."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from distaccum.distributed import watchdog
from distaccum.distributed.activity import Phase
from distaccum.distributed.watchdog import FIRST, FLOOR_S, Sign, Watchdog, explain
from distaccum.distributed.world import World
from tests.support.commands import until

HERE = "this"
SIGN = Sign(
    number=1,
    host="other",
    pid=1,
    window=6,
    step=6,
    phase=Phase.COUNTING.value,
    done=0,
    quiet_s=9.0,
    code="distributed/world.py:80 in all_reduce_host",
    collective="all_reduce",
    debugged=False,
    children="",
)
FORWARD = replace(SIGN, phase=Phase.FORWARD.value, collective="", code="mine/model.py:3 in forward")


def test_a_rank_that_gives_no_sign_is_named_and_who_waits_for_it() -> None:
    said = explain({0: SIGN, 1: replace(SIGN, window=5)}, {0}, 2, HERE)
    assert said.startswith(
        "rank 1 (process 1 on other) gives no sign of life; it was last seen in the count's all-reduce"
    )
    assert said.endswith("; rank 0 is in the count's all-reduce of window 7 (step 6)")
    assert explain({0: SIGN}, {0}, 2, HERE).startswith("rank 1 has never given a sign of life; ")


def test_a_rank_that_works_on_is_named_before_those_that_wait_even_if_it_has_got_as_far() -> None:
    said = explain({0: replace(SIGN, phase=Phase.REDUCTION.value), 1: FORWARD, 2: SIGN}, {0, 1, 2}, 3, HERE)
    assert said.startswith("rank 1 stands still in a forward of window 7 (step 6), at mine/model.py:3 in forward; ")


def test_a_rank_in_a_collective_of_its_own_is_told_from_those_in_the_count() -> None:
    alone = replace(SIGN, window=5, phase=Phase.BETWEEN.value, code="mine/train.py:12 in log")
    said = explain({0: alone, 1: SIGN}, {0, 1}, 2, HERE)
    assert said.startswith(
        "rank 0 waits in all_reduce(), which the other ranks have not called, in logging or a callback after window 5 "
        "(step 6), at mine/train.py:12 in log; "
    )


def test_ranks_that_all_wait_in_one_place_accuse_nobody() -> None:
    said = explain({0: SIGN, 1: SIGN}, {0, 1}, 2, HERE)
    assert said.startswith("all ranks wait for each other: ranks 0, 1 are in the count's all-reduce of window 7")


def _watchdog(
    world: World, folder: Path, timeout: float | None, hangs: list[str], told: Callable[[], str] = str
) -> Watchdog:
    half_an_hour = timedelta(minutes=30)
    return Watchdog(world, timeout=timeout, group_timeout=half_an_hour, on_hang=hangs.append, folder=folder, told=told)


def test_the_first_of_a_kind_may_take_ten_times_as_long_and_later_ones_ten_times_the_longest(tmp_path: Path) -> None:
    world = World(rank=0, size=1, device=torch.device("cpu"))
    dog, activity = _watchdog(world, tmp_path, None, []), world.activity
    most = 0.8 * 30 * 60

    def pause(seconds: float, *, window: int, phase: Phase) -> None:
        dog._since -= seconds
        activity.window, activity.phase = window, phase
        dog._look(time.monotonic())

    assert dog.limit() == min(FIRST * FLOOR_S, most)
    pause(100, window=0, phase=Phase.FORWARD)
    pause(100, window=0, phase=Phase.REDUCTION)
    assert dog.limit() == min(FIRST * FLOOR_S, most)  # the first window compiles
    pause(1, window=1, phase=Phase.FORWARD)
    assert dog.limit() == FLOOR_S
    pause(50, window=2, phase=Phase.FORWARD)
    assert dog.limit() == pytest.approx(500, rel=0.01)
    pause(1, window=2, phase=Phase.SAVE)
    assert dog.limit() == min(FIRST * FLOOR_S, most)
    pause(400, window=2, phase=Phase.BETWEEN)
    pause(0, window=2, phase=Phase.SAVE)
    assert dog.limit() == most  # the group's own timeout is longer
    stated = _watchdog(world, tmp_path, 60.0, [])
    assert stated.limit() == 600


@pytest.mark.parametrize("phase", [Phase.COUNTING, Phase.REDUCTION, Phase.RECORD])
def test_once_a_run_is_told_to_leave_a_meeting_that_lasts_is_a_hang_in_seconds(tmp_path: Path, phase: Phase) -> None:
    world = World(rank=0, size=1, device=torch.device("cpu"))
    told: list[str] = []
    dog = _watchdog(world, tmp_path, None, [], told=lambda: "".join(told))
    for window in range(6):
        world.activity.window, world.activity.phase = window, Phase.LOADING
        dog._look(time.monotonic())
    world.activity.phase = phase
    dog._look(time.monotonic())
    assert dog.limit() == FLOOR_S
    told.append("SIGTERM")
    assert dog.limit() == 10


def test_once_a_run_is_told_to_leave_a_stopped_rank_is_a_hang_in_seconds_in_the_first_window_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun kills all ranks 30 s after its SIGTERM, and nobody is left who could say why."""
    monkeypatch.setattr(watchdog, "_TOLD_S", 0.3)
    store, hangs, told = HashStore(), list[str](), list[str]()
    world, other = (World(rank=rank, size=2, device=torch.device("cpu"), store=store) for rank in range(2))
    dog = _watchdog(world, tmp_path, 20.0, hangs, told=lambda: "".join(told))
    monkeypatch.setattr(dog, "_leave", lambda: None)
    with subprocess.Popen(["sleep", "60"]) as process:  # noqa: S607
        own = _watchdog(other, tmp_path, 20.0, [])._sign(closely=False)
        store.set("watchdog/1", json.dumps(asdict(replace(own, pid=process.pid))))
        process.send_signal(signal.SIGSTOP)
        try:
            with dog:
                time.sleep(1.5)
                assert not hangs  # nobody has told it to leave
                told.append("SIGTERM")
                until(lambda: hangs, 15)
        finally:
            process.kill()
    assert hangs[0].startswith(f"rank 1 (process {process.pid} on ")
    assert "is stopped (SIGSTOP, or Ctrl-Z); " in hangs[0]
    assert hangs[0].endswith("after SIGTERM")


@pytest.mark.parametrize("what", ["the other rank works", "the loop works", "a debugger"])
def test_what_is_no_hang(tmp_path: Path, what: str) -> None:
    store, hangs = HashStore(), list[str]()
    worlds = [World(rank=rank, size=2, device=torch.device("cpu"), store=store) for rank in range(2)]
    for world in worlds:  # the first window is done
        world.activity.phase = Phase.STEP
    dogs = [_watchdog(world, tmp_path / "hang", 0.3, hangs) for world in worlds]
    with dogs[0], dogs[1]:
        for dog, world in zip(dogs, worlds, strict=True):
            world.activity.window = 1
            dog._look(time.monotonic())
            assert dog.limit() == 0.3
        moves: dict[str, Callable[[], object]] = {
            "the other rank works": lambda: _work(worlds[1:]),
            "the loop works": lambda: _work(worlds),
            "a debugger": lambda: _debug(1.0),
        }
        moves[what]()
    assert not hangs
    assert not (tmp_path / "hang").exists()


def _work(worlds: list[World]) -> None:
    for _ in range(20):
        time.sleep(0.05)
        for world in worlds:
            world.activity.done += 1


def _debug(seconds: float) -> None:
    exec(compile("import time; time.sleep(seconds)", "/somewhere/pdb.py", "exec"), {"seconds": seconds})  # noqa: S102
