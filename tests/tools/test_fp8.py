"""precision=fp8: the gradient beside one written out by hand, on ddp and fsdp2; what is refused; resume and export."""

import logging
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distaccum.config.engine import DDPConfig, DeepSpeedConfig, EngineConfig, FSDP2Config, Zero1Config
from distaccum.config.precision import PrecisionConfig
from distaccum.distributed.world import World
from distaccum.engines.context import EngineContext
from distaccum.engines.factory import prepare
from distaccum.engines.numerics import Numerics
from distaccum.errors import ConfigError, VerificationError
from distaccum.tools import export
from distaccum.tools import fp8 as ours
from distaccum.tools.inference import AtRest
from tests.support import engine_matrix, fp8, matrix
from tests.support.answers import answer
from tests.support.threads import on_ranks

FP8 = PrecisionConfig(name="fp8", fp8_emulate=True, keep_fp32=fp8.KEPT)
ENGINES: dict[str, EngineConfig] = {"ddp": DDPConfig(), "fsdp2": FSDP2Config()}
# Measured: 0.0010 and 0.0011, of bf16's roundings in another order, which cross a step of e4m3 here and there.
TOLERANCE = 3e-3
# Of what is not rounded by hand: measured 0.031 to 0.038. Half a step of e4m3 is 2**-4 of a number at most.
OF_E4M3 = 2.0**-4
OF_BF16 = 2.0**-8  # as much of bf16; measured 0.0027, and 0.031 to 0.037 beside a truth in fp8


@pytest.fixture
def torchao() -> None:
    pytest.importorskip("torchao.float8", reason="no torchao, or of another torch", exc_type=ImportError)


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("recipe", fp8.RECIPES)
@pytest.mark.parametrize("name", ENGINES)
def test_a_windows_gradient_is_that_by_hand_whatever_its_micro_batches(name: str, recipe: str) -> None:
    """Two ranks, a full and a ragged window, samples of unequal lengths; the truth sees the whole window at once.

    Beside it: a recipe that mixes samples, and no rounding at all, are off by ten times the tolerance and more.
    """
    precision = replace(FP8, fp8_recipe=recipe)
    for micro in (1, 5):
        for found in on_ranks(2, lambda world, micro=micro: fp8.errors(world, ENGINES[name], micro, precision)):
            assert found[recipe] <= TOLERANCE, found
            assert 10 * TOLERANCE < found["exact"] <= OF_E4M3
            assert found["tensorwise"] > 10 * TOLERANCE


@pytest.mark.usefixtures("torchao")
def test_weights_that_are_gathered_in_bf16_are_as_near() -> None:
    for found in on_ranks(2, lambda world: fp8.errors(world, FSDP2Config(), 5, replace(FP8, keep_fp32=[]))):
        assert found["exact"] <= OF_E4M3


@pytest.mark.heavy
@pytest.mark.usefixtures("torchao")
def test_the_same_over_gloo() -> None:
    for (_, recipe), found in zip(*answer("fp8"), strict=True):
        assert found[recipe] <= TOLERANCE < found["exact"] <= OF_E4M3


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("name", ENGINES)
def test_a_resume_is_bitwise_and_its_state_is_that_of_plain_layers(name: str) -> None:
    def resumed(world: World) -> None:
        acc = fp8.accumulator(world, ENGINES[name], 5, FP8)
        windows, loss = acc.windows(fp8.DATA), matrix.Two()
        acc.step(next(windows), loss)
        saved = deepcopy(acc.state_dict())
        acc.step(next(windows), loss)
        again = fp8.accumulator(world, ENGINES[name], 5, FP8)
        again.load_state_dict(saved)
        again.step(next(again.windows(fp8.DATA)), loss)
        expected, found = fp8.weights_of(acc, world), fp8.weights_of(again, world)
        assert list(found) == list(fp8.MODEL.state_dict())
        assert {one.dtype for one in found.values()} == {torch.float32}
        assert all(torch.equal(found[key], expected[key]) for key in expected), "not bit by bit"

    on_ranks(2, resumed)


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("name", ENGINES)
def test_what_it_saves_is_exported_in_fp32_and_goes_on_in_bf16(name: str, tmp_path: Path) -> None:
    """After one window, in a plain file; the second's gradient has bf16's roundings, and none of e4m3."""
    second, file = engine_matrix.windows(fp8.SAMPLES, epoch=0)[1], tmp_path / "out.safetensors"
    kinds = dict.fromkeys(fp8.MODEL.state_dict(), torch.float32)

    def continued(world: World) -> None:
        acc = fp8.accumulator(world, ENGINES[name], 5, FP8)
        acc.step(next(acc.windows(fp8.DATA)), matrix.Two())
        saved, before = acc.save(tmp_path), fp8.weights_of(acc, world)
        if world.is_main:
            export.export(saved, file)
        again = fp8.accumulator(world, ENGINES[name], 5, PrecisionConfig(name="bf16", keep_fp32=fp8.KEPT))
        assert again.resume(tmp_path) == 1
        for found in (load_file(file), fp8.weights_of(again, world)):
            assert {key: one.dtype for key, one in found.items()} == kinds
            assert all(torch.equal(one, before[key]) for key, one in found.items()), "not bit by bit"
        again.step(next(again.windows(fp8.DATA)), matrix.Two())
        gradient = {key: before[key].double() - after for key, after in fp8.weights_of(again, world).items()}
        errors = [fp8.off(gradient, fp8.truth(before, second, recipe)) for recipe in (None, *fp8.RECIPES)]
        assert errors[0] <= OF_BF16 < min(errors[1:])

    on_ranks(2, continued)


