from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from distaccum.checkpoint import store as module
from distaccum.checkpoint.files import write_text
from distaccum.checkpoint.store import CheckpointStore
from distaccum.distributed.world import World


def _save(root: Path, step: int, world: World) -> None:
    CheckpointStore(root, keep=1).save(step, world, lambda folder: (folder / "state.json").write_text("{}") and None)


@pytest.mark.parametrize("late", [False, True])
def test_a_process_that_slept_before_it_wrote_names_what_another_has_saved(
    gloo_world: World, tmp_path: Path, late: bool
) -> None:
    """The other process takes the run over within the first one's last write, before or after the file is written."""
    writes = 0

    def sleeps(path: Path, text: str) -> None:
        nonlocal writes
        writes += 1
        if writes > 1:
            write_text(path, text)
            return
        if late:
            write_text(path, text)
        _save(tmp_path, 2, gloo_world)
        if not late:
            write_text(path, text)

    with patch.object(module, "write_text", sleeps):
        _save(tmp_path, 1, gloo_world)
    assert (tmp_path / "latest").read_text() == "step-2\n"
    assert not (tmp_path / "step-1").exists()
