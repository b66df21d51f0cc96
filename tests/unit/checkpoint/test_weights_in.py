"""Weights to start from: Hugging Face's folders as they are, and differences that are allowed by name."""

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from distaccum.checkpoint import weights
from distaccum.checkpoint.tensors import TensorFiles
from distaccum.config.schema import RunConfig
from distaccum.engines.modules import shard_like
from distaccum.errors import ConfigError

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  seconds to import

    return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))


def _bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415

    return BertForSequenceClassification(BertConfig(**SMALL, num_labels=3))


def _t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration  # noqa: PLC0415

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "shard"), [(_llama, "4KB"), (_bert, "5GB"), (_t5, "4KB")])
def test_a_folder_of_hugging_face_comes_back_bit_by_bit(make: Callable[[], Any], shard: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = make()
    saved.save_pretrained(tmp_path, max_shard_size=shard)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (shard == "4KB")
    torch.manual_seed(1)
    model = make()
    assert weights.check(model, tmp_path) == weights.Differences()
    weights.fill(model, tmp_path)
    again = type(saved).from_pretrained(tmp_path).state_dict()
    found = model.state_dict()
    assert found.keys() == again.keys()
    assert all(torch.equal(found[name], again[name]) for name in again)


@pytest.mark.parametrize("head", [True, False], ids=["a new head", "without the head"])
def test_a_model_and_its_body_have_one_anothers_names(head: bool, tmp_path: Path) -> None:
    """As from_pretrained: a body's file has names without the prefix, a whole model's file has them with it."""
    torch.manual_seed(0)
    whole = _bert()
    saved, model = (whole.bert, _bert()) if head else (whole, _bert().bert)
    saved.save_pretrained(tmp_path)
    allowed = {"missing": ["classifier.*"]} if head else {"unexpected": ["classifier.*"]}
    found = weights.check(model, tmp_path, **allowed)
    assert set(found.missing if head else found.unexpected) == {"classifier.weight", "classifier.bias"}
    assert not (found.unexpected if head else found.missing)
    weights.fill(model, tmp_path, missing=found.missing)
    body = model.bert if head else model
    expected = whole.bert.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in body.state_dict().items())


class Body(nn.Module):
    """What was trained before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))


class Classifier(Body):
    """With a head that is new."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(4, 2)


def _save(model: nn.Module, folder: Path, **more: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(dict(model.state_dict()) | more, folder / "model.safetensors")
    return folder


def test_what_is_missing_keeps_its_initial_values(tmp_path: Path) -> None:
    body, model = Body(), Classifier()
    folder = _save(body, tmp_path / "body", pooler=torch.ones(2))
    before = model.score.weight.detach().clone()
    with pytest.raises(ConfigError, match=r"has no score\.weight .*or init\.missing=\[score\.weight\] keeps"):
        weights.check(model, folder)
    with pytest.raises(ConfigError, match=r"has pooler, which .* or init\.unexpected=\[pooler\] leaves it out"):
        weights.check(model, folder, missing=["score.*"])
    found = weights.check(model, folder, missing=["score.*"], unexpected=["pool*"])
    assert found == weights.Differences(missing=("score.weight", "score.bias"), unexpected=("pooler",))
    assert str(found) == "initial values of score.weight, score.bias; without pooler"
    weights.fill(model, folder, missing=found.missing)
    assert torch.equal(model.score.weight, before)
    assert torch.equal(model.layers[1].weight, body.layers[1].weight)


def test_what_is_there_is_read_though_it_might_be_missing(tmp_path: Path) -> None:
    saved, model = Classifier(), Classifier()
    folder = _save(saved, tmp_path / "all")
    found = weights.check(model, folder, missing=["score.*"])
    assert found == weights.Differences()
    weights.fill(model, folder, missing=found.missing)
    assert torch.equal(model.score.weight, saved.score.weight)


def test_a_glob_that_fits_nothing_is_refused(tmp_path: Path) -> None:
    folder = _save(Body(), tmp_path / "body")
    with pytest.raises(ConfigError, match=r"init\.missing=scores\.\*: fits no name"):
        weights.check(Classifier(), folder, missing=["scores.*"])
    with pytest.raises(ConfigError, match=r"init\.unexpected=pool\*: fits no name"):
        weights.check(Classifier(), folder, missing=["score.*"], unexpected=["pool*"])
    with pytest.raises(ConfigError, match="and init_from is null"):
        RunConfig.from_dict({"init": {"missing": ["score.*"]}})


def test_another_shape_is_refused_in_any_case(tmp_path: Path) -> None:
    folder = _save(Body(), tmp_path / "body", **{"score.weight": torch.ones(3, 4)})
    with pytest.raises(ConfigError, match=r"score\.weight of shape \[3, 4\], and the model of \[2, 4\]"):
        weights.check(Classifier(), folder, missing=["score.*"])


def test_a_model_without_memory_has_no_initial_values(tmp_path: Path) -> None:
    folder = _save(Body(), tmp_path / "body")
    with torch.device("meta"):
        model = Classifier()
    with pytest.raises(ConfigError, match=r"would keep initial values, .* engine\.meta_init=false"):
        weights.check(model, folder, missing=["score.*"])


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}, "model-2.*no such file"),
        ({"weight_map": {"a": "../model-1.safetensors"}}, "beside it"),
        ({"weight_map": {}}, "beside it"),
        ({"weights": 1}, "no index"),
        ([], "no index"),
    ],
)
def test_an_index_that_cannot_be_followed_is_refused(index: Any, said: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=said):
        weights.check(Classifier(), tmp_path)


def test_only_what_the_index_names_is_read(tmp_path: Path) -> None:
    body = Body()
    save_file(dict(body.state_dict()), tmp_path / "model-00001-of-00001.safetensors")
    save_file({"layers.0.weight": torch.zeros(4, 4)}, tmp_path / "model-00001-of-00002.safetensors")  # of before
    files = dict.fromkeys(body.state_dict(), "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    model = Body()
    weights.check(model, tmp_path)
    weights.fill(model, tmp_path)
    assert torch.equal(model.layers[0].weight, body.layers[0].weight)


def _read_a_shard(file: Path, told: Path) -> None:
    """As rank 1 of 2: the pages of the file that were mapped for a shard, in bytes, and the shard's first value."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh  # noqa: PLC0415
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415  no second process is needed

    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    files = TensorFiles(file)
    rows, columns = files.shape("weight")
    mesh = init_device_mesh("cpu", (2,))
    pattern = DTensor.from_local(torch.empty(rows // 2, columns), mesh, [Shard(0)], run_check=False)
    before = _mapped()
    shard: Any = shard_like(files["weight"], pattern)
    told.write_text(json.dumps([_mapped() - before, float(shard.to_local()[0, 0])]))


def _mapped() -> int:
    """Bytes of files that this process has mapped and touched."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile")]
    return int(line.split()[1]) * 1024


@pytest.mark.slow
def test_a_sharded_engine_reads_its_slices_alone(tmp_path: Path) -> None:
    weight = torch.arange(1024.0)[:, None].expand(-1, 16384).contiguous()  # 64 MiB
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    arguments = (tmp_path / "model.safetensors", tmp_path / "told.json")
    process = multiprocessing.get_context("spawn").Process(target=_read_a_shard, args=arguments)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    read, first = json.loads((tmp_path / "told.json").read_text())
    assert first == 512.0
    assert 0.5 * weight.nbytes <= read < 0.6 * weight.nbytes