@pytest.mark.usefixtures("torchao")
def test_only_blocks_are_converted_in_place_and_close_takes_it_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "distaccum.tools.fp8")

    def converted(world: World) -> None:
        acc = fp8.accumulator(world, DDPConfig(), 5, replace(FP8, keep_fp32=[]))
        model = acc.engine.unwrapped_model
        layers = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
        kinds = {name: type(one).__name__ for name, one in layers.items()}
        wide, x = layers["blocks.0.wide"], torch.randn(3, 16)
        with acc.engine.autocast():
            assert torch.equal(wide(input=x), wide(x))
            assert torch.equal(wide(x), wide(x.bfloat16()))  # as a plain layer's, an input of fp32 is bf16 first
        inside = {f"blocks.{i}.{part}" for i in range(2) for part in ("wide", "narrow")}
        assert {name for name, kind in kinds.items() if kind == "Float8Linear"} == inside
        acc.close()
        assert {type(one) for one in layers.values()} == {nn.Linear}
        assert all(vars(one).keys() == vars(nn.Linear(1, 1)).keys() for one in layers.values())
        assert not any(one._forward_pre_hooks for one in layers.values())

    on_ranks(1, converted)
    assert "4 linear layers (blocks.0.wide, blocks.0.narrow, blocks.1.wide, blocks.1.narrow); 2 others" in caplog.text


