"""What a selective checkpoint keeps, by the operators that this torch has."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from distaccum.engines import activation_checkpoint

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
    """The operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))

    @property
    def attention(self) -> list[str]:
        """Those of attention's forward."""
        return [name for name in self.names if "attention" in name and "backward" not in name]


class Attention(nn.Module):
    """Two heads, by one kernel."""

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
