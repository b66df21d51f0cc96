"""Micro-steps as CUDA graphs on one GPU, beside the same compiled code without them. ``pytest -m gpu``."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum import Accumulator, CompileConfig
from distaccum.distributed.world import World
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.models.gpt import GPT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("compiler"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, while it compiles
]

VOCABULARY, LENGTH, MICRO, MICRO_STEPS, WINDOWS = 32, 16, 2, 4, 4


def _samples(windows: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, VOCABULARY, (windows * MICRO_STEPS * MICRO, LENGTH + 1), generator=generator)
    return [(row[:-1], row[1:]) for row in rows]


def _accumulator(world: World, *, engine: str, precision: str, compile: CompileConfig) -> Accumulator:  # noqa: A002
    torch.manual_seed(0)
    model = GPT(vocab_size=VOCABULARY, seq_len=LENGTH, n_layer=2, n_head=2, n_embd=32, dropout=0.2)
    return Accumulator(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        global_batch_size=MICRO * MICRO_STEPS,
        micro_batch_size=MICRO,
        seed=3,
        count=CrossEntropy().count,
        engine=engine,
        precision=precision,
        compile=compile,
        clip_norm=1.0,
        world=world,
    )


class Keeping(CrossEntropy):
    """Keeps what the model gave in each micro-step, and a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.copies: list[Tensor] = []

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0])
        self.kept.append(logits.detach())
        self.copies.append(logits.detach().clone())
        return self.of_logits(logits, batch[1])


def _train(acc: Accumulator, loss: Any, windows: int = WINDOWS) -> tuple[list[float], dict[str, Tensor]]:
    assert acc.engine.compiled is not None
    acc.engine.compiled.add_loss(loss)
    found = []
    for window in acc.windows(_samples(windows)):
        outcome = acc.step(window, loss)
        found += [outcome.grad_norm.item(), acc.mean_loss()]
        with torch.no_grad():  # as an evaluation between two windows
            acc.model(torch.zeros(1, LENGTH, dtype=torch.long, device=acc.engine.device))
    return found, {name: tensor.clone() for name, tensor in acc.state_dict()["model"].items()}


def _tree() -> Any:
    """Torch's, of the first GPU."""
    from torch._inductor import cudagraph_trees  # noqa: PLC0415  seconds to import

    return cudagraph_trees.get_container(0).tree_manager


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("parts", ["blocks", "model"])
@pytest.mark.parametrize("engine", ["ddp", "zero1"])
def test_they_change_no_bit(engine: str, parts: str, precision: str, gpu_world: World) -> None:
    runs = []
    for graphs in (False, True):
        torch._dynamo.reset()
        compile = CompileConfig(name=parts, graphs=graphs)  # noqa: A001
        acc = _accumulator(gpu_world, engine=engine, precision=precision, compile=compile)
        runs.append(_train(acc, CrossEntropy()))
        if graphs:
            tree = _tree()
            assert tree is not None
            assert list(tree.get_roots())
            assert tree.path_state.name == "EXECUTION"  # the last backward was replayed
        acc.close()
    (numbers, weights), (graphed, others) = runs
    assert graphed == numbers
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("parts", ["blocks", "model"])
def test_what_a_loss_keeps_of_an_output_stays(parts: str, gpu_world: World) -> None:
    acc = _accumulator(gpu_world, engine="ddp", precision="bf16", compile=CompileConfig(name=parts, graphs=True))
    loss = Keeping()
    _train(acc, loss)
    acc.close()
    assert len(loss.kept) >= WINDOWS * MICRO_STEPS
    assert all(torch.equal(kept, copy) for kept, copy in zip(loss.kept, loss.copies, strict=True))


def test_nothing_grows_once_all_is_captured(gpu_world: World) -> None:
    acc = _accumulator(gpu_world, engine="ddp", precision="bf16", compile=CompileConfig(name="blocks", graphs=True))
    _train(acc, CrossEntropy())
    captured = str(_tree().graph_counter)
    for window in acc.windows(_samples(WINDOWS)):
        acc.step(window, CrossEntropy())
    assert str(_tree().graph_counter) == captured
    acc.close()
