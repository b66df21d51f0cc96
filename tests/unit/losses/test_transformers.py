"""Against the losses that the Hugging Face models compute themselves, in fp64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum.errors import ConfigError, MisuseError
from distaccum.losses.base import Loss, Predictor, Scorer
from distaccum.losses.transformers import CausalLM, MaskedLM, SequenceClassification
from tests.support.optional import Library

transformers = Library("transformers")

SAMPLES, LENGTH, VOCABULARY = 7, 9, 23
Case = Callable[[], tuple[Loss, nn.Module, dict[str, Tensor]]]


def _bert(head: str, **options: Any) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        **options,
    )
    model: nn.Module = getattr(transformers, head)(config)
    return model.double()


def _gpt2() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    still: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **still)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model.double()


def _tokens() -> dict[str, Tensor]:
    """Samples of unequal length, padded behind."""
    ids = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH))
    lengths = torch.tensor([9, 3, 5, 9, 2, 8, 1])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def _causal() -> tuple[Loss, nn.Module, dict[str, Tensor]]:
    batch = _tokens()
    return CausalLM(), _gpt2(), batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def _masked() -> tuple[Loss, nn.Module, dict[str, Tensor]]:
    batch = _tokens()
    kept = (torch.rand(SAMPLES, LENGTH) < 0.6) | (batch["attention_mask"] == 0)
    labels = batch["input_ids"].masked_fill(kept, -100)
    return MaskedLM(), _bert("BertForMaskedLM"), batch | {"labels": labels}


def _classes() -> tuple[Loss, nn.Module, dict[str, Tensor]]:
    labels = torch.tensor([0, 2, 1, -100, 1, 0, -100])
    model = _bert("BertForSequenceClassification", num_labels=3, problem_type="single_label_classification")
    return SequenceClassification(), model, _tokens() | {"labels": labels}


def _regression(values: int) -> Case:
    def make() -> tuple[Loss, nn.Module, dict[str, Tensor]]:
        labels = torch.randn(SAMPLES, values).double().squeeze(1)
        model = _bert("BertForSequenceClassification", num_labels=values, problem_type="regression")
        return SequenceClassification(problem="regression"), model, _tokens() | {"labels": labels}

    return make


def _several_labels() -> tuple[Loss, nn.Module, dict[str, Tensor]]:
    labels = torch.randint(2, (SAMPLES, 4)).double()
    model = _bert("BertForSequenceClassification", num_labels=4, problem_type="multi_label_classification")
    return SequenceClassification(problem="multi_label"), model, _tokens() | {"labels": labels}


CASES = [_causal, _masked, _classes, _regression(1), _regression(3), _several_labels]
NAMES = ["causal", "masked", "single_label", "regression of one", "regression of three", "multi_label"]


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_sums_over_micro_batches_divided_once_are_the_models_own_loss(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)  # transformers rounds the logits of causal models to fp32
    torch.manual_seed(0)
    loss, model, batch = case()
    expected = model(**batch).loss
    expected.backward()
    expected_gradients = _gradients(model)

    micro_batches = [{name: part[a:b] for name, part in batch.items()} for a, b in ((0, 2), (2, 6), (6, 7))]
    count = sum(float(loss.count(micro)) for micro in micro_batches)  # type: ignore[arg-type]
    total = torch.zeros((), dtype=torch.float64)
    for micro in micro_batches:
        part = loss(model, micro)
        assert isinstance(part, Tensor)
        (part / count).backward()
        total += part.detach()

    torch.testing.assert_close(total / count, expected.detach(), rtol=1e-12, atol=1e-12)
    found = _gradients(model)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_scores_and_predictions_are_of_what_counts(case: Case) -> None:
    torch.manual_seed(1)
    loss, model, batch = case()
    assert isinstance(loss, Scorer)
    assert isinstance(loss, Predictor)
    with torch.no_grad():
        found, (predictions, targets) = loss.scores(model, batch), loss.predictions(model, batch)
        torch.testing.assert_close(found["loss"], loss(model, batch))
    assert targets.numel() == loss.count(batch)
    if targets.is_floating_point() and case is not _several_labels:
        assert "accuracy" not in found
        torch.testing.assert_close(found["loss"], ((predictions - targets) ** 2).sum())
    else:
        named = predictions > 0 if case is _several_labels else predictions.argmax(-1)
        assert found["accuracy"] == (named == targets).sum()


class Given(nn.Module):
    """Gives logits that were computed beforehand, in one of the forms that models use."""

    def __init__(self, logits: Tensor, form: Callable[[Tensor], Any] = lambda logits: {"logits": logits}) -> None:
        super().__init__()
        self.logits, self.form = logits, form
        self.seen: set[str] = set()

    def forward(self, **inputs: Tensor) -> Any:
        """All inputs are noted by name."""
        self.seen = set(inputs)
        return self.form(self.logits)


def test_weighted_samples_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.5, 1.5], [3.0, -1.0]], dtype=torch.float64)
    batch = {"x": torch.zeros(3), "labels": torch.tensor([1, 1, -100]), "w": torch.tensor([0.5, 3.0, 100.0])}
    loss, model = SequenceClassification(weights="w"), Given(logits)
    first, second = torch.log(torch.tensor([1.0, 1.0]).double() + torch.tensor([2.0, -1.0]).double().exp())
    assert loss.count(batch) == 3.5
    torch.testing.assert_close(loss(model, batch), 0.5 * first + 3 * second, rtol=1e-14, atol=0)
    assert loss.scores(model, batch)["accuracy"] == 3
    assert model.seen == {"x"}


def test_weighted_values_count_each() -> None:
    batch = {"labels": torch.tensor([[1, 0], [0, 0]]), "w": torch.tensor([2.0, 0.5])}
    logits = torch.tensor([[3.0, 1.0], [1.0, 2.0]])
    loss = SequenceClassification(problem="regression", weights="w")
    assert loss.count(batch) == 5
    assert loss(Given(logits), batch) == 2 * (4 + 1) + 0.5 * (1 + 4)


def test_the_tokens_of_a_weighted_sample_weigh_alike() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 4, 5).double()
    labels = torch.tensor([[1, 2, 3, 4], [0, 1, -100, -100]])
    batch = {"input_ids": labels, "labels": labels, "w": torch.tensor([0.25, 2.0])}
    log_p = logits.log_softmax(-1)
    first = -sum(log_p[0, t, labels[0, t + 1]] for t in range(3))
    second = -log_p[1, 0, 1]
    loss = CausalLM(weights="w")
    assert loss.count(batch) == 3 * 0.25 + 2
    torch.testing.assert_close(loss(Given(logits), batch), 0.25 * first + 2 * second, rtol=1e-14, atol=0)
    assert CausalLM().count(batch) == 4


@pytest.mark.parametrize("form", [lambda x: x, lambda x: (x, "more"), lambda x: {"loss": 1, "logits": x}])
def test_logits_are_found_and_summed_in_fp32(form: Callable[[Tensor], Any]) -> None:
    logits, batch = torch.randn(3, 4).bfloat16(), {"labels": torch.tensor([0, 1, 2])}
    total = SequenceClassification()(Given(logits, form), batch)
    assert total.dtype is torch.float32
    torch.testing.assert_close(total, nn.functional.cross_entropy(logits.float(), batch["labels"], reduction="sum"))


def test_a_sample_of_one_token_counts_nothing() -> None:
    batch = {"labels": torch.tensor([[3]])}
    assert CausalLM().count(batch) == 0
    assert CausalLM()(Given(torch.randn(1, 1, 5)), batch) == 0


def test_what_cannot_work_is_named() -> None:
    with pytest.raises(ConfigError, match=r"loss\.problem=ranking: no such problem"):
        SequenceClassification(problem="ranking")
    for batch in ({"label": torch.ones(2)}, {"labels": ["a", "b"]}):
        with pytest.raises(MisuseError, match=r"takes batches with labels, .* gives \{label.*class_encode_column"):
            SequenceClassification().count(batch)
    with pytest.raises(MisuseError, match="Given gives no logits"):
        MaskedLM()(Given(torch.ones(1), lambda x: {"hidden": x}), {"labels": torch.tensor([0])})
