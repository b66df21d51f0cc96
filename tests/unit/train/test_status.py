"""What the live line says, computed by hand."""

import pytest
import torch

from distaccum.accumulation.progress import Progress
from distaccum.config.checks import size_of
from distaccum.distributed.activity import Phase
from distaccum.distributed.world import World
from distaccum.train.metrics import console
from distaccum.train.metrics.console import Status, clock_of
from distaccum.train.metrics.meter import Utilization
from distaccum.train.screen import TRAINING


class Run:
    """A run of 1000 updates of 4 samples and 40 tokens each, whose clock and progress a test moves."""

    def __init__(self, world: World, *, tokens: int = 40) -> None:
        self.now, self.waited, self.world, self._tokens = 0.0, 0.0, world, tokens
        self.progress = Progress()
        self.status = Status(1000, world, clock=lambda: self.now)
        self.status.follow(lambda: self.progress, lambda: self.waited, None)
        self.status.enter(TRAINING)
        self.text()

    def train(self, updates: int, *, each_s: float, waited_s: float = 0.0) -> str:
        for _ in range(updates):
            self.now += each_s
            self.waited += waited_s
            self.progress = self.progress.after(samples=4, tokens=self._tokens, applied=True, finite=True)
            self.text()
        return self.text()

    def text(self, columns: int = 200) -> str:
        return self.status.draw(columns)


@pytest.fixture
def world() -> World:
    return World(rank=0, size=1, device=torch.device("cpu"))  # which is asked for nothing but what it does


@pytest.fixture
def run(world: World) -> Run:
    return Run(world)


def test_rates_are_of_the_windows_after_the_first(run: Run) -> None:
    assert "tokens/s" not in run.train(1, each_s=600)  # compiles, and says nothing of the others
    text = run.train(10, each_s=0.5, waited_s=0.1)
    assert text.startswith("step 11/1,000  ")
    assert "  ETA 8:14  " in text  # 989 updates of half a second
    assert "  80 tokens/s  " in text
    assert "  data wait 20%" in text
    run.status.note_loss(0.123456)
    assert "  loss 0.1235  " in run.text()


def test_rates_follow_the_last_half_minute(run: Run) -> None:
    run.train(100, each_s=1)
    assert "  10 tokens/s" in run.train(20, each_s=4)
    assert "  ETA 22:04" in run.text()  # 880 updates of 1.504 s, as the 119 after the first took


def test_windows_that_become_known_at_one_moment_make_no_speed(run: Run) -> None:
    run.train(1, each_s=40)
    for _ in range(3):
        run.train(1, each_s=40)
        text = run.train(1, each_s=0.001)
    assert "  2 tokens/s" in text  # 40 tokens in 20 s


def test_two_windows_at_one_moment_are_too_few_for_a_speed(run: Run) -> None:
    run.train(1, each_s=40)
    assert "tokens/s" not in run.train(1, each_s=0.001)


def test_a_resumed_run_does_not_take_what_was_there_for_its_own_speed(run: Run) -> None:
    run.progress = Progress(step=500, window=500, samples=2000, tokens=20_000)
    run.status.follow(lambda: run.progress, lambda: 0.0, None)
    run.text()
    assert "tokens/s" not in run.train(1, each_s=600)
    assert "  40 tokens/s" in run.train(10, each_s=1)


def test_where_a_sample_is_what_counts_it_says_so(world: World) -> None:
    run = Run(world, tokens=4)
    assert "  8 samples/s" in run.train(10, each_s=0.5)


def test_evaluations_and_saves_are_no_part_of_the_rate_but_of_the_time_that_is_left(run: Run) -> None:
    run.train(11, each_s=1)
    run.status.enter("evaluating after step 11")
    run.now += 5
    run.text()
    run.status.enter(TRAINING)
    text = run.train(1, each_s=1)
    assert "  40 tokens/s" in text
    assert "  ETA 23:57" in text  # 988 updates: 11 took a second each, and the evaluation among them 5


def test_it_says_what_the_run_does(run: Run) -> None:
    run.train(11, each_s=1)
    run.status.enter("saving step 11")
    assert run.text().startswith("step 11/1,000  saving step 11  ETA ")
    run.now += 12
    assert run.text().startswith("step 11/1,000  saving step 11 (12 s)  ETA ")
    run.status.enter("evaluating after step 11")
    activity = run.world.activity
    activity.phase, activity.done, activity.total = Phase.EVALUATION, 3, 1200
    assert run.text().startswith("step 11/1,000  evaluating: 3/1,200 batches  ETA ")


def test_a_rollback_begins_the_rates_anew(run: Run) -> None:
    run.train(20, each_s=1)
    before, run.progress = run.progress, Progress(step=5, window=20, samples=80, tokens=800)
    assert "tokens/s" not in run.text()
    assert before.step == 20
    assert "  20 tokens/s" in run.train(10, each_s=2)


def test_what_does_not_fit_is_left_out_and_the_least_important_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "memory_of", lambda _: {"memory_bytes": 500 * 2**20})  # as wide on any machine
    run.train(11, each_s=1)
    run.status.note_loss(0.5)
    fields = ("step", "ETA", "loss", "tokens/s", "data wait", "RSS")
    seen = []
    for columns in range(20, 160):
        text = run.text(columns)
        assert len(text) <= columns
        assert text.startswith("step 11/1,000")
        seen.append([name for name in fields if name in text])
    assert seen[0] == ["step"]
    assert seen[60] == list(fields)
    assert "─" * 8 not in run.text(79)
    assert "  " + "─" * 30 + "  " in run.text(119)  # 1 % of it is less than a column
    assert run.text(79).count("  ") == 5


def test_the_utilization_is_of_the_last_windows(world: World) -> None:
    run = Run(world)
    run.status.follow(lambda: run.progress, lambda: 0.0, Utilization(1e12, peak=1e13, ranks=2))
    assert "  MFU 40.0%" in run.train(10, each_s=0.5)  # 8 samples/s of 1e12 operations, on two cards
    run.status.follow(lambda: run.progress, lambda: 0.0, Utilization(1e12, peak=None, ranks=2))
    assert "  4 TFLOP/s" in run.text()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (3599.6, "1:00:00"), (3723, "1:02:03"), (273_600, "3d 04:00")],
)
def test_time_as_a_clock_shows_it(seconds: float, text: str) -> None:
    assert clock_of(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (250 * 2**30, "250 GiB"),
        (2**53, "8192 TiB"),
    ],
)
def test_bytes_with_their_unit(count: float, text: str) -> None:
    assert size_of(count) == text
