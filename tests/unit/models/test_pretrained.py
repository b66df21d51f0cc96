"""Models of Hugging Face: nothing is downloaded, they are made of configurations and written into folders first."""

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distaccum.data.datasets.tokenizer import load_tokenizer, train_tokenizer
from distaccum.errors import ConfigError
from distaccum.models.pretrained import pretrained
from distaccum.tools.hub import fetched
from tests.support.optional import Library

transformers = Library("transformers")

TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
ROWS = [{"prompt": f"What is {i} + {i}?", "completion": f" It is {2 * i}, I think."} for i in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in bf16 with its tokenizer."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**TINY)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    train_tokenizer([row["prompt"] + row["completion"] for row in ROWS], vocab_size=300).save_pretrained(path)
    return path


def test_a_folders_weights_are_there_in_fp32_and_ready_to_train(folder: Path) -> None:
    model = pretrained(name=str(folder))
    source = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert model.training
    assert not model.config.use_cache
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for name, parameter in source.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter.float()), name


def test_a_configuration_alone_gives_random_weights_of_the_seed(folder: Path) -> None:
    made = []
    for name in (str(folder), "llama"):
        for _ in range(2):
            torch.manual_seed(3)
            made.append(pretrained(name=name, from_config=True, options=TINY).state_dict())
    for other in made[1:]:
        assert all(torch.equal(value, other[name]) for name, value in made[0].items())


def test_a_head_that_the_folder_lacks_is_refused_until_it_is_named(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    task = {"task": "sequence_classification", "options": {"num_labels": 3}}
    with pytest.raises(ConfigError, match=r"has no score.weight.*model.fresh=\[score\.\*\]"):
        pretrained(name=str(folder), **task)
    model = pretrained(name=str(folder), **task, fresh=["score.*"])
    assert model.get_parameter("score.weight").shape == (3, 16)
    with pytest.raises(ConfigError, match=r"fits no weight that is missing"):
        pretrained(name=str(folder), **task, fresh=["score.*", "classifier.*"])
    assert "score.weight" not in caplog.text  # transformers' table of what is missing


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "causal"}, r"no such task.*causal_lm"),
        ({"name": "nowhere/at-all/no"}, r"^model\.name=nowhere/at-all/no: no such folder\. Give one that is there"),
        ({"options": {"hiden_size": 8}}, r"model.options.hiden_size.*no such setting.*hidden_size"),
        ({"from_config": True, "fresh": ["score.*"]}, r"model\.fresh"),
    ],
)
def test_what_cannot_be_is_refused_by_name(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pretrained(**{"name": str(folder), **settings})


@pytest.mark.parametrize(("key", "load"), [("model.name", pretrained), ("data.tokenizer", load_tokenizer)])
def test_a_hub_out_of_reach_is_one_message(key: str, load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=f"^{key}=no-one/such: no folder, not in the cache, and the hub cannot be"):
        load(name="no-one/such")
    assert fetched(key, "no-one/such", dict) == {"local_files_only": True}  # as of what the cache has


def test_a_model_on_the_meta_device_is_refused(folder: Path) -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match=r"engine\.meta_init"):
        pretrained(name=str(folder))
