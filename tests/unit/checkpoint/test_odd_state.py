"""State of unusual kinds: kept exactly, or refused before the run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from distaccum import Trainer
from distaccum.accumulation.progress import Progress
from distaccum.checkpoint import state, weights
from distaccum.checkpoint.store import CheckpointStore
from distaccum.checkpoint.tensors import TensorFiles
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.engines.factory import create_engine
from distaccum.engines.state import load_model_state, whole_state
from distaccum.errors import CheckpointError, ConfigError, MisuseError
from distaccum.tools import export
from tests.support.accumulators import Loss

KINDS = {
    "complex128": torch.complex128,
    "complex64": torch.complex64,
    "int16": torch.int16,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "bool": torch.bool,
}


class Counting(nn.Module):
    """Keeps what no parameter or buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[int] = []
        self.table = {"amax": torch.zeros(3)}

    def get_extra_state(self) -> Any:
        return {"history": self.history, "table": self.table}

    def set_extra_state(self, state: Any) -> None:
        self.history, self.table = state["history"], state["table"]

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(len(x))
        return x


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.counting = nn.Linear(3, 3), Counting()
        for name, dtype in KINDS.items():
            self.register_buffer(name, torch.zeros(2, 3, dtype=dtype))
        self.register_buffer("scalar", torch.zeros((), dtype=torch.complex128))
        self.register_buffer("nothing", torch.zeros(0, 2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return self.counting(self.linear(x))


class Lists(torch.optim.SGD):
    """An optimizer that keeps lists and dicts of tensors, as Shampoo and SOAP do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter].setdefault("factors", {"left": [], "steps": 0})
                kept["left"].append(parameter.grad.mean().clone())
                kept["steps"] += 1


def _engine(world: World, model: nn.Module, name: str = "ddp", optimizer: Any = torch.optim.SGD) -> Engine:
    return create_engine(model, optimizer(model.parameters(), lr=0.1), world, engine=name)


def _saved(folder: Path, world: World, engine: Engine) -> Path:
    run = state.RunState(progress=Progress(), position={}, wandb_id="", config={}, callbacks={})
    return CheckpointStore(folder, keep=0).save(
        1, world, lambda path: state.Part.of(engine, run, None, world).write(path)
    )


def _filled(model: Odd) -> Odd:
    generator = torch.Generator().manual_seed(3)
    for buffer in model.buffers():
        raw = torch.randint(0, 2, (buffer.nbytes,), generator=generator, dtype=torch.uint8)
        buffer.copy_(raw.view(buffer.dtype).reshape(buffer.shape))
    model.counting.history, model.counting.table = [3, 1, 4], {"amax": torch.tensor([0.1, 0.2, 0.3])}
    return model


def _same(a: nn.Module, b: nn.Module) -> bool:
    def content(model: nn.Module) -> dict[str, Any]:
        return {
            n: (t.dtype, t.shape, t.detach().reshape(-1).view(torch.uint8).tolist())
            for n, t in [*model.named_parameters(), *model.named_buffers()]
        }

    extra = [m.counting.get_extra_state() for m in (a, b)]  # type: ignore[union-attr, operator]
    return (
        content(a) == content(b)
        and extra[0]["history"] == extra[1]["history"]
        and torch.equal(extra[0]["table"]["amax"], extra[1]["table"]["amax"])
    )


@pytest.mark.parametrize("name", ["ddp", "zero1"])
def test_every_kind_of_buffer_and_extra_state_comes_back_bit_for_bit(
    name: str, gloo_world: World, tmp_path: Path
) -> None:
    saved = _filled(Odd())
    path = _saved(tmp_path, gloo_world, _engine(gloo_world, saved, name))
    other = Odd()
    assert not _same(saved, other)
    restored = _engine(gloo_world, other, name)
    state.restore(state.read(path), restored, gloo_world)
    assert _same(saved, other)
    third = Odd()
    weights.check(third, path, key="resume")
    weights.fill(third, path)
    assert _same(saved, third)


def test_a_state_dict_of_level_2_holds_it_too(gloo_world: World) -> None:
    saved, other = _filled(Odd()), Odd()
    _engine(gloo_world, other).load_state(whole_state(_engine(gloo_world, saved), gloo_world))
    assert _same(saved, other)


def test_an_export_names_what_a_plain_file_cannot_hold(gloo_world: World, tmp_path: Path) -> None:
    path = _saved(tmp_path / "all", gloo_world, _engine(gloo_world, Odd()))
    with pytest.raises(CheckpointError, match=r"safetensors has no type for torch\.complex128 \(.*complex128"):
        export.export(path, tmp_path / "weights.safetensors")
    assert not (tmp_path / "weights.safetensors").exists()


class Opaque(nn.Module):
    def get_extra_state(self) -> Any:
        return self

    def set_extra_state(self, state: Any) -> None: ...


def _with_buffer(buffer: Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 1))
    model[0].register_buffer("odd", buffer)
    return model


REFUSED = {
    "sparse": (lambda: _with_buffer(torch.eye(3).to_sparse()), r"0\.odd is torch\.sparse_coo, and a checkpoint holds"),
    "code": (lambda: nn.Sequential(nn.Linear(3, 1), Opaque()), r"1\._extra_state cannot be saved .*let it be tensors"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_saved_is_refused_before_the_run(case: str, tmp_path: Path) -> None:
    make, expected = REFUSED[case]
    data = [(torch.zeros(3), torch.zeros(1))] * 4

    with pytest.raises(ConfigError, match=expected):
        Trainer(make(), Loss(), data, global_batch_size=4, micro_batch_size=2, max_steps=1, run_dir=tmp_path)


@pytest.mark.parametrize("name", ["ddp", "zero1"])
def test_lists_of_an_optimizers_tensors_are_kept(name: str, gloo_world: World, tmp_path: Path) -> None:
    def steps(engine: Engine, n: int) -> None:
        for _ in range(n):
            with engine.micro_step(sync=True):
                engine.backward(engine.model(torch.ones(2, 3)).square().sum())
            engine.step()

    torch.manual_seed(0)
    first = _engine(gloo_world, nn.Linear(3, 2), name, Lists)
    steps(first, 2)
    path = _saved(tmp_path, gloo_world, first)
    second = _engine(gloo_world, nn.Linear(3, 2), name, Lists)
    state.restore(state.read(path), second, gloo_world)
    for engine in (first, second):
        steps(engine, 2)
    kept = [whole_state(engine, gloo_world) for engine in (first, second)]
    assert kept[0].optimizer.keys() == kept[1].optimizer.keys()
    assert any("factors" in name for name in kept[0].optimizer)
    for name_, tensor in kept[0].optimizer.items():
        assert torch.equal(tensor, kept[1].optimizer[name_])
    assert all(torch.equal(kept[0].model[n], kept[1].model[n]) for n in kept[0].model)


def test_what_an_optimizer_keeps_that_needs_code_is_named(gloo_world: World, tmp_path: Path) -> None:
    engine = _engine(gloo_world, nn.Linear(3, 2))
    optimizer = engine._optimizers[0]
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.state[parameter]["closure"] = object()
    with pytest.raises(MisuseError, match=r"the optimizer keeps a object \(closure\) of weight: only tensors, numbers"):
        _saved(tmp_path, gloo_world, engine)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("left_out", ["head.weight", "embed.weight"])
def test_one_name_of_a_tied_weight_is_enough(left_out: str, tmp_path: Path) -> None:
    """safetensors.torch.save_model and save_pretrained write one."""
    saved, file = Tied(), tmp_path / "model.safetensors"
    save_file({name: t.clone() for name, t in saved.state_dict().items() if name != left_out}, file)
    for path in (file, tmp_path):
        model = Tied()
        weights.check(model, path)
        weights.fill(model, path)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))
        assert model.head.weight is model.embed.weight
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(ConfigError, match=f"has no {left_out}"):
        weights.check(untied, file)


def test_two_values_for_a_tied_weight_are_refused(tmp_path: Path) -> None:
    """The one that was read last used to win in silence."""
    saved, file = Tied(), tmp_path / "model.safetensors"
    save_file({name: t.clone() + (name == "head.weight") for name, t in saved.state_dict().items()}, file)
    with pytest.raises(ConfigError, match=r"two values, embed\.weight and head\.weight, for what is one tensor"):
        weights.check(Tied(), file)


def test_initial_weights_may_leave_out_extra_state(tmp_path: Path) -> None:
    saved, file = Odd(), tmp_path / "model.safetensors"
    names = ("linear.weight", "linear.bias")
    model = nn.Sequential()
    model.linear, model.counting = nn.Linear(3, 3), Counting()  # type: ignore[assignment]
    save_file({name: saved.state_dict()[name] for name in names}, file)
    weights.check(model, file)
    weights.fill(model, file)
    assert torch.equal(model.linear.weight, saved.linear.weight)
    with pytest.raises(ConfigError, match=r"has no counting\._extra_state"):
        weights.check(model, file, key="resume")


@pytest.mark.parametrize(
    ("stored", "own", "fits"),
    [
        ("float64", "bfloat16", True),
        ("int32", "int64", True),
        ("float32", "int64", False),
        ("int64", "float32", False),
        ("complex64", "float32", False),
        ("bool", "int64", False),
        ("uint8", "bool", False),
    ],
)
def test_a_load_keeps_the_kind_of_a_number(
    stored: str, own: str, fits: bool, gloo_world: World, tmp_path: Path
) -> None:
    """A cast would cut 0.5 to 0; widths may differ."""
    model, file = nn.Linear(2, 2), tmp_path / "model.safetensors"
    model.register_buffer("extra", torch.ones(3, dtype=getattr(torch, own)))
    given = model.state_dict() | {"extra": torch.ones(3, dtype=getattr(torch, stored))}
    save_file(given, file)
    engine = _engine(gloo_world, model)
    if fits:
        weights.check(model, file)
        load_model_state(model, given)
        return
    with pytest.raises(ConfigError, match=r"has extra as (float|int|complex|bool), and the model as (float|int|bool)"):
        weights.check(model, file)
    with pytest.raises(CheckpointError, match=rf"extra is torch\.{stored} in the state, and torch\.{own} in the model"):
        engine.load_state(replace(whole_state(engine, gloo_world), model=given))


@pytest.mark.parametrize(("stored", "own", "value"), [("int64", "int32", 3e9), ("float32", "float16", 1e6)])
def test_a_load_into_a_narrow_type_keeps_the_number(stored: str, own: str, value: float, tmp_path: Path) -> None:
    model, file = nn.Linear(2, 2), tmp_path / "model.safetensors"
    model.register_buffer("extra", torch.ones(3, dtype=getattr(torch, own)))
    save_file(model.state_dict() | {"extra": torch.tensor([1, 2, value], dtype=getattr(torch, stored))}, file)
    with pytest.raises(ConfigError, match=rf"has numbers in extra that torch\.{own} does not hold\. Give the model"):
        weights.check(model, file)


def test_native_types_stay_readable_for_others(gloo_world: World, tmp_path: Path) -> None:
    path = _saved(tmp_path, gloo_world, _engine(gloo_world, Odd()))
    found = load_file(path / "model.safetensors")
    assert found["int16"].dtype is torch.int16
    assert found["float8_e4m3fn"].dtype is torch.float8_e4m3fn
    assert TensorFiles(path)["complex128"].dtype is torch.complex128


def test_a_tensor_in_two_files_of_a_folder_is_refused(tmp_path: Path) -> None:
    """The file that was read last used to win."""
    for number, file in enumerate(("model.safetensors", "model-00001-of-00001.safetensors")):
        save_file({"weight": torch.full((2, 2), float(number)), "bias": torch.zeros(2)}, tmp_path / file)
    with pytest.raises(ConfigError, match=r"has bias, which another file of the folder has too"):
        weights.check(nn.Linear(2, 2), tmp_path)


@pytest.mark.parametrize("name", ["ddp", "zero1"])
def test_state_of_another_optimizer_is_refused(name: str, gloo_world: World) -> None:
    """Its entries lay unused beside those that began anew."""
    first = _engine(gloo_world, nn.Linear(3, 2), name, torch.optim.AdamW)
    saved = whole_state(first, gloo_world)
    _engine(gloo_world, nn.Linear(3, 2), name, torch.optim.AdamW).load_state(saved)
    with pytest.raises(MisuseError, match=r"the state is that of AdamW, and it would be loaded into SGD"):
        _engine(gloo_world, nn.Linear(3, 2), name).load_state(saved)
