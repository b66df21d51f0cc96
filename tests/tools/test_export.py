"""Weights taken out of a checkpoint: into one file, and as Hugging Face reads them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from distaccum.accumulation.progress import Progress
from distaccum.checkpoint import state, weights
from distaccum.checkpoint.store import CheckpointStore
from distaccum.config.engine import ENGINES, engine_config
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.errors import CheckpointError, ConfigError
from distaccum.functional import create_engine
from distaccum.tools import export
from tests.unit.checkpoint.test_weights_in import _bert, _llama, _t5


class Tied(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


def _saved(folder: Path, world: World, name: str) -> tuple[Path, Engine]:
    torch.manual_seed(4)
    model = Tied()
    engine = create_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), world, engine=engine_config(name))
    run = state.RunState(progress=Progress(), position={}, wandb_id="", config={}, callbacks={})
    store = CheckpointStore(folder, keep=0)
    return store.save(1, world, state.Part.of(engine, run, None, world).write), engine


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "deepspeed"])
def test_exported_weights_load_into_a_plain_model_and_into_a_run(name: str, gloo_world: World, tmp_path: Path) -> None:
    path, _ = _saved(tmp_path / "saved", gloo_world, name)
    file = tmp_path / "weights.safetensors"
    assert export.export(path, file) == 5
    torch.manual_seed(4)
    expected, plain, filled = Tied(), Tied(), Tied()
    plain.load_state_dict(load_file(file))
    for source in (file, path):
        weights.check(filled, source)
        weights.fill(filled, source)
        for model in (plain, filled):
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
            assert model.first.weight is model.second.weight
        with torch.no_grad():
            filled.first.weight.zero_()
    assert not list(tmp_path.glob(".*"))


def test_a_damaged_checkpoint_is_not_exported(gloo_world: World, tmp_path: Path) -> None:
    path, _ = _saved(tmp_path, gloo_world, "ddp")
    (path / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        export.export(path, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (nn.Linear(3, 3), r"has no weight and 1 more"),
        (Tied(width=4), r"has first\.weight of shape \[3, 3\], and the model of \[4, 4\]"),
        (nn.ModuleDict({"first": nn.Linear(3, 3)}), r"has scale and 2 more, which the model has not"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(
    model: nn.Module, problem: str, gloo_world: World, tmp_path: Path
) -> None:
    path, _ = _saved(tmp_path, gloo_world, "ddp")
    with pytest.raises(ConfigError, match=rf"^init_from=.*: .*{problem}"):
        weights.check(model, path)


def test_what_is_no_file_of_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no weights")
    for path in (tmp_path / "absent", tmp_path / "notes.txt", tmp_path):
        with pytest.raises(ConfigError, match=r"^init_from=.*Name a safetensors file") as refused:
            weights.check(nn.Linear(1, 1), path)
        assert str(refused.value).count(f"{path}: ") == 1


def test_a_checkpoint_that_is_not_there_is_told_beside_those_that_are(gloo_world: World, tmp_path: Path) -> None:
    path, _ = _saved(tmp_path, gloo_world, "ddp")
    with pytest.raises(CheckpointError, match=r"step-2: there is no such folder; beside it are step-1$"):
        export.export(path.with_name("step-2"), tmp_path / "out.safetensors")
    with pytest.raises(CheckpointError, match=r"absent/step-2: there is no such folder$"):
        export.export(tmp_path / "absent" / "step-2", tmp_path / "out.safetensors")


def test_the_command(gloo_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = _saved(tmp_path, gloo_world, "ddp")
    monkeypatch.setattr("sys.argv", ["distaccum export", str(path), str(tmp_path / "out.safetensors")])
    export.main()
    assert (tmp_path / "out.safetensors").exists()
    absent, none = [str(tmp_path / "absent"), "x"], [str(tmp_path), str(tmp_path / "x"), "--best"]
    for bad in (absent, none, [str(path), str(tmp_path / "nowhere" / "x")]):
        monkeypatch.setattr("sys.argv", ["distaccum export", *bad])
        with pytest.raises(SystemExit) as stop:
            export.main()
        assert stop.value.code == 2


def _checkpoint(model: nn.Module, folder: Path, world: World) -> Path:
    engine = create_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), world)
    run = state.RunState(progress=Progress(), position={}, wandb_id="", config={}, callbacks={})
    saved = CheckpointStore(folder, keep=0).save(1, world, state.Part.of(engine, run, None, world).write)
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
    assert export.export(saved, folder, max_shard_size="4KB", config_from=source) == len(model.state_dict())
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
    export.export(saved, halved, dtype="bf16", config_from=source)
    in_bf16 = type(model).from_pretrained(halved).state_dict()
    assert all(torch.equal(in_bf16[name], expected[name].bfloat16()) for name in expected)


TENSORS: dict[str, Tensor] = {"a": torch.ones(4), "b": torch.arange(3), "c": torch.ones(2, 8), "d": torch.ones(1)}


def _save(folder: Path, **options: Any) -> None:
    given: dict[str, Any] = {"dtype": None, "shard_bytes": 48, "source": None}
    export.save_folder(TENSORS, folder, **given | options)


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

    monkeypatch.setattr(export, "save_whole", full)
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
        export.export(saved, tmp_path / "out", max_shard_size="much")
    with pytest.raises(CheckpointError, match="is one file, and --config-from describes a folder"):
        export.export(saved, tmp_path / "out.safetensors", config_from=tmp_path)
    with pytest.raises(CheckpointError, match="holds no adapters: leave out --merge"):
        export.export(saved, tmp_path / "out", merge=True)
