"""Data as users write them: each sample once an epoch, counted right, in exact windows; or one message on all ranks."""

from typing import Any

import pytest

from tests.distributed.workers.data_programs import GLOBAL, PROGRAMS, SAMPLES
from tests.support.answers import answer

pytestmark = pytest.mark.slow

FULL = [GLOBAL, GLOBAL, SAMPLES - 2 * GLOBAL]
EXACT = [name for name in PROGRAMS if name.startswith(("stream", "map"))]

# What rank 0 and rank 1 are told, and how many windows ran before.
SPLIT = "the streams of ranks 0 and 1 begin with the same items"
ORDER = "the ranks were given different data: sample 0 of rank 0 is not that of rank 1"
BEGUN = "the stream is an iterator, which yields its items once, and has begun"
GROWN = "the dataset holds 48 samples now, and held 44 at the start"
REFUSED: dict[str, tuple[str, str, int]] = {
    "bad stream: parts disagree": ("['x'] has 4 and ['boxes'] has 7: state it, as in DataSpec", "['boxes'] has 7", 0),
    "bad stream: not divided": (SPLIT, SPLIT, 0),
    "bad stream: pipeline not divided": (SPLIT, SPLIT, 0),
    "bad stream: not divided by worker": ("the 2 workers of the DataLoader begin with the same batch", "2 workers", 0),
    "bad stream: only empty batches": ("nothing but empty batches 1000 times in a row", "empty batches", 0),
    "bad stream: rank 1 fails": ("PeerError: rank 1: OSError: the connection of rank 1", "OSError: the connection", 1),
    "bad stream: None": ("the stream yielded None for a batch", "the stream yielded None for a batch", 2),
    "bad stream: datasets not split": ("not split over the 2 ranks", "split_dataset_by_node", 0),
    "bad map: rank 1 fails": ("PeerError: rank 1: OSError: the disk of rank 1 is gone", "OSError: the disk", 0),
    "bad map: rank 1 stalls": (
        "PeerError: rank 1: RuntimeError: DataLoader timed out after 1",
        "DataLoader timed out",
        0,
    ),
    "bad map: unsorted listing": (ORDER, ORDER, 0),
    "bad map: collate gives None": ("PeerError: rank 1: DataError: the collate", "the collate function gave None", 0),
    "bad map: other lengths": ("samples: differs between the ranks: 44 on rank 0, 43 on rank 1",) * 2 + (0,),
    "bad map: other orders": (ORDER, ORDER, 0),
    "bad map: divided before": (ORDER, ORDER, 0),
    "bad map: other shuffling": ("seed: differs between the ranks: none, as nothing is shuffled,",) * 2 + (0,),
    "bad map: other generators": ("seed: differs between the ranks: 0 on rank 0, 1 on rank 1",) * 2 + (0,),
    "bad: a stream on rank 1": ("a map-style dataset on rank 0, a stream on rank 1",) * 2 + (0,),
    "bad: cannot be planned on rank 1": (
        "PeerError: rank 1: ConfigError: loader=drop_last",
        "loader=drop_last=True",
        0,
    ),
    "bad: another global batch": ("batch.global_size: differs between the ranks: 16 on rank 0, 8",) * 2 + (0,),
    "bad: another seed": ("seed: differs between the ranks: 0 on rank 0, 1 on rank 1",) * 2 + (0,),
    "bad: resumed on rank 1 alone": ("window: differs between the ranks: 0 on rank 0, 1 on rank 1",) * 2 + (0,),
    "two epochs: an iterator": (BEGUN, BEGUN, 3),
    "two epochs: growing": (GROWN, GROWN, 3),
    "two epochs: grows on rank 1": (f"PeerError: rank 1: DataError: {GROWN}", f"DataError: {GROWN}", 3),
}


@pytest.fixture(scope="module")
def results() -> Any:
    return answer("data_programs", timeout=100)


def _is_exact(found: dict[str, Any], windows: list[int]) -> None:
    assert found["errors"] == [""] * len(found["errors"])
    taken = [i for window in found["windows"] for i in window]
    for begin in range(0, len(taken), SAMPLES):
        assert sorted(taken[begin : begin + SAMPLES]) == list(range(SAMPLES))
    assert [len(window) for window in found["windows"]] == windows
    for rank in range(len(found["errors"])):
        assert found["samples"][rank] == found["counts"][rank] == windows
    assert found["off"] <= 1e-6


@pytest.mark.parametrize("name", EXACT)
def test_every_sample_once_in_exact_windows(results: dict[str, Any], name: str) -> None:
    _is_exact(results[name], FULL)
    assert results[name]["warned"] == [[], []]


def test_a_stream_begins_again_in_every_epoch(results: dict[str, Any]) -> None:
    _is_exact(results["two epochs: stream"], FULL * 2)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_one_message_on_every_rank(results: dict[str, Any], name: str) -> None:
    *messages, ran = REFUSED[name]
    for message, said in zip(messages, results[name]["errors"], strict=True):
        assert str(message) in said
    assert len(results[name]["windows"]) == ran
    assert results[name]["off"] <= 1e-6  # the windows before were exact, and none came after


def test_no_program_is_left_out() -> None:
    assert {*EXACT, *REFUSED, "two epochs: stream"} == PROGRAMS.keys()


@pytest.mark.heavy
def test_one_rank_is_exact_too() -> None:
    for found in answer("data_programs", *EXACT, world=1, timeout=100).values():
        _is_exact(found, FULL)
