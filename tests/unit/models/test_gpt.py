"""The GPT: beside GPT-2 of transformers, and with its vocabulary padded beside without."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distaccum import DataSpec
from distaccum.config.engine import DDPConfig, EngineConfig, FSDP2Config
from distaccum.errors import ConfigError, MisuseError
from distaccum.losses.cross_entropy import CrossEntropy
from distaccum.models.cnn import CNN
from distaccum.models.gpt import GPT
from tests.support.threads import run_ranks
from tests.unit.losses.test_linear_cross_entropy import _batch, _error, _samples, _step

VOCABULARY = 37
LOSSES = {"whole": CrossEntropy(), "chunked": CrossEntropy(chunk=20)}


def _gpt(**settings: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=VOCABULARY, seq_len=12, n_layer=2, n_head=2, n_embd=16, **settings)


def _gradients(model: nn.Module, loss: CrossEntropy) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model, _batch(7)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_padded_vocabulary_changes_neither_weights_nor_loss_nor_gradient(loss: CrossEntropy) -> None:
    plain, padded = _gpt(), _gpt(vocab_multiple=64)
    weights = dict(plain.named_parameters())
    assert padded.tokens.weight.shape == (64, 16)
    for name, parameter in padded.named_parameters():
        assert torch.equal(parameter[:VOCABULARY] if name == "tokens.weight" else parameter, weights[name]), name
    assert not padded.tokens.weight[VOCABULARY:].any()
    inputs, _ = batch = _batch(7)
    assert padded(inputs).shape == plain(inputs).shape
    plain, padded = plain.double(), padded.double()
    assert loss(padded, batch).item() == pytest.approx(CrossEntropy()(plain, batch).item(), rel=1e-12)
    truth = _gradients(plain, CrossEntropy())
    for name, gradient in _gradients(padded, loss).items():
        torch.testing.assert_close(gradient[: len(truth[name])], truth[name], rtol=1e-11, atol=1e-14)
        assert not gradient[len(truth[name]) :].any()


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_padded_rows_stay_zero_while_all_others_train(loss: CrossEntropy) -> None:
    model = _gpt(vocab_multiple=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        _gradients(model, loss)
        optimizer.step()
    assert not model.tokens.weight[VOCABULARY:].any()
    assert (model.tokens.weight[:VOCABULARY] != _gpt().tokens.weight).all()


def test_a_multiple_is_padded_by_nothing() -> None:
    settings: dict[str, int] = {"seq_len": 12, "n_layer": 1, "n_head": 2, "n_embd": 16}
    assert GPT(vocab_size=64, vocab_multiple=64, **settings).tokens.weight.shape == (64, 16)
    with pytest.raises(ConfigError, match=r"model.vocab_multiple=0: must be at least 1"):
        GPT(vocab_size=64, vocab_multiple=0, **settings)


ENGINES: dict[str, EngineConfig] = {"ddp": DDPConfig(), "fsdp2": FSDP2Config()}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_an_engine_steps_a_padded_model_by_the_true_gradient(engine: EngineConfig, loss: CrossEntropy) -> None:
    model, (inputs, labels) = _gpt(vocab_multiple=64), _batch(5)
    copies = deepcopy(model), deepcopy(model)
    F.cross_entropy(model.double()(inputs).flatten(0, 1), labels.flatten()).backward()
    data = DataSpec(train=_samples(5), eval_dataset=None, description="tokens")
    for steps in run_ranks(2, lambda world: _step(world, engine, copies[world.rank], loss, data)):
        assert _error(steps, model) < 5e-7


def test_it_is_gpt2_parameter_by_parameter() -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, int] = {"n_positions": 12, "n_layer": 2, "n_head": 2, "n_embd": 16}
    options = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(1)
    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **options)).double()
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.3)  # biases and norms too
    own = _gpt(positions="learned", bias=True, gelu="tanh").double()
    parts = {
        "attention_norm": "ln_1",
        "attention.query_key_value": "attn.c_attn",
        "attention.project": "attn.c_proj",
        "norm": "ln_2",
        "expand": "mlp.c_fc",
        "contract": "mlp.c_proj",
    }
    names = {"tokens.weight": "wte.weight", "positions.weight": "wpe.weight"}
    names |= {f"norm.{kind}": f"ln_f.{kind}" for kind in ("weight", "bias")}
    for i in range(2):
        for mine, its in parts.items():
            names |= {f"blocks.{i}.{mine}.{kind}": f"h.{i}.{its}.{kind}" for kind in ("weight", "bias")}
    given = other.transformer.state_dict()
    assert sorted(names.values()) == sorted(given)
    linear = {name for name, module in own.named_modules() if isinstance(module, nn.Linear)}
    state = {
        mine: given[its].T if mine.removesuffix(".weight") in linear else given[its] for mine, its in names.items()
    }
    own.load_state_dict(state)
    ids = torch.randint(VOCABULARY, (3, 12))
    torch.testing.assert_close(own(ids), other(ids).logits, rtol=1e-10, atol=1e-10)
    exact = _gpt(positions="learned", bias=True).double()
    exact.load_state_dict(own.state_dict())
    assert (own(ids) - exact(ids)).abs().max() > 1e-4  # the approximation is seen


def test_rotary_tables_are_the_same_after_the_meta_device_and_no_part_of_a_checkpoint() -> None:
    model = _gpt()
    positions = torch.arange(12, dtype=torch.float64)
    angles = torch.outer(positions, 10_000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8))
    torch.testing.assert_close(model.rotation.cosine.double(), angles.cos(), rtol=0, atol=1e-5)
    torch.testing.assert_close(model.rotation.sine.double(), angles.sin(), rtol=0, atol=1e-5)
    with torch.device("meta"):
        empty = _gpt()
    empty.rotation.to_empty(device="cpu").reset_parameters()
    assert torch.equal(empty.rotation.cosine, model.rotation.cosine)
    assert torch.equal(empty.rotation.sine, model.rotation.sine)
    assert not [name for name in model.state_dict() if name.startswith("rotation")]


@pytest.mark.parametrize("kernel", ["math", "flash"])
def test_every_attention_kernel_computes_the_same(kernel: str) -> None:
    truth = _gradients(_gpt().double(), CrossEntropy())
    for name, gradient in _gradients(_gpt(attention=kernel), CrossEntropy()).items():
        torch.testing.assert_close(gradient.double(), truth[name], rtol=1e-4, atol=1e-5)


def test_the_kernel_that_was_chosen_is_the_one_that_runs() -> None:
    with torch.profiler.profile() as profile:
        _gpt(attention="math")(torch.zeros(1, 4).long())
    called = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_attention_math" in called
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" not in called


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's reasons
def test_a_kernel_that_is_not_there_is_refused_by_name() -> None:
    expected = "model.attention=cudnn: torch has no such kernel for torch.float32 of head width 8 on cpu"
    with pytest.raises(ConfigError, match=expected):
        _gpt(attention="cudnn")(torch.zeros(1, 4).long())


@pytest.mark.parametrize(
    ("setting", "value", "choices"),
    [
        ("attention", "fast", "auto, flash, efficient, cudnn, math"),
        ("positions", "alibi", "rotary, learned"),
        ("gelu", "relu", "exact, tanh"),
    ],
)
def test_an_unknown_choice_is_refused(setting: str, value: str, choices: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.{setting}={value}: no such choice. Use one of {choices}"):
        _gpt(**{setting: value})


def test_batches_of_other_data_are_named() -> None:
    gpt = GPT(vocab_size=9, seq_len=4, n_layer=1, n_head=1, n_embd=4)
    cases: list[tuple[Any, Any, str]] = [
        (
            gpt,
            torch.ones(2, 4),
            r"token ids, int64 \(batch, length\), and the data gives float32 \(2, 4\): .*model=cnn",
        ),
        (gpt, torch.ones(2, 3, 4).long(), r"gives int64 \(2, 3, 4\)"),
        (CNN(channels=1, classes=2), torch.ones(2, 3, 8, 8), r"one channel.*and the data gives float32 \(2, 3, 8, 8\)"),
    ]
    for model, batch, says in cases:
        with pytest.raises(MisuseError, match=says):
            model(batch)
    with pytest.raises(
        MisuseError, match=r"batches \(inputs, labels\), and the data gives {x: float32 \(2,\), y: int}"
    ):
        CrossEntropy().count({"x": torch.ones(2), "y": 1})  # type: ignore[arg-type]
