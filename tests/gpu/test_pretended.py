"""Faults that a pretended GPU tells, and memory that runs out on it: ``python -m launch.pretend pytest -m gpu``."""

import gc
import inspect
import sys
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor

from distaccum import Accumulator, CrossEntropy, DataSpec
from distaccum.data import prefetch
from distaccum.distributed.random import KeyedRandom
from distaccum.distributed.world import World
from distaccum.engines.modules import HostCopy
from distaccum.engines.optimizer_step import FusedUpdate
from distaccum.models.gpt import GPT
from launch.pretend import NAME, STATE

pytestmark = pytest.mark.gpu
DECISION = "event.synchronize() at engines/modules.py:read"  # of a window, the only wait between two


@pytest.fixture(scope="module")
def pretended(gpu_world: World) -> World:
    if gpu_world.device.type != NAME:
        pytest.skip("on the pretended GPU alone")
    return gpu_world


def _train(
    world: World, *, engine: str = "ddp", dropout: float = 0.0, share: float = 0.0, windows: int = 3
) -> tuple[Tensor, list[str]]:
    """The weights after some windows, and what was seen in all but the first.

    Of memory there is a ``share`` of what the training before has taken; 0: as much as it wants.
    """
    rows = torch.randint(0, 32, (16 * windows, 17), generator=torch.Generator().manual_seed(1))
    data = DataSpec(train=[(row[:-1], row[1:]) for row in rows], description="", shuffle=False)
    torch.manual_seed(0)
    model = GPT(vocab_size=32, seq_len=16, n_layer=1, n_head=2, n_embd=16, dropout=dropout, attention="math")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    sizes: dict[str, Any] = {"global_batch_size": 16, "micro_batch_size": 8, "clip_norm": 1.0, "verify": "never"}
    acc = Accumulator(model, optimizer, engine=engine, count=CrossEntropy().count, world=world, seed=0, **sizes)
    gc.collect()
    most, STATE.peak = STATE.peak - STATE.start, STATE.allocated
    STATE.start = STATE.allocated
    STATE.capacity = STATE.start + int(share * most) if share else 2**40
    for number, window in enumerate(acc.windows(data)):
        if number == 1:
            STATE.forget()
        acc.step(window, CrossEntropy())
    seen, STATE.capacity = [*STATE.seen, *STATE.races], 2**40
    weights = torch.cat([p.detach().flatten().cpu() for p in acc.engine.unwrapped_model.parameters()])
    acc.close()
    return weights, seen


FAULTS: dict[str, tuple[Callable[..., Any], str, str, str]] = {
    "a batch is used before it is there": (
        *(prefetch._on_copy_stream.__wrapped__, "compute.wait_event(arrived)", "pass"),
        "does not wait for what another stream wrote",
    ),
    "a batch's memory may be reused too soon": (
        *(prefetch._on_copy_stream.__wrapped__, "tensor.record_stream(compute)", "pass"),
        "no record_stream",
    ),
    "a copy is read at once": (HostCopy.read, "self._arrived.synchronize()", "pass", "is NaN or infinite"),
    "the step reads its norm": (FusedUpdate.step, "applied = finite =", "float(norm); applied = finite =", "item()"),
    "the step waits for all": (
        *(
            FusedUpdate.step,
            "applied = finite =",
            "torch.get_device_module(norm.device).synchronize(); applied = finite =",
        ),
        "synchronize() at engines/optimizer_step.py:step",
    ),
    "a number is made on the host": (
        *(FusedUpdate.step, "torch.ones_like(applied)", "torch.ones(())"),
        "Expected all tensors to be on the same device",
    ),
    "a number is moved from the host": (
        *(FusedUpdate.step, "torch.ones_like(applied)", "torch.tensor(1.0, device=applied.device)"),
        "that is not pinned",
    ),
    "the device's generator is not seeded": (
        KeyedRandom.begin,
        " generator.manual_seed(key)",
        " pass",
        "other weights",
    ),
    "a sum is made of the host's tensors": (
        *(
            FusedUpdate.step,
            "norm = torch.linalg",
            "torch.distributed.all_gather([norms.cpu()], norms); norm = torch.linalg",
        ),
        "tensors of the host among those of the device",
    ),
}


def _told(world: World, right: Tensor) -> list[str]:
    try:
        weights, seen = _train(world, dropout=0.1)
    except Exception as error:  # whatever a fault raises
        return [str(error)]
    return seen if torch.equal(weights, right) else [*seen, "other weights"]


def test_each_planted_fault_is_told(pretended: World, monkeypatch: pytest.MonkeyPatch) -> None:
    right, _ = _train(pretended, dropout=0.1)
    assert _told(pretended, right) == [DECISION]
    missed = {}
    for name, (function, old, new, words) in FAULTS.items():
        source = dedent(inspect.getsource(function))
        source = source[source.index("def ") :]
        assert source.count(old) == 1, f"bring the fault up to date: {old!r}"
        space = dict(vars(sys.modules[function.__module__]))
        exec(compile(source.replace(old, new), function.__code__.co_filename, "exec"), space)  # noqa: S102  our own
        with monkeypatch.context() as patched:
            patched.setattr(function, "__code__", space[function.__name__].__code__)
            prefetch._on_copy_stream.cache_clear()
            told = _told(pretended, right)
        if not any(words in one for one in told):
            missed[name] = told
    prefetch._on_copy_stream.cache_clear()
    STATE.forget()
    assert not missed


@pytest.mark.parametrize("engine", ["ddp", "zero1"])
def test_a_window_that_does_not_fit_begins_again_and_gives_the_same(engine: str, pretended: World) -> None:
    whole, _ = _train(pretended, engine=engine, windows=2)
    for share in (0.8, 0.7):
        before = STATE.out_of_memory
        found, _ = _train(pretended, engine=engine, share=share, windows=2)
        assert (found - whole).norm() <= 1e-6 * whole.norm()
        assert STATE.out_of_memory > before
