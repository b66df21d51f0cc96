"""Which accelerators are used, by torch's names for all of them; a card here is a stand-in."""

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from distaccum.distributed.environment import LaunchEnvironment
from distaccum.distributed.random import fork_rng
from distaccum.distributed.world import open_world
from distaccum.errors import ConfigError
from distaccum.precision.hardware import gpu_of
from distaccum.tools.accelerators import tell_mixed


def _has(monkeypatch: pytest.MonkeyPatch, kind: str, number: int) -> None:
    found = torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_rank_takes_the_machines_card_of_either_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _has(monkeypatch, kind, 4)
    assert LaunchEnvironment(local_rank=3, local_size=4).device() == torch.device(kind, 3)


def test_apples_is_left_alone_which_is_said_and_refused_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _has(monkeypatch, "mps", 1)
    with caplog.at_level(logging.WARNING):
        assert [LaunchEnvironment().device() for _ in range(2)] == [torch.device("cpu")] * 2
    assert caplog.text.count("the mps of this machine is not used, and the CPU is") == 1
    with pytest.raises(ConfigError, match=r"^device=mps: torch\.mps has no Stream, .*Use a CPU, or .* cuda or xpu"):
        open_world(LaunchEnvironment(), HashStore(), torch.device("mps")).__enter__()


def test_an_intel_card_has_no_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("get_device_name", "a card"), ("is_bf16_supported", True), ("is_tf32_supported", False)):
        monkeypatch.setattr(torch.xpu, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(torch.xpu, "device", nullcontext)
    gpu = gpu_of(torch.device("xpu"))
    assert gpu is not None
    assert (str(gpu), gpu.capability, gpu.bf16, gpu.tf32) == ("a card", None, True, False)


@pytest.mark.parametrize("others", [["H100", "H100"], ["A100", "H100"]])
def test_cards_that_differ_are_told(
    others: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda: "H100")
    facts = {"device": torch.device("xpu"), "size": 3, "is_main": True}
    world: Any = SimpleNamespace(**facts, all_gather_object=lambda own: [own, *others])
    with caplog.at_level(logging.WARNING):
        tell_mixed(world)
    told = "as long as the slowest needs (H100: ranks 0, 2; A100: ranks 1)" if "A100" in others else ""
    assert told in caplog.text
    assert bool(told) == bool(caplog.records)


def test_no_number_is_drawn_of_the_host_where_tensors_have_no_memory() -> None:
    before = torch.get_rng_state()
    with fork_rng([torch.device("meta"), torch.device("cpu")]):
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), before)
