"""``optim=muon``: beside one process in fp64 whose rules are written out here."""

from collections.abc import Mapping
from functools import cache
from math import sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from distaccum import Accumulator
from distaccum.config.trainer import OptimConfig
from distaccum.distributed.world import World
from distaccum.engines.state import whole_state
from distaccum.models.gpt import GPT
from distaccum.train.optimizer import build_optimizers
from tests.support.commands import ROOT
from tests.support.threads import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="from torch 2.9 on")

VOCABULARY, LENGTH, GLOBAL, MICRO, UPDATES = 29, 8, 6, 2, 8
RATE, DECAY, MOMENTUM = 2e-2, 0.1, 0.95
ADAM_RATE, BETAS = 3e-3, (0.9, 0.95)
Weights = dict[str, Tensor]


def make_model() -> GPT:
    model = GPT(vocab_size=VOCABULARY, seq_len=LENGTH, n_layer=2, n_head=2, n_embd=16, dropout=0.0)
    draws = torch.Generator().manual_seed(3)  # of its own: ranks that are threads have one global generator
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02, generator=draws)
    return model


def rows() -> Tensor:
    """Of 15: windows of 6, the third one ragged."""
    return torch.randint(0, VOCABULARY, (15, LENGTH + 1), generator=torch.Generator().manual_seed(5))


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    settings: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "optim" / "muon.yaml"))
    return build_optimizers(OptimConfig(**settings | {"clip_norm": None}), model, torch.device("cpu"))


def train(engine: str, world: World) -> Weights:
    """The weights after some updates, and the samples in the order of the data."""
    model, data = make_model(), rows()
    acc = Accumulator(
        model,
        optimizers(model),
        global_batch_size=GLOBAL,
        micro_batch_size=MICRO,
        engine=engine,
        world=world,
        verify="never",
    )
    loader = DataLoader(TensorDataset(data[:, :-1], data[:, 1:]), batch_size=MICRO)
    while acc.progress.step < UPDATES:
        for window in acc.windows(loader):
            for micro in window:
                with acc.accumulate():
                    inputs, labels = micro.batch
                    total = F.cross_entropy(acc.model(inputs).flatten(0, 1), labels.flatten(), reduction="sum")
                    acc.backward(total, labels.numel(), reduction="sum")
            if acc.progress.step == UPDATES:
                break
    weights = whole_state(acc.engine, world).model
    acc.close()
    return {name.removeprefix("module."): weight.double() for name, weight in weights.items()}


def gradient(weights: Mapping[str, Tensor], batch: Tensor, dtype: torch.dtype) -> Weights:
    model = make_model().to(dtype)
    model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, strict=False)
    logits = model(batch[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def orthogonal(matrix: Tensor) -> Tensor:
    """K. Jordan's five Newton-Schulz steps (2024), in the format of the argument."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


@cache
def reference(dtype: torch.dtype, iterates: torch.dtype) -> Weights:
    """By one process on whole batches: forwards in ``dtype``, Newton-Schulz in ``iterates``, and the rest in fp64."""
    now: Weights = {name: p.detach().double() for name, p in make_model().named_parameters()}
    first = {name: torch.zeros_like(weight) for name, weight in now.items()}
    second = {name: torch.zeros_like(weight) for name, weight in now.items()}
    data, step = rows(), 0
    while step < UPDATES:
        for begin in range(0, len(data), GLOBAL):
            step += 1
            for name, g in gradient(now, data[begin : begin + GLOBAL], dtype).items():
                if name.startswith("tokens") or g.ndim < 2:
                    decay = DECAY if name.startswith("tokens") else 0.0
                    first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * g
                    second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * g * g
                    size = second[name].sqrt() / sqrt(1 - BETAS[1] ** step) + 1e-8
                    now[name] = now[name] * (1 - ADAM_RATE * decay) - ADAM_RATE * first[name] / (
                        (1 - BETAS[0] ** step) * size
                    )
                    continue
                first[name] = MOMENTUM * first[name] + (1 - MOMENTUM) * g
                nesterov = (1 - MOMENTUM) * g + MOMENTUM * first[name]
                change = orthogonal(nesterov.to(iterates)).double()
                rate = RATE * sqrt(max(1.0, g.shape[0] / g.shape[1]))
                now[name] = now[name] * (1 - RATE * DECAY) - rate * change
            if step == UPDATES:
                break
    return now


def error(found: Weights, truth: Weights) -> float:
    begun = {name: p.detach().double() for name, p in make_model().named_parameters()}
    wrong = torch.cat([(found[name] - truth[name]).flatten() for name in truth])
    moved = torch.cat([(truth[name] - begun[name]).flatten() for name in truth])
    return float(wrong.norm() / moved.norm())


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("engine", ["ddp", "zero1", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_the_updates_are_those_of_one_process_on_whole_batches(engine: str, world: int) -> None:
    """Newton-Schulz is in bf16, as torch has it: no more than twice as far off as a plain loop that does so too."""
    truth = reference(torch.float64, torch.float64)
    plain = error(reference(torch.float32, torch.bfloat16), truth)
    for found in run_ranks(world, lambda one: train(engine, one)):
        if isinstance(found, BaseException):
            raise found
        assert error(found, truth) <= 2 * plain


def test_the_groups_are_what_they_say() -> None:
    model = make_model()
    names = {id(p): name for name, p in model.named_parameters()}
    held = [[names[id(p)] for group in one.param_groups for p in group["params"]] for one in optimizers(model)]
    assert sorted(name for each in held for name in each) == sorted(names.values())
    muon, _, embedding = held
    assert embedding == ["tokens.weight"]
    assert len(muon) == 8
    assert all(name.startswith("blocks.") for name in muon)
