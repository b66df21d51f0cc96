"""A selective checkpoint keeps what every attention kernel of a GPU gives. ``pytest -m gpu``."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from distaccum.engines.activation_checkpoint import Checkpoints
from tests.unit.engines.test_activation_checkpoint import Attention, Calls

pytestmark = pytest.mark.gpu

KERNELS = {
    SDPBackend.FLASH_ATTENTION: "_scaled_dot_product_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "_scaled_dot_product_efficient_attention",
    SDPBackend.CUDNN_ATTENTION: "_scaled_dot_product_cudnn_attention",
}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_backward_computes_no_attention_again(kernel: SDPBackend) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    module = Attention(64, kernel).to("cuda", torch.bfloat16)
    Checkpoints(module, [module], selective=True, compiled=False)
    with Calls() as calls:
        module(torch.randn(2, 128, 128, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
    assert calls.attention == [KERNELS[kernel]]
    assert calls.names.count("tanh") == 2
