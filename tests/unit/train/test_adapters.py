"""Checkpoints of adapters: they alone are saved, with what tells their base, and PEFT reads what is exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distaccum import CausalLM, DataSpec, PadCollator, Trainer
from distaccum.checkpoint.tensors import TensorFiles
from distaccum.errors import CheckpointError, ConfigError
from distaccum.models.pretrained import pretrained
from distaccum.tools.export import export
from tests.support.optional import Library
from tests.support.runs import settings

transformers = Library("transformers")
peft = Library("peft")

pytestmark = [
    pytest.mark.usefixtures("gloo_world"),  # it closes the group that a Trainer opens
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # PEFT asks transformers
]
TINY = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _save(tmp_path_factory.mktemp("llama"), seed=1)


def _save(path: Path, seed: int) -> str:
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, num_key_value_heads=2)).save_pretrained(path)
    return str(path)


def _model(folder: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return pretrained(**{"name": folder, "lora": LORA, **settings})


def _data() -> DataSpec:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(40, (5 + i % 4,), generator=generator) for i in range(24)]
    samples = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]
    pad = PadCollator({"input_ids": 0, "attention_mask": 0, "labels": -100})
    return DataSpec(train=samples, eval_dataset=None, description="rows", collate=pad, ignored={"labels": -100})


def _train(model: nn.Module, run_dir: Path, steps: int, *, resume: str = "never", **more: Any) -> Path:
    groups = {"optim": {"lr": 1e-2}, "checkpoint": {"every": 2, "keep": 0}, **more}
    config = settings((8, 3), {"max_steps": steps}, metrics={"report": False}, resume=resume, **groups)
    Trainer(model, CausalLM(), _data(), run_dir=run_dir, config=config).fit()
    return run_dir / "checkpoints" / f"step-{steps}"


def _trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("base_dtype", ["fp32", "bf16"])
def test_adapters_alone_are_saved_and_the_base_does_not_move(folder: str, tmp_path: Path, base_dtype: str) -> None:
    model = _model(folder, base_dtype=base_dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    path = _train(model, tmp_path / "run", 4, precision={"name": "bf16" if base_dtype == "bf16" else "fp32"})
    after = dict(model.named_parameters())
    assert {after[name].dtype for name in _trained(model)} == {torch.float32}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == set(_trained(model))
    saved = TensorFiles(path, "model")
    assert set(saved) == moved
    assert all(torch.equal(saved[name], after[name]) for name in saved)
    kept = {name.split(".", 1)[1].rpartition(".")[0] for name in TensorFiles(path, "optimizer")}
    assert {name for name in before if any(one.endswith(name) for one in kept)} == moved


def test_a_resumed_run_is_the_same_bitwise(folder: str, tmp_path: Path) -> None:
    through, again = _model(folder), _model(folder)
    _train(through, tmp_path / "through", 4)
    _train(_model(folder), tmp_path / "parts", 2)
    _train(again, tmp_path / "parts", 4, resume="auto")
    assert all(torch.equal(value, _trained(again)[name]) for name, value in _trained(through).items())


def test_another_base_is_refused(folder: str, tmp_path: Path) -> None:
    path = _train(_model(folder), tmp_path / "run", 2)
    other = _save(tmp_path / "other", seed=2)
    with pytest.raises(ConfigError, match=r"model\.name.*its weights are others than those of"):
        _train(_model(other), tmp_path / "next", 4, resume=str(path))
    with pytest.raises(ConfigError, match="was saved with adapters"):
        _train(_model(folder, lora={}), tmp_path / "next", 4, resume=str(path))
    moved = _save(tmp_path / "elsewhere", seed=1)  # the same weights
    _train(_model(moved), tmp_path / "next", 4, resume=str(path), resume_allow=["model"])


def test_peft_loads_what_is_exported_bitwise(folder: str, tmp_path: Path) -> None:
    model = _model(folder)
    path = _train(model, tmp_path / "run", 2)
    assert export(path, tmp_path / "adapter") == len(_trained(model))
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (described["peft_type"], described["r"], described["base_model_name_or_path"]) == ("LORA", 2, folder)
    base = transformers.LlamaForCausalLM.from_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    assert _trained(loaded).keys() == _trained(model).keys()
    assert all(torch.equal(value, _trained(model)[name]) for name, value in _trained(loaded).items())
    ids = torch.arange(6)[None]
    assert torch.equal(loaded.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    with pytest.raises(CheckpointError, match="leave out --config-from"):
        export(path, tmp_path / "again", config_from=Path(folder))


def test_a_model_that_the_user_gave_adapters_is_saved_likewise(folder: str, tmp_path: Path) -> None:
    base = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=2, modules_to_save=["lm_head"]))
    path = _train(model, tmp_path / "run", 2)
    assert set(TensorFiles(path, "model")) == set(_trained(model))
    export(path, tmp_path / "adapter")
    again = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
    ids = torch.arange(6)[None]
    assert torch.equal(loaded.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


def test_a_model_that_trains_more_than_an_adapter_is_saved_whole(folder: str, tmp_path: Path) -> None:
    model = _model(folder)
    model.get_parameter("base_model.model.model.norm.weight").requires_grad_()
    path = _train(model, tmp_path / "run", 2)
    assert set(TensorFiles(path, "model")) == set(model.state_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": {"r": 0}}, r"model\.lora\.r"),
        ({"lora": {"rank": 4}}, r"model\.lora\.rank.*no such setting"),
        ({"lora": {"alpha": 32}}, r"model\.lora\.alpha.*model\.lora\.r is null"),
        ({"lora": {"r": 2, "dropout": 1}}, r"model\.lora\.dropout"),
        ({"lora": {"r": 2, "target_modules": ["query"]}}, r"model\.lora\.target_modules.*query"),
        ({"lora": {}, "base_dtype": "bf16"}, r"model\.base_dtype.*model\.lora\.r is null"),
        ({"base_dtype": "int8"}, r"model\.base_dtype.*no such format"),
    ],
)
def test_what_cannot_be_is_refused_by_name(folder: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _model(folder, **settings)
