"""Every engine on one GPU, beside fp64 on the CPU; and its state, moved to another engine. ``pytest -m gpu``."""

from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distaccum import Accumulator
from distaccum.config.engine import DDPConfig, DeepSpeedConfig, EngineConfig, FSDP2Config, Zero1Config
from distaccum.data.plan.shuffle import Shuffle
from distaccum.distributed.world import World
from distaccum.losses.cross_entropy import cross_entropy
from distaccum.models.gpt import GPT

pytestmark = pytest.mark.gpu

VOCABULARY, LENGTH, UPDATES = 31, 16, 3
OURS: dict[str, EngineConfig] = {
    "ddp": DDPConfig(),
    "zero1": Zero1Config(),
    "fsdp2 boundary": FSDP2Config(),
    "fsdp2 every": FSDP2Config(sync="every"),
    "fsdp2 held": FSDP2Config(reshard_after_forward=False),
    "fsdp2 offload": FSDP2Config(offload=True),
    "fsdp2 checkpoint": FSDP2Config(activation_checkpoint="selective"),
}
ALL = OURS | {f"deepspeed {stage}": DeepSpeedConfig(stage=stage) for stage in range(4) if find_spec("deepspeed")}
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 4e-3}


def _samples() -> Any:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, VOCABULARY, (20, LENGTH + 1), generator=generator)
    return [(row[:-1], row[1:]) for row in rows]


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=VOCABULARY, seq_len=LENGTH, n_layer=2, n_head=2, n_embd=32)


def _accumulator(world: World, engine: EngineConfig, precision: str) -> Accumulator:
    model = _model()
    return Accumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        global_batch_size=8,
        micro_batch_size=3,
        seed=0,
        count=lambda batch: batch[1].numel(),
        engine=engine,
        precision=precision,
        clip_norm=1.0,
        world=world,
    )


def _train(acc: Accumulator) -> list[float]:
    norms = []
    for window in acc.windows(_samples()):
        for micro in window:
            with acc.accumulate():
                acc.backward(cross_entropy(acc.model(micro.batch[0]), micro.batch[1])[0])
        assert acc.last is not None
        norms.append(acc.last.grad_norm.item())
    return norms


def _truth() -> list[float]:
    """The norms of an epoch's windows: fp64, whole windows, a textbook step."""

    model, samples, norms = _model().double(), _samples(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    order = Shuffle(len(samples), seed=0, epoch=0)(np.arange(len(samples)))
    for begin in range(0, len(samples), 8):
        chosen = [samples[int(i)] for i in order[begin : begin + 8]]
        inputs, labels = (torch.stack(part) for part in zip(*chosen, strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return norms


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of what DeepSpeed imports
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("name", ALL)
def test_every_engine_steps_as_fp64_does(
    name: str, precision: str, gpu_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")  # DeepSpeed asks for it
    assert _train(_accumulator(gpu_world, ALL[name], precision)) == pytest.approx(_truth(), rel=TOLERANCE[precision])


@pytest.mark.parametrize("name", OURS)
def test_state_goes_from_each_engine_to_each(name: str, gpu_world: World) -> None:
    saved = _accumulator(gpu_world, OURS[name], "fp16")
    _train(saved)
    state = deepcopy(saved.state_dict())
    after: dict[str, Tensor] = {}
    for other, engine in OURS.items():
        acc = _accumulator(gpu_world, engine, "fp16")
        acc.load_state_dict(deepcopy(state))
        taken = acc.state_dict()
        for part in ("model", "optimizer"):
            assert taken[part].keys() == state[part].keys()
            assert all(torch.equal(taken[part][key].cpu(), state[part][key].cpu()) for key in state[part]), other
        assert taken["scaler"] == state["scaler"]
        norms = torch.tensor(_train(acc))
        assert torch.allclose(norms, after.setdefault("norms", norms), rtol=2e-2), other
