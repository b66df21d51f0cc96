"""Data as people have them, on one rank and two: answers alone are learned, weights draw, one rank prepares first."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.answers import answer
from tests.support.commands import GOES_WRONG, run
from tests.support.optional import needs
from tests.support.tokens import CHARACTERS, save_tokenizer, say

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
