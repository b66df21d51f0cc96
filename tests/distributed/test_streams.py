"""Streams that hold different and unknown amounts by rank, and data as people have them: all once, exactly."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.workers import stream as stream_worker
from tests.support.answers import WORKERS, answer
from tests.support.commands import GOES_WRONG, ROOT, metrics, run, succeed
from tests.support.optional import needs
from tests.support.tokens import CHARACTERS, save_tokenizer, say


@pytest.fixture(scope="module")
def results() -> Any:
    return answer("stream", timeout=40)  # 20 s for each case


@pytest.mark.parametrize("way", ["accumulator", "counted afterwards", "trainer"])
@pytest.mark.parametrize("case", stream_worker.BATCHES)
def test_all_samples_once_an_epoch_in_exact_windows(results: dict[str, Any], case: str, way: str) -> None:
    windows = results[case][way]
    streams = [stream_worker.Stream(size, rank) for rank, size in enumerate(stream_worker.BATCHES[case])]
    held = [number for stream in streams for number in stream.numbers]
    half = len(windows) // 2
    for epoch in (windows[:half], windows[half:]):
        assert sorted(n for window in epoch for share in window["samples"] for n in share) == sorted(held)
        sizes = [sum(map(len, window["samples"])) for window in epoch]
        # Samples fill every window but the last; whole micro-batches leave out at most what one more would exceed.
        missing = 0 if way == "trainer" else stream_worker.MICRO_SIZE - 1
        assert all(stream_worker.GLOBAL_SIZE - missing <= size <= stream_worker.GLOBAL_SIZE for size in sizes[:-1])
        for window in epoch:
            expected = _truth([n for share in window["samples"] for n in share])
            found = torch.tensor(window["gradient"], dtype=torch.float64)
            assert float((found - expected).norm() / expected.norm()) <= 1e-6
    assert windows[:half] == windows[half:]  # the next epoch starts afresh


def _truth(numbers: list[int]) -> torch.Tensor:
    """The gradient of the window's mean: fp64, one process, the whole batch."""
    torch.manual_seed(0)
    model = torch.nn.Linear(stream_worker.WIDTH, 1).double()
    x = torch.stack([stream_worker.sample(n)["x"] for n in numbers]).double()
    loss = model(x).square().sum() / sum(n % 3 + 1 for n in numbers)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


KINDS = ("torchdata", "workers", "datasets", "datasets-shuffled", "loader", "bare")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Runs of 12 updates over 34 samples, two epochs and more: at once, and in two parts that meet inside an epoch."""
    whole, parts = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("parts")
    worker, kinds = WORKERS / "stateful.py", ",".join(KINDS)
    for folder, steps, resume in ((whole, 12, "never"), (parts, 7, "never"), (parts, 12, "auto")):
        succeed(folder, kinds, steps, resume, world=2, script=worker, PYTHONPATH=str(ROOT))
    return whole, parts


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_stream_goes_on_bitwise(folders: tuple[Path, Path], kind: str) -> None:
    whole, parts = (metrics(folder / kind) for folder in folders)
    assert [record["step"] for record in parts] == list(range(1, 13))
    for name in ("loss", "grad_norm", "samples", "epoch"):
        assert [record[name] for record in parts] == [record[name] for record in whole], name
    assert whole[-1]["epoch"] >= 2


# Chats, as the template writes them, and what is learned of each, by hand.
CHATS = [
    (say("u:Hi", "a:Hello you"), "[u]Hi;[a]Hello you;", "         ^^^^^^^^^^"),
    (say("u:a", "a:b", "u:a", "a:c"), "[u]a;[a]b;[u]a;[a]c;", "        ^^        ^^"),
    (say("s:be short", "u:why?", "a:x"), "[s]be short;[u]why?;[a]x;", "                       ^^"),
    (say("a:I begin", "u:go"), "[a]I begin;[u]go;", "   ^^^^^^^^      "),
    (say("u:count", "a:one two three"), "[u]count;[a]one two three;", "            ^^^^^^^^^^^^^^"),
    (say("u:q", "a:r"), "[u]q;[a]r;", "        ^^"),
]
LEARNED = {text: mark for _, text, mark in CHATS}
WEIGHTS = [0.0, 1.0, 5.0, 0.5, 0.0, 2.0, 2.0, 1.0, 0.25, 3.0, 1.0, 1.0, 0.0, 7.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0]


@pytest.fixture(scope="module", params=[1, 2])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("chats")
    save_tokenizer(folder)
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages, *_ in CHATS))
    given: dict[str, Any] = answer(
        "own_data", asked={"folder": str(folder), "weights": WEIGHTS}, world=request.param, timeout=100
    )
    return given


def _trained(samples: list[list[int]]) -> tuple[list[int], torch.Tensor]:
    """Ground truth, in fp64: windows of three chats, the mean over the answers' characters, and plain SGD."""
    table, counts = torch.zeros(len(CHARACTERS), len(CHARACTERS), dtype=torch.float64), list[int]()
    for begin in range(0, len(samples), 3):
        gradient, count = torch.zeros_like(table), 0
        for ids in samples[begin : begin + 3]:
            mark = LEARNED["".join(CHARACTERS[i] for i in ids)]
            for place, (last, own) in enumerate(pairwise(ids), 1):
                if mark[place] == "^":
                    gradient[last] += table[last].softmax(0)
                    gradient[last, own] -= 1
                    count += 1
        table -= gradient / count
        counts.append(count)
    return counts, table


@needs("transformers")
def test_the_mean_is_over_answers_on_any_ranks_and_micro_batches(found: dict[str, Any]) -> None:
    for one in found["chats"]:
        counts, table = _trained(one["samples"])
        assert one["counts"] == counts
        assert sum(counts) == sum(LEARNED["".join(CHARACTERS[i] for i in ids)].count("^") for ids in one["samples"])
        assert torch.linalg.norm(torch.tensor(one["weights"]) - table) <= 1e-6 * torch.linalg.norm(table)


def test_weights_draw_the_same_samples_on_any_ranks_and_after_a_resume(found: dict[str, Any]) -> None:
    first, other = found["drawn"]
    assert [len(window) for window in first] == [8, 8, 4] * 2
    assert other == first
    assert found["resumed"] == [first[2:], first[4:]]
    taken = np.bincount(np.concatenate(first), minlength=len(WEIGHTS))
    assert not taken[np.array(WEIGHTS) == 0].any()
    assert taken.max() > 1  # with replacement


def test_one_rank_prepares_data_and_the_others_find_them(tmp_path: Path) -> None:
    settings = [
        *GOES_WRONG,
        "model=cnn",
        "data._target_=tests.support.faulty_datasets.prepared",
        f"+data.folder={tmp_path}",
    ]
    settings += ["trainer.max_steps=1", f"hydra.run.dir={tmp_path / 'run'}"]
    done = run(*settings, world=2, PYTHONPATH=".")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made").read_text() == "0"
    failed = run(*settings, "+data.fails=no space", world=2, PYTHONPATH=".")
    assert failed.returncode == 2
    assert failed.stderr.count("OSError: no space") == 1
