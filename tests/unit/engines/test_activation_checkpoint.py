"""Blocks that are computed again: what would be wrong is refused before a weight moves; what operators keep."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, _CachingTorchDispatchMode

from distaccum.config.engine import DDPConfig
from distaccum.distributed.world import World
from distaccum.engines import activation_checkpoint
from distaccum.engines.activation_checkpoint import Checkpoints
from distaccum.errors import ConfigError, MisuseError
from tests.support.accumulators import over_sgd


class Block(nn.Module):
    """A linear layer without a bias, and what is made of its result."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4, bias=False), change

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.change(y)
        return y.sin()


def whole(y: Tensor) -> None:
    y.mul_(2)


def by_view(y: Tensor) -> None:
    y.view(-1)[::2].mul_(2)


def by_data(y: Tensor) -> None:
    y.data.mul_(2)


def relu(y: Tensor) -> None:
    F.relu_(y)


@pytest.mark.parametrize("change", [whole, by_view, by_data, relu])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_a_product_written_in_place_is_refused(change: Callable[[Tensor], Any], shape: tuple[int, ...]) -> None:
    block = Block(change)
    Checkpoints(block, [block], selective=True, compiled=False)
    with pytest.raises(MisuseError, match=r"writes in place into a matrix product .* Write it out of place"):
        block(torch.ones(shape)).sum().backward()


def test_a_product_written_in_place_after_the_block_is_refused() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            y.mul_(2)
            return y.sin()

    model = Outer()
    Checkpoints(model, [model.inner], selective=True, compiled=False)
    with pytest.raises(MisuseError, match="of the block inner"):
        model(torch.ones(2, 3, 4)).sum().backward()


@pytest.mark.parametrize(("selective", "change"), [(False, lambda _: None), (True, lambda _: None), (False, whole)])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_what_may_be_written_has_the_same_gradient_and_forward_comes_back(
    selective: bool, change: Callable[[Tensor], Any], shape: Any
) -> None:
    torch.manual_seed(0)
    block, x = Block(change), torch.randn(shape)
    block(x).sum().backward()
    (expected,) = [parameter.grad for parameter in block.parameters()]
    block.zero_grad()
    checkpoints = Checkpoints(block, [block], selective=selective, compiled=False)
    block(x).sum().backward()
    assert torch.equal(next(block.parameters()).grad, expected)
    checkpoints.undo()
    assert "forward" not in vars(block)


class Layers(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def _step(model: nn.Module, engine: DDPConfig) -> None:
    acc = over_sgd(model, 1.0, (4, 2), engine=engine, verify="never")
    try:
        for window in acc.windows(torch.utils.data.DataLoader(list(torch.ones(4, 4)), batch_size=2)):
            for micro in window:
                with acc.accumulate():
                    acc.backward(acc.model(micro.batch).sum(), 2, reduction="sum")
    finally:
        acc.close()


@pytest.mark.filterwarnings("ignore::distaccum.errors.BatchStatisticsWarning")
def test_a_buffer_that_a_block_changes_is_refused_before_a_step(gloo_world: World) -> None:
    model = Layers(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(MisuseError, match=r"Sequential changes the buffer layers\.0\.1\."):
        _step(model, DDPConfig(activation_checkpoint="blocks"))
    assert all(map(torch.equal, before, model.parameters()))
    model.eval()
    _step(model, DDPConfig(activation_checkpoint="blocks"))  # then it changes none
    assert "forward" not in vars(model.layers[0])


def test_a_model_without_blocks_is_refused_by_name(gloo_world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with pytest.raises(ConfigError, match=r"Sequential has no list of layers .* engine.blocks="):
        _step(model, DDPConfig(activation_checkpoint="blocks"))
    _step(model, DDPConfig(activation_checkpoint="blocks", blocks=["0"]))
    with pytest.raises(ConfigError, match=r"engine\.blocks=none: matches no module"):
        _step(model, DDPConfig(activation_checkpoint="blocks", blocks=["none"]))


# The forward of an attention kernel. One of Apple's GPUs is left out, and torch's without a kernel (made of products).
ATTENTION = re.compile(
    r"aten::(_scaled_dot_product_\w+attention\w*|_(flash|efficient|cudnn)_attention_forward)(\.\w+)?$"
)
NO_KERNEL = re.compile("backward|attention_math|mps")


def _registered() -> list[str]:
    """Every overload that this torch has, on whatever device: ``aten::name`` or ``aten::name.overload``."""
    return list(torch._C._dispatch_get_all_op_names())


def _overload(name: str) -> torch._ops.OpOverload:
    packet, _, form = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), form or "default")


KERNELS = [name for name in _registered() if ATTENTION.match(name) and not NO_KERNEL.search(name)]


def test_torch_has_the_kernels_of_a_gpu() -> None:
    assert {"aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention"} <= set(KERNELS)
    assert len(KERNELS) >= 7


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_attention_is_kept_whichever_kernel_computes_it(name: str) -> None:
    operator = _overload(name)
    expected = not operator._schema.is_mutable  # what writes into its arguments cannot be had again
    assert (activation_checkpoint._keeps(None, operator) is CheckpointPolicy.MUST_SAVE) == expected


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm", "_scaled_mm"])
def test_matrix_products_are_kept_and_their_forms_in_place_are_not(name: str) -> None:
    assert activation_checkpoint._keeps(None, _overload(name)) is CheckpointPolicy.MUST_SAVE
    assert activation_checkpoint._keeps(None, _overload(f"{name}.out")) is CheckpointPolicy.PREFER_RECOMPUTE


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))

    @property
    def attention(self) -> list[str]:
        return [name for name in self.names if "attention" in name and "backward" not in name]


class Attention(nn.Module):
    def __init__(self, head_width: int, kernel: SDPBackend) -> None:
        super().__init__()
        self.width, self.kernel = head_width, kernel
        self.project = nn.Linear(2 * head_width, 6 * head_width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, self.width)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        with sdpa_kernel(self.kernel):
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).flatten(2).tanh()


def test_a_backward_computes_no_attention_again() -> None:
    module = Attention(4, SDPBackend.FLASH_ATTENTION)
    activation_checkpoint.Checkpoints(module, [module], selective=True, compiled=False)
    with Calls() as calls:
        module(torch.ones(1, 4, 8)).sum().backward()
    assert calls.attention == ["_scaled_dot_product_flash_attention_for_cpu"]
    assert calls.names.count("addmm") == 1
    assert calls.names.count("tanh") == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, as it compiles
def test_what_a_block_calls_compiled_stays_compiled() -> None:
    """As ``flex_attention`` is: torch runs uncompiled for ever what first meets a mode of its users."""
    runs = list[int]()

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        return lambda *given: runs.append(len(given)) or graph.forward(*given)  # type: ignore[func-returns-value]

    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.part = nn.Linear(4, 4), torch.compile(lambda x: x.tanh() * 2, backend=backend)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.part(self.a(x)).square()
            return found

    module, x = Calling(), torch.ones(1, 4)
    activation_checkpoint.Checkpoints(module, [module], selective=True, compiled=False)
    for _ in range(2):
        module(x).sum().backward()
    own: Any = getattr(_CachingTorchDispatchMode, "ignore_compile_internals", bool)  # torch's mode; since torch 2.10
    assert len(runs) == (4 if own() else 0)  # each in the forward and again in the backward
