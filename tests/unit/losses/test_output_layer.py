"""The losses in chunks of other people's models, beside their own loss in fp64."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from distaccum import DataSpec
from distaccum.config.engine import DDPConfig, EngineConfig, FSDP2Config
from distaccum.errors import ConfigError, MisuseError
from distaccum.losses.transformers import CausalLM, MaskedLM
from tests.support.optional import Library
from tests.support.threads import run_ranks
from tests.unit.losses.test_linear_cross_entropy import _error, _Largest, _step
from tests.unit.losses.test_transformers import SAMPLES, VOCABULARY, _causal, _gradients, _masked, _tokens

transformers = Library("transformers")

CHUNK = 10  # of 63 tokens


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("case", [_causal, _masked], ids=["causal", "masked"])
def test_value_gradient_and_scores_are_those_of_whole_logits(case: Any, weighted: bool) -> None:
    torch.manual_seed(0)
    whole, model, batch = case()
    own: Any = CausalLM(chunk=CHUNK) if case is _causal else MaskedLM(chunk=CHUNK)
    if weighted:
        batch |= {"weight": torch.rand(SAMPLES).double()}
        whole.weights = own.weights = "weight"
    assert own.count(batch) == whole.count(batch)
    gradients = []
    for loss in (whole, own):
        loss(model, batch).backward()
        gradients.append(_gradients(model))
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-5, atol=1e-7)  # `whole` is fp64 in part only
    own_scores, scores = own.scores(model, batch), whole.scores(model, batch)
    assert {k: v.item() for k, v in own_scores.items()} == pytest.approx({k: v.item() for k, v in scores.items()})


def test_the_gradient_is_that_of_the_models_own_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    _, model, batch = _causal()
    loss = CausalLM(chunk=CHUNK)
    (loss(model, batch) / loss.count(batch)).backward()
    found = _gradients(model)
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # transformers rounds the logits of causal models to fp32
    model(**batch).loss.backward()
    for name, expected in _gradients(model).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-13)


def test_no_tensor_of_tokens_times_vocabulary_is_made_and_the_model_is_the_same_without_the_loss() -> None:
    torch.manual_seed(0)
    _, model, batch = _causal()
    inputs = {name: part for name, part in batch.items() if name != "labels"}
    before = model(**inputs).logits
    sizes = []
    for loss in (CausalLM(), CausalLM(chunk=CHUNK)):
        wide = deepcopy(model)
        wide.resize_token_embeddings(2000)  # far more than any other size of the model
        with _Largest() as largest:
            loss(wide, batch).backward()
        sizes.append(largest.elements)
    weight = 2000 * 16
    assert sizes == [batch["labels"].numel() * 2000, max(CHUNK * 2000, weight)]
    CausalLM(chunk=CHUNK)(model, batch)
    assert torch.equal(model(**inputs).logits, before)
    assert torch.equal(deepcopy(model)(**inputs).logits, before)


def _gemma2(cap: float | None) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.Gemma2Config(vocab_size=VOCABULARY, final_logit_softcapping=cap, **sizes, **heads)
    model: nn.Module = transformers.Gemma2ForCausalLM(config)
    return model


class _Other(nn.Module):
    """A model of someone's own, that halves its logits."""

    def __init__(self, head: nn.Module, factor: float = 0.5, calls: int = 1) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), head
        self.factor, self.calls = factor, calls

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        hidden = self.embed(input_ids)
        logits = [self.head(hidden) for _ in range(self.calls)]
        return ((logits[0] if logits else hidden) * self.factor,)


