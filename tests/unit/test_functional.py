"""Level 1: what a hand-written loop forgets is refused where it is seen for nothing, and named by an audit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from distaccum import DataSpec, audit
from distaccum import functional as da
from distaccum.data.window import MicroBatch, Window
from distaccum.distributed.world import World
from distaccum.engines.base import Engine
from distaccum.errors import MisuseError, UndividedLossWarning

Divide = Callable[[Tensor, Window, MicroBatch, Engine], Tensor]


def _squares(model: nn.Module, batch: Tensor) -> Tensor:
    total: Tensor = model(batch).square().sum()
    return total


def _train(world: World, divide: Divide) -> str:
    """Two windows of two micro-batches; what an audit of them says."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    data = DataSpec(train=list(torch.randn(16, 3)), eval_dataset=None, description="", shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    windows = da.plan_windows(data, world, global_batch_size=8, micro_batch_size=4, count=len)
    engine = da.create_engine(model, optimizer, world)
    said: list[str] = []
    with audit(model, optimizer, loss_sum=_squares, count=len, show=lambda report: said.append(str(report))):
        for window in windows(0):
            for i, micro in enumerate(window.micro_batches):
                with engine.micro_step(sync=i == len(window.micro_batches) - 1):
                    engine.backward(divide(_squares(engine.model, micro.batch), window, micro, engine))
            da.finish_step(engine, window)
    engine.close()
    return said[0]


def _right(total: Tensor, window: Window, _: MicroBatch, engine: Engine) -> Tensor:
    return da.normalize_loss(total, window.counts, engine.gradient_divide_factor)


UNREAD: dict[str, Divide] = {
    "undivided": lambda total, *_: total,
    "by the micro-batch's count": lambda total, _, micro, engine: da.normalize_loss(
        total, micro.counts, engine.gradient_divide_factor
    ),
}


@pytest.mark.parametrize("fault", UNREAD)
def test_a_loss_that_the_windows_count_does_not_divide_is_warned_of(gloo_world: World, fault: str) -> None:
    with pytest.warns(UndividedLossWarning, match=r"nobody has read window.counts"):
        assert "NOT the global batch's" in _train(gloo_world, UNREAD[fault])


def test_another_factor_than_the_engines_is_refused(gloo_world: World) -> None:
    with pytest.raises(MisuseError, match="with the factor 2, and this engine divides by 1"):
        _train(gloo_world, lambda total, window, *_: da.normalize_loss(total, window.counts, 2))


def test_a_division_by_hand_is_right_and_an_audit_names_one_too_many(gloo_world: World) -> None:
    assert "is the global batch's" in _train(gloo_world, _right)
    assert "is the global batch's" in _train(gloo_world, lambda total, window, *_: total / window.counts["loss"])
    twice = _train(gloo_world, lambda *given: _right(*given) / 2)
    assert "NOT the global batch's in 2 of 2 windows" in twice
    assert "factor 0.5" in twice
