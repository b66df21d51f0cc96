"""``windows.jsonl`` of several ranks and engines, and the command that compares two of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import QUIET, ROOT, TINY, run, succeed

RECORDED = (*TINY, *QUIET, "metrics.windows=true", "trainer.max_steps=4", "batch.global_size=10", "batch.micro_size=2")
SAYS = ROOT / "distaccum" / "__main__.py"


def _windows(folder: Path, *arguments: object, world: int) -> list[dict[str, Any]]:
    succeed(*RECORDED, *arguments, f"hydra.run.dir={folder}", world=world, DS_ACCELERATOR="cpu")
    return [json.loads(line) for line in (folder / "windows.jsonl").read_text().splitlines()]


@pytest.mark.heavy
def test_ranks_and_engines_record_the_same_window(tmp_path: Path) -> None:
    """Ten samples are fives on two ranks, and cut into other micro-batches than on one; eight are not."""
    base = _windows(tmp_path / "base", world=1)
    assert [line["micro_batches"] for line in base] == [5] * 4
    even = _windows(tmp_path / "even", "batch.global_size=8", world=1)
    split = _windows(tmp_path / "split", "batch.global_size=8", world=2)
    for key in ("ids", "cut", "contents", "micro_batches"):
        assert [line[key] for line in split] == [line[key] for line in even], key
    cells = {
        "ddp": ("engine=ddp",),
        "zero1": ("engine=zero1", "precision=fp16"),
        "fsdp2": ("engine=fsdp2",),
        "deepspeed": ("engine=deepspeed", "engine.stage=1"),
    }
    for name, settings in cells.items():
        lines = _windows(tmp_path / name, *settings, world=2)
        for key in ("window", "step", "ids", "samples", "counts", "lr"):
            assert [line[key] for line in lines] == [line[key] for line in base], (name, key)
        assert lines[0]["cut"] != base[0]["cut"]
        exact = 1e-2 if name == "zero1" else 1e-5
        for line, expected in zip(lines, base, strict=True):
            assert list(line["norms"]) == list(expected["norms"]), name
            for parameter, norm in expected["norms"].items():
                assert line["norms"][parameter] == pytest.approx(norm, rel=exact), (name, parameter)
            assert sum(norm**2 for norm in line["norms"].values()) ** 0.5 == pytest.approx(line["grad_norm"], rel=1e-6)


def test_the_command_of_the_page(tmp_path: Path) -> None:
    """Two ranks, twice; then with another seed."""
    for name, seed in (("before", 1), ("after", 1), ("other", 2)):
        _windows(tmp_path / "runs" / name, f"seed={seed}", world=2)
    before, after, other = (f"runs/{name}" for name in ("before", "after", "other"))
    same = succeed("compare", before, after, script=SAYS, cwd=tmp_path)
    assert (same.stdout, same.stderr) == ("", "")
    differ = run("compare", before, other, script=SAYS, cwd=tmp_path)
    assert differ.returncode == 1
    assert "window 1 (epoch 0, update 1) is the first that differs\n  data             other samples" in differ.stdout
    assert "settings         seed: 1 in A, 2 in B" in differ.stdout
    found = json.loads(run("compare", before, other, "--json", script=SAYS, cwd=tmp_path).stdout)
    assert found["windows"]["difference"]["window"] == 1
    assert found["settings"] == {"seed": [1, 2]}