@pytest.mark.usefixtures("torchao")
def test_between_two_runs_a_model_computes_as_in_them() -> None:
    """For ``score`` and ``predict``, bit by bit."""
    inputs = fp8.SAMPLES[0]["inputs"].unsqueeze(0)

    def computed(world: World) -> None:
        acc = fp8.accumulator(world, DDPConfig(), 5, FP8)
        model = acc.engine.unwrapped_model
        with torch.no_grad(), acc.engine.autocast():
            expected = model(inputs)[0]
        acc.close()
        rest = AtRest(model, _context(keep_fp32=fp8.KEPT), world)
        with rest.at_work(), torch.no_grad(), rest.autocast():
            assert torch.equal(model(inputs)[0], expected)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert not torch.equal(model(inputs)[0], expected)

    on_ranks(1, computed)


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("name", ENGINES)
def test_a_proof_holds_to_the_bit_and_still_finds_a_mean(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A loss that a program divides by the micro-batch's size, not the window's."""

    class Mean(matrix.Two):
        def __call__(self, model: nn.Module, batch: matrix.Batch) -> dict[str, torch.Tensor]:
            return {name: part / len(batch["target"]) for name, part in super().__call__(model, batch).items()}

    caplog.set_level(logging.INFO)

    def proven(world: World) -> None:
        acc = fp8.accumulator(world, ENGINES[name], 5, FP8, verify="first")
        acc.step(next(acc.windows(fp8.DATA)), matrix.Two())
        wrong = fp8.accumulator(world, ENGINES[name], 5, FP8, verify="first")
        with pytest.raises(VerificationError):
            wrong.step(next(wrong.windows(fp8.DATA)), Mean())

    on_ranks(2, proven)
    assert "agrees with plain autograd" in caplog.text


def _context(
    engine: EngineConfig | None = None, *, more: Mapping[str, Any] | None = None, **precision: Any
) -> EngineContext:
    settings = {"name": "fp8", "fp8_emulate": True} | precision
    return EngineContext(
        engine=engine or DDPConfig(),
        precision=PrecisionConfig(**settings),
        world_size=2,
        device=torch.device("cpu"),
        **(more or {}),
    )


class _Builder:
    def check(self, context: EngineContext) -> None: ...

    def create(self, *given: Any) -> Any: ...


class LoraLayer(nn.Linear):
    """Where PEFT's layers are from."""

    __module__ = "peft.tuners.lora"


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (_context(Zero1Config()), "precision=fp8: runs on ddp and fsdp2, not on engine=zero1"),
        (_context(DeepSpeedConfig()), "precision=fp8: runs on ddp and fsdp2, not on engine=deepspeed"),
        (_context(more={"builder": _Builder()}), "precision=fp8: does not go together with elastic training"),
        (_context(more={"numerics": Numerics.of("reproducible")}), "does not go together with numerics=reproducible"),
        (_context(only=["blocks"]), "does not go together with precision.only. Use precision.fp8_modules"),
        (_context(reduce_dtype="fp16"), "does not go together with precision.reduce_dtype=fp16"),
        (_context(fp8_emulate=False), "a CPU has no fp8 arithmetic .* precision.fp8_emulate=true rounds as fp8"),
        (_context(fp8_modules=["block.*"]), r"fp8_modules=block.\*: names no linear layer of Model"),
        (_context(fp8_modules=["logits"]), "fp8_modules=logits: logits has 16 to 11 features, no multiples of 16"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name_without_a_process_group(context: EngineContext, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(deepcopy(fp8.MODEL), context)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            "tensorwise",
            "one scale for a whole tensor makes a sample's rounding depend on the others of its micro-batch",
        ),
        ("mxfp8", "no such choice. Use one of rowwise, rowwise_with_gw_hp"),
    ],
)
def test_recipes_that_mix_samples_or_are_not_known_are_refused(recipe: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"precision.fp8_recipe={recipe}: {message}"):
        PrecisionConfig(name="fp8", fp8_recipe=recipe)


def test_models_that_cannot_be_converted_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Sequential has no list of blocks .*\[layer\*\]"):
        prepare(nn.Sequential(nn.Linear(16, 16)), _context())
    with pytest.raises(ConfigError, match=r"blocks\.0\.wide has 8 to 24 features, no multiples of 16"):
        prepare(engine_matrix.Model(8), _context())
    with pytest.raises(ConfigError, match=r"0\.wide has weights in float64"):
        prepare(deepcopy(fp8.MODEL).double(), _context())
    model = deepcopy(fp8.MODEL)
    model.blocks[0].wide = LoraLayer(16, 48)
    with pytest.raises(ConfigError, match=r"does not go together with adapters \(blocks.0.wide is PEFT's LoraLayer\)"):
        prepare(model, _context())


def test_without_torchao_the_message_has_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with one of another torch, what is wrong with it: 0.18 cannot be imported with torch 2.8."""
    monkeypatch.setattr(ours, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"precision=fp8: torchao is not installed. Run .* 'distaccum\[fp8\]'"):
        prepare(deepcopy(fp8.MODEL), _context())
    monkeypatch.setattr(ours, "find_spec", lambda _: True)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match=r"precision=fp8: this torchao cannot be imported with torch .* newer torch"):
        prepare(deepcopy(fp8.MODEL), _context())


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("recomputed", ["none", "blocks"])
def test_names_choose_the_layers_also_where_blocks_are_computed_again(recomputed: str) -> None:
    """Of one block alone the gradient is nearer to the truth than of all, and farther than of none."""

    def error(modules: list[str] | None) -> float:
        precision = replace(FP8, fp8_modules=modules or [], name="bf16" if modules is None else "fp8")
        engine = DDPConfig(activation_checkpoint=recomputed)
        return on_ranks(1, lambda world: fp8.errors(world, engine, 5, precision)["exact"])[0]

    assert error(None) < error(["blocks.1"]) < error([])
