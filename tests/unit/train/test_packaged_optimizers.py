"""``optim=schedule_free`` and ``optim=adamw8bit``, beside plain loops over whole batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor, nn

from distaccum import Accumulator, ConfigError, DataSpec, Trainer
from distaccum.config import instantiate
from distaccum.config.trainer import OptimConfig
from distaccum.distributed.world import World
from distaccum.engines.deepspeed.optimizer_state import check_rule
from distaccum.engines.state import whole_state
from distaccum.train.optimizer import build_optimizers
from tests.support.accumulators import Of
from tests.support.commands import ROOT
from tests.support.optional import Library
from tests.support.runs import settings
from tests.support.threads import run_ranks

schedulefree = Library("schedulefree")
bitsandbytes = Library("bitsandbytes")

GLOBAL, MICRO, UPDATES, WIDTH = 6, 2, 20, 64
Weights = dict[str, Tensor]
SETTINGS: Any = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def rows() -> Tensor:
    """Of 15: windows of 6, the third one ragged."""
    return torch.randn(15, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """The first matrix has 4,096 elements, from which on moments are in 8 bits."""
    model = nn.Sequential(nn.Linear(WIDTH, 64, bias=False), nn.Tanh(), nn.Linear(64, 1)).to(dtype)
    draws = torch.Generator().manual_seed(3)  # of its own: ranks that are threads have one global generator
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=draws, dtype=torch.float64) / 4 - 0.125)
    return model


def total(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch[:, :1].sin()).square().sum()


def optimizer_of(name: str, model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    settings: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "optim" / f"{name}.yaml"))
    settings["optimizer"] |= more
    (built,) = build_optimizers(OptimConfig(**settings | {"clip_norm": None, "lr": 1e-2}), model, torch.device("cpu"))
    return built


def loop(optimizer: Any, model: nn.Module) -> Weights:
    """One process, whole batches; the weights to evaluate."""
    data, done = rows().to(next(model.parameters()).dtype), 0
    while done < UPDATES:
        for begin in range(0, len(data), GLOBAL):
            batch = data[begin : begin + GLOBAL]
            if hasattr(optimizer, "train"):
                optimizer.train()
            optimizer.zero_grad()
            (total(model, batch) / len(batch)).backward()
            optimizer.step()
            done += 1
            if done == UPDATES:
                break
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return {name: p.detach().double() for name, p in model.named_parameters()}


def train(name: str, engine: str, world: World, micro: int = MICRO, dtype: torch.dtype = torch.float64) -> Weights:
    model = make_model(dtype)
    optimizer = optimizer_of(name, model, **({"warmup_steps": 3} if name == "schedule_free" else {}))
    sizes: Any = {"global_batch_size": GLOBAL, "micro_batch_size": micro}
    acc = Accumulator(model, optimizer, engine=engine, world=world, verify="never", **sizes)
    loader = torch.utils.data.DataLoader(list(rows().to(dtype)), batch_size=micro)
    while acc.progress.step < UPDATES:
        for window in acc.windows(loader):
            for batch in window:
                with acc.accumulate():
                    acc.backward(total(acc.model, batch.batch), len(batch.batch), reduction="sum")
            if acc.progress.step == UPDATES:
                break
    acc.use_evaluation_weights()
    weights = {name: weight.double().clone() for name, weight in whole_state(acc.engine, world).model.items()}
    acc.close()
    return weights


def off(found: Weights, truth: Weights) -> float:
    return max(float((found[name] - value).norm() / value.norm()) for name, value in truth.items())


@pytest.mark.parametrize("world", [1, 2])
def test_schedule_free_updates_are_those_of_one_process(world: int) -> None:
    model = make_model()
    truth = loop(schedulefree.AdamWScheduleFree(model.parameters(), warmup_steps=3, **SETTINGS), model)
    for found in run_ranks(world, lambda one: train("schedule_free", "ddp", one)):
        if isinstance(found, BaseException):
            raise found
        assert off(found, truth) < 1e-12


@pytest.mark.parametrize("engine", ["zero1", "fsdp2"])
def test_schedule_free_shares_are_refused_by_name(engine: str) -> None:
    for found in run_ranks(2, lambda one: train("schedule_free", engine, one)):
        assert isinstance(found, ConfigError)
        assert "AdamWScheduleFree" in str(found)


@pytest.mark.parametrize(("engine", "world"), [("ddp", 1), ("ddp", 2), ("zero1", 2), ("fsdp2", 2)])
def test_updates_in_8_bits_are_those_of_one_process(engine: str, world: int) -> None:
    """On one rank bit by bit. On two a gradient's last bit may choose the neighbour of an 8-bit value."""
    model = make_model(torch.float32)
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), **SETTINGS)
    truth = loop(optimizer, model)
    large = model[0].weight
    assert optimizer.state[large]["state1"].dtype is torch.uint8
    exact = make_model(torch.float32)
    moved = off(loop(torch.optim.AdamW(exact.parameters(), **SETTINGS), exact), truth)
    for found in run_ranks(world, lambda one: train("adamw8bit", engine, one, GLOBAL // world, torch.float32)):
        if isinstance(found, BaseException):
            raise found
        assert off(found, truth) <= (0.0 if world == 1 else 0.05 * moved)


def fit(name: str, run_dir: Path, steps: int, **more: Any) -> Weights:
    model = make_model(torch.float32)
    data = DataSpec(train=list(rows().float()), eval_dataset=list(rows().float()[:4]), description="rows")
    trainer = {"verify": "never", "max_steps": steps}
    config = settings((GLOBAL, MICRO), trainer, save=3, checkpoint={"keep": 0}, **more)
    Trainer(model, Of(total), data, optimizer=optimizer_of(name, model), config=config, run_dir=run_dir).fit()
    return load_file(run_dir / "checkpoints" / f"step-{steps}" / "model.safetensors")


@pytest.mark.parametrize("name", ["schedule_free", "adamw8bit"])
def test_a_resumed_run_is_bitwise_the_same(name: str, gloo_world: World, tmp_path: Path) -> None:
    whole = fit(name, tmp_path / "whole", 6)
    fit(name, tmp_path / "parts", 3)
    parts = fit(name, tmp_path / "parts", 6, resume="auto")
    assert all(torch.equal(parts[name], value) for name, value in whole.items())


def test_a_schedule_for_a_schedule_free_optimizer_is_refused(gloo_world: World, tmp_path: Path) -> None:
    cosine = {"schedule": {"_target_": "distaccum.train.schedules.Cosine", "warmup_steps": 1, "final_ratio": 0.1}}
    with pytest.raises(ConfigError, match=r"rate of AdamWScheduleFree, .* schedule=constant, and its own warm-up"):
        fit("schedule_free", tmp_path, 3, **cosine)
    fit("adamw8bit", tmp_path / "other", 3, **cosine)
    plateau = {"callbacks": {"plateau": {"_target_": "distaccum.train.callbacks.ReduceLROnPlateau"}}}
    evaluated = {"trainer": {"eval_every": 1, "verify": "never", "max_steps": 3}}
    with pytest.raises(ConfigError, match="ReduceLROnPlateau: changes the rate of AdamWScheduleFree"):
        fit("schedule_free", tmp_path, 3, **plateau, **evaluated)


def test_blocks_of_8_bits_are_not_cut() -> None:
    """A flat part of a parameter has other blocks, and less than 4,096 elements may have none."""
    model = make_model(torch.float32)
    with pytest.raises(
        ConfigError, match=r"AdamW8bit: its rule looks at more than one element, and DeepSpeed's stages"
    ):
        check_rule(optimizer_of("adamw8bit", model), dict(model.named_parameters()))
    check_rule(torch.optim.AdamW(model.parameters()), dict(model.named_parameters()))


def test_the_extra_is_named_where_its_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"no module named {name}")

    monkeypatch.setattr(instantiate, "get_object", missing)
    monkeypatch.setattr(instantiate, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"schedulefree.* Run .*pip install .*distaccum\[optimizers\]"):
        optimizer_of("schedule_free", make_model())
