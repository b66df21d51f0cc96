"""Weights of a checkpoint as Hugging Face reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum.accumulation.progress import Progress
from distaccum.checkpoint import state, weights
from distaccum.checkpoint.store import CheckpointStore
from distaccum.distributed.world import World
from distaccum.errors import CheckpointError, ConfigError
from distaccum.functional import create_engine
from distaccum.tools import export as pretrained
from distaccum.tools.export import export
from tests.unit.checkpoint.test_weights_in import _bert, _llama, _t5


def _checkpoint(model: nn.Module, folder: Path, world: World) -> Path:
    engine = create_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
    run = state.RunState(progress=Progress(), position={}, wandb_id="", config={}, callbacks={})
    saved = CheckpointStore(folder, keep=0).save(
        1, world, partial(state.save, engine=engine, run=run, data=None, world=world)
    )
    engine.close()
    return saved


@pytest.mark.slow
@pytest.mark.parametrize("make", [_llama, _bert, _t5])
def test_from_pretrained_reads_the_same_weights(make: Callable[[], Any], gloo_world: World, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make()
    source = tmp_path / "source"
    model.config.save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    saved = _checkpoint(model, tmp_path / "checkpoints", gloo_world)
    folder = tmp_path / "exported"
    assert export(saved, folder, max_shard_size="4KB", config_from=source) == len(model.state_dict())
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert (folder / "tokenizer.json").exists()
    found = type(model).from_pretrained(folder).state_dict()
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    torch.manual_seed(1)
    again = make()
    assert weights.check(again, folder) == weights.Differences()
    weights.fill(again, folder)
    assert all(torch.equal(again.state_dict()[name], expected[name]) for name in expected)

    halved = tmp_path / "halved"
    export(saved, halved, dtype="bf16", config_from=source)
    in_bf16 = type(model).from_pretrained(halved).state_dict()
    assert all(torch.equal(in_bf16[name], expected[name].bfloat16()) for name in expected)


TENSORS: dict[str, Tensor] = {"a": torch.ones(4), "b": torch.arange(3), "c": torch.ones(2, 8), "d": torch.ones(1)}


def _save(folder: Path, **options: Any) -> None:
    given: dict[str, Any] = {"dtype": None, "shard_bytes": 48, "source": None}
    pretrained.save_folder(TENSORS, folder, **given | options)


def test_files_have_at_most_their_size_or_one_tensor(tmp_path: Path) -> None:
    _save(tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert index["weight_map"] == {"a": names[0], "b": names[0], "c": names[1], "d": names[2]}
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in TENSORS.values())}
    _save(tmp_path / "one", shard_bytes=1000)
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]


def test_a_folder_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, file: Path) -> None:
        if "00002" in file.name:
            raise OSError(28, "No space left on device", str(file))
        file.write_bytes(b"")

    monkeypatch.setattr(pretrained, "save_whole", full)
    with pytest.raises(OSError, match="No space left"):
        _save(tmp_path / "out")
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="is there: name another"):
        _save(tmp_path / "out")


def test_the_configuration_states_the_format_that_is_written(tmp_path: Path) -> None:
    source = tmp_path / "source"
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        _save(tmp_path / "out", source=source)
    source.mkdir()
    for before, key in (({"torch_dtype": "bfloat16", "n": 1}, "torch_dtype"), ({"n": 1}, "dtype")):
        (source / "config.json").write_text(json.dumps(before))
        _save(tmp_path / key, source=source, dtype=torch.float16)
        assert json.loads((tmp_path / key / "config.json").read_text()) == before | {key: "float16"}
    assert not (tmp_path / "out").exists()


def test_wrong_arguments_are_refused(gloo_world: World, tmp_path: Path) -> None:
    saved = _checkpoint(nn.Linear(2, 2), tmp_path / "checkpoints", gloo_world)
    with pytest.raises(ConfigError, match="--max-shard-size=much"):
        export(saved, tmp_path / "out", max_shard_size="much")
    with pytest.raises(CheckpointError, match="is one file, and --config-from describes a folder"):
        export(saved, tmp_path / "out.safetensors", config_from=tmp_path)
