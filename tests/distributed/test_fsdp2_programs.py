"""Loops as people write them are exact on FSDP2, also where ranks are uneven, or are refused by name."""

from typing import Any

import pytest

from tests.support.answers import answer

pytestmark = pytest.mark.slow

TOLERANCE = 1e-6
PLAIN_LOOPS = 2  # times what a plain fp32 loop on whole windows is off by in the same run


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.heavy)])
def found(request: pytest.FixtureRequest) -> Any:
    """By rank, what the worker found: a covering set of cells, or all."""
    return answer("fsdp2_programs", request.param, timeout=200)


@pytest.mark.parametrize("part", ["programs", "copies", "abandoned", "after an error", "gan"])
def test_the_weights_are_those_of_whole_windows(found: Any, part: str) -> None:
    assert len(found[0][part]) >= 3
    for rank in found:
        off = {name: errors for name, errors in rank[part].items() if errors[0] > _bound(errors)}
        assert not off


def test_hooks_on_parameters_go_on_after_wrapping(found: Any) -> None:
    for rank in found:
        for name in ("Hooked, boundary", "Hooked, every", "HookedAfter, boundary"):
            errors = rank["hooks"][name]
            assert errors[0] <= _bound(errors), name
        assert "blocks.0.layer.weight has a post-accumulate hook" in rank["hooks"]["HookedAfter, every"]


def test_what_cannot_be_followed_is_refused_before_a_weight_moves(found: Any) -> None:
    expected = {
        "clipped by hand": "gradients were changed by hand",
        "cleared by hand": "gradients were changed by hand",
        "a backward of one's own": "gradients were changed by hand",
        "model.forward": "the forward went past the engine",
        "a module inside": "the forward went past the engine",
        "a __call__ without hooks": "the forward went past the engine",
        "a kept parameter": "a gradient reached leave.weight as it was before wrapping",
        "a hook on a shard": "register_hook on enter.weight after wrapping",
        "a constant forward": "no parameter got a gradient",
        "another block twice on each rank": "ranks ran different blocks in a forward",
        "a block twice, reentrant": "a reentrant checkpoint computes a block (FSDPBlock) again twice",
        "two forwards, reentrant": "a reentrant checkpoint computes a block (FSDPBlock) again twice",
        "a gradient penalty": "the model is differentiated twice",
        "an attack, uneven": "the model is differentiated by hand",
        "between micro-batches": "the model was called between two micro-batches",
        "abandoned beside an empty rank": "one of them has none",
        "whole weights in the loss": "itself, which is sharded",
        "local weights in the loss": "itself, which is sharded",
        "a plain penalty": "itself, which is sharded",
        "a penalty before the forward": "a gradient came after its reduction",
        "an inner step": "autograd.grad by a tensor that is in no forward",
        "vmap": "the model was called in a transform of torch.func",
        "frozen in a window": "requires_grad was changed in the middle of a window",
        "tied after wrapping": "leave.weight was replaced after wrapping",
        "another type": "of a sharded model would become torch.float64",
        "a copy of a block": "a part of a sharded model (FSDPBlock) cannot be copied by itself",
        "an error that another rank waits for": "the model is differentiated by hand",
        "left out": "step() with 1 micro-steps of the window left",
        "synced early": "micro_step(sync=True) with 1 micro-steps of the window left",
        "wrapped again": "build the model anew, and load its weights",
    }
    said = [rank["refused"] for rank in found]
    for name, message in expected.items():
        assert any(message in rank[name] for rank in said), (name, [rank[name] for rank in said])
    for name, rank in (("an error that another rank waits for", 1), ("synced early", 0)):
        waited = ["on another rank, which this one waited for" in own[name] for own in said]
        assert waited == [rank == 0, rank == 1]
    for rank in found:
        assert rank["unmoved"]


def _bound(errors: list[float]) -> float:
    return max(TOLERANCE, PLAIN_LOOPS * errors[1])