def test_a_model_that_does_more_to_its_logits_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as refusal:
        CausalLM(chunk=CHUNK).check_model(_gemma2(30.0))
    assert str(refusal.value) == (
        "loss.chunk=10: Gemma2ForCausalLM changes its logits (final_logit_softcapping=30.0), which a loss in "
        "chunks cannot see. Leave the chunk out: the loss then takes whole logits"
    )
    plain, batch = _gemma2(None).double(), _tokens()
    batch |= {"labels": batch["input_ids"]}
    wanted = CausalLM()(plain, batch).item()
    assert CausalLM(chunk=CHUNK)(plain, batch).item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (_Other(nn.Linear(8, VOCABULARY)), "_Other changes its logits, behind the output layer"),
        (_Other(nn.Linear(8, VOCABULARY), factor=1, calls=2), "calls its output layer twice in a forward"),
        (_Other(nn.Linear(8, VOCABULARY), calls=0), "does not call the layer that its get_output_embeddings"),
        (_Other(nn.Sequential(nn.Linear(8, VOCABULARY))), "output layer of _Other is a Sequential, and a plain"),
        (nn.Linear(8, 8), r"Linear has no get_output_embeddings\(\)"),
    ],
    ids=["scaled", "twice", "never", "no Linear", "no method"],
)
def test_a_model_that_would_train_on_another_loss_is_refused(model: nn.Module, expected: str) -> None:
    batch = _tokens()
    batch |= {"labels": batch["input_ids"]}
    with pytest.raises((ConfigError, MisuseError), match=expected):
        MaskedLM(chunk=CHUNK)(model, batch)


@pytest.mark.parametrize("first", [-100, 0], ids=["nothing to count", "an infinite loss"])
def test_a_batch_whose_loss_a_change_leaves_as_it_is_proves_nothing(first: int) -> None:
    head = nn.Linear(8, VOCABULARY)
    model, batch = _Other(head), _tokens()
    batch |= {"labels": batch["input_ids"]}
    loss = MaskedLM(chunk=CHUNK)
    with torch.no_grad():
        weight = head.weight.clone()
        head.weight.mul_(1e38).mul_(1e38 if first == 0 else 0)
        empty = batch | {"labels": torch.full_like(batch["labels"], first)}
        loss(model, empty)
        head.weight.copy_(weight)
    with pytest.raises(MisuseError, match="_Other changes its logits, behind the output layer"):
        loss(model, batch)


def test_a_model_of_ones_own_needs_no_more_than_the_method() -> None:
    model, batch = _Other(nn.Linear(8, VOCABULARY), factor=1).double(), _tokens()
    batch |= {"labels": batch["input_ids"]}
    assert MaskedLM(chunk=4)(model, batch).item() == pytest.approx(MaskedLM()(model, batch).item(), rel=1e-6)


def test_its_operations_can_be_counted_on_the_meta_device() -> None:
    batch = _tokens()
    batch |= {"labels": batch["input_ids"]}
    batch = {name: part.to("meta") for name, part in batch.items()}
    counts = []
    for loss in (MaskedLM(), MaskedLM(chunk=CHUNK)):
        with FlopCounterMode(display=False) as counter:
            loss(_Other(nn.Linear(8, VOCABULARY), factor=1).to("meta"), batch).backward()
        counts.append(counter.get_total_flops())
    one_token = 2 * 8 * VOCABULARY  # which the output layer is given in place of all
    assert counts[1] == pytest.approx(counts[0], abs=3 * one_token)


ENGINES: dict[str, EngineConfig] = {"ddp": DDPConfig(), "fsdp2": FSDP2Config(sync="every")}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_every_engine_steps_by_the_true_gradient(engine: EngineConfig) -> None:
    """FSDP2 casts floating-point inputs of a forward; a sample's weight has to stay what it is, and a replay too."""
    torch.manual_seed(0)
    _, model, batch = _causal()
    model = model.float()
    batch |= {"weight": torch.rand(SAMPLES) + 0.5}
    samples = [{name: part[i] for name, part in batch.items()} for i in range(5)]
    copies = deepcopy(model), deepcopy(model)
    whole, truth = CausalLM(weights="weight"), model.double()
    first = {name: part[:5] for name, part in batch.items()}
    (whole(truth, first) / whole.count(first)).backward()
    data = DataSpec(train=samples, eval_dataset=None, description="tokens")
    loss = CausalLM(weights="weight", chunk=7)
    for steps in run_ranks(2, lambda world: _step(world, engine, copies[world.rank], loss, data)):
        assert _error(steps, truth) < 2e-6
