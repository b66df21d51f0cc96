"""Classes and tasks between data, losses and models of Hugging Face, and what is exported: nothing is downloaded."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from distaccum import DataSpec, SequenceClassification
from distaccum.checkpoint import weights
from distaccum.config.schema import RunConfig
from distaccum.data.datasets.tokenizer import train_tokenizer
from distaccum.errors import ConfigError
from distaccum.models.pretrained import pretrained
from distaccum.tools.export import average_evaluated, export
from distaccum.tools.hugging_face import check, class_names, from_data
from distaccum.tools.targets import targets
from distaccum.train.adapters import set_base_aside
from distaccum.train.components import components_from_config
from tests.support.commands import ROOT, succeed
from tests.support.optional import Library, needs

transformers = Library("transformers")
pytestmark = needs("transformers", "peft")
TINY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
TEXTS = [f"{what} number {i}" for i in range(12) for what in ("a fine lamp", "a dull book", "so so, a chair")]
NAMES = ["good", "bad", "middling"] * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bert``, ``llama`` and ``tied``, a Llama with tied embeddings, and the files of texts."""
    path = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    torch.manual_seed(1)
    sizes = {"vocab_size": len(tokenizer), **TINY}
    transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).save_pretrained(path / "bert")
    for name in ("llama", "tied"):
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=name == "tied")
        transformers.LlamaForCausalLM(config).save_pretrained(path / name)
    for name in ("bert", "llama", "tied"):
        tokenizer.save_pretrained(path / name)
    _write(path / "train.csv", NAMES)
    _write(path / "several.csv", ['["good", "new"]', "bad, new", "bad", "[]"] * 9)
    _write(path / "numbers.csv", ["0.5", "-1", "2e0"] * 12)
    _write(path / "two.csv", ["bad", "good"] * 18)
    return path


def _write(file: Path, labels: list[str]) -> None:
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows([("text", "label"), *zip(TEXTS, labels, strict=True)])


def _node(folder: Path, model: str = "bert", **settings: Any) -> dict[str, Any]:
    fresh = ["bert.pooler.*", "classifier.*"] if model == "bert" else ["score.*"]
    node = {"name": str(folder / model), "task": "sequence_classification", "fresh": fresh, **settings}
    return {"_target_": "distaccum.models.pretrained.pretrained", **node}


def _components(folder: Path, file: str, problem: str, model: dict[str, Any], **data: Any) -> Any:
    read = {"path": str(folder / file), "tokenizer": str(folder / "bert"), "problem": problem, **data}
    values = {
        "model": model,
        "data": {"_target_": "distaccum.data.datasets.labelled.labelled", **read},
        "loss": {"_target_": "distaccum.losses.transformers.SequenceClassification", "problem": problem},
        "metrics": {"wandb": {"mode": "disabled"}},
    }
    return components_from_config(RunConfig.from_dict(values), world_size=1, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("problem", "stated", "classes", "expected"),
    [
        ("single_label", ["b", "a", "b"], (), ([1, 0, 1], ("a", "b"))),
        ("single_label", ["10", "9", "-1"], (), ([2, 1, 0], ("-1", "9", "10"))),
        ("single_label", ["10", "9", "x"], (), ([0, 1, 2], ("10", "9", "x"))),
        ("single_label", ["a", "b"], ["b", "c", "a"], ([2, 0], ("b", "c", "a"))),
        ("multi_label", ["b, a", '["a"]', "[]", "b"], (), ([[1, 1], [1, 0], [0, 0], [0, 1]], ("a", "b"))),
        ("regression", ["1", "-2.5", "1e3"], (), ([1, -2.5, 1000], ())),
    ],
)
def test_labels_are_what_the_problem_takes(problem: str, stated: list[str], classes: Any, expected: Any) -> None:
    found, names = targets("x.csv", list(enumerate(stated)), "label", classes, problem)
    assert ([one.tolist() for one in found], names) == expected
    assert {one.dtype for one in found} == {torch.int64 if problem == "single_label" else torch.float32}


@pytest.mark.parametrize(
    ("problem", "stated", "classes", "message"),
    [
        ("single", ["a"], (), r"data\.problem=single: no such problem; did you mean single_label\?"),
        ("regression", ["1", "high"], (), r"line 1: 'high' in column 'label' is no number"),
        ("regression", ["1", "nan"], (), r"line 1: 'nan' in column 'label' is no number"),
        ("multi_label", ['["a"'], (), r"line 0: '\[\"a\"' in column 'label' is no list"),
        ("single_label", ["a", "b"], ["a", "c"], r"data\.classes=\['a', 'c'\]: has no b, which x\.csv has"),
        ("multi_label", ["[]", ""], (), r"data\.label=label: is empty on every line"),
    ],
)
def test_labels_that_are_none_are_refused(problem: str, stated: list[str], classes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        targets("x.csv", list(enumerate(stated)), "label", classes, problem)


@pytest.mark.parametrize(
    ("file", "problem", "names", "kind"),
    [
        ("train.csv", "single_label", ["bad", "good", "middling"], "single_label_classification"),
        ("several.csv", "multi_label", ["bad", "good", "new"], "multi_label_classification"),
        ("numbers.csv", "regression", ["LABEL_0"], "regression"),
    ],
)
def test_a_classifiers_configuration_follows_from_data_and_loss(
    folder: Path, file: str, problem: str, names: list[str], kind: str
) -> None:
    config = _components(folder, file, problem, _node(folder)).model.config
    assert (config.num_labels, list(config.id2label.values()), config.problem_type) == (len(names), names, kind)
    assert [config.label2id[name] for name in names] == list(range(len(names)))


@pytest.mark.parametrize(
    ("file", "problem", "options", "message"),
    [
        ("two.csv", "single_label", {"num_labels": 3}, r"has 3 labels, and the data 2 classes \(bad, good\)\. Use"),
        (
            "two.csv",
            "single_label",
            {"id2label": {0: "Good", 1: "Bad"}},
            r"numbers its classes Good, Bad, and the data bad, good\. Use data\.classes=\[Good,Bad\]",
        ),
        ("numbers.csv", "regression", {"num_labels": 2}, r"has 2 labels, and the data 1 values in a sample's labels"),
        ("several.csv", "multi_label", {"num_labels": 2}, r"has 2 labels, and the data 3 classes \(bad, good, new\)"),
    ],
)
def test_other_classes_than_the_datas_are_one_line(
    folder: Path, file: str, problem: str, options: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^model=BertForSequenceClassification: {message}") as refused:
        _components(folder, file, problem, _node(folder, options=options))
    assert len(str(refused.value).splitlines()) == 1


def test_the_order_of_a_models_own_classes_is_not_lost(folder: Path, tmp_path: Path) -> None:
    """Of a head that is loaded: what was class 0 stays class 0, or is refused."""
    own = {"num_labels": 2, "id2label": {0: "GOOD", 1: "BAD"}, "label2id": {"GOOD": 0, "BAD": 1}}
    pretrained(name=str(folder / "bert"), task="sequence_classification", options=own, fresh=["*"]).save_pretrained(
        tmp_path
    )
    node = _node(tmp_path, "", fresh=[])
    with pytest.raises(ConfigError, match=r"numbers its classes GOOD, BAD, and the data bad, good"):
        _components(folder, "two.csv", "single_label", node)
    parts = _components(folder, "two.csv", "single_label", node, classes=["good", "bad"])
    assert list(parts.model.config.id2label.values()) == ["good", "bad"]
    with pytest.raises(
        ConfigError, match=r"has no classifier\.bias, classifier\.weight of that shape.*fresh=\[classifier\.\*\]"
    ):
        _components(folder, "train.csv", "single_label", node)
    assert _components(folder, "train.csv", "single_label", node | {"fresh": ["classifier.*"]}).model.num_labels == 3


def test_names_of_classes_come_from_whoever_has_them() -> None:
    label, other = SimpleNamespace(names=["cat", "dog"]), SimpleNamespace(names=["x", "y", "z"])
    tags = SimpleNamespace(feature=SimpleNamespace(names=["O", "B"]))
    featured: Any = type("Featured", (list,), {})
    rows = [{"labels": torch.tensor(0)}]
    for features, expected in (({"a": other, "label": label}, ["cat", "dog"]), ({"ner_tags": tags}, ["O", "B"])):
        train = featured(rows)
        train.features = features
        assert class_names(DataSpec(train=train)) == expected
        assert class_names(DataSpec(train=train, classes=("p", "q"))) == ["p", "q"]
    told = from_data(DataSpec(train=rows, classes=("p", "q")), SequenceClassification())
    assert told["label2id"] == {"p": 0, "q": 1}
    named: Any = SimpleNamespace(config=SimpleNamespace(id2label={0: "no", 1: "yes"}))
    assert class_names(DataSpec(train=rows, classes=("p", "q")), named) == ["no", "yes"]
    with pytest.raises(ConfigError, match=r"labels are numbers of classes \(p, q\)\. Use data\.problem=regression"):
        check(DataSpec(train=rows, classes=("p", "q")), nn.Linear(1, 1), SequenceClassification(problem="regression"))
    tokens: Any = type("TinyLMHeadModel", (nn.Linear,), {})(1, 1)
    with pytest.raises(ConfigError, match=r"^model=TinyLMHeadModel: predicts tokens, and the loss is of whole samples"):
        check(DataSpec(train=rows), tokens, SequenceClassification())


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("bert", "train.csv", "single_label"), marks=pytest.mark.heavy),
        pytest.param(("llama", "train.csv", "single_label", "model.lora.r=2"), marks=pytest.mark.heavy),
        ("bert", "several.csv", "multi_label", "callbacks=ema", "callbacks.ema.evaluate=true"),
        pytest.param(("bert", "numbers.csv", "regression"), marks=pytest.mark.heavy),
    ],
)
def test_a_pipeline_says_what_predict_says(folder: Path, tmp_path: Path, case: tuple[str, ...]) -> None:
    """Trained and predicted on two ranks, exported, and read by transformers, which is the ground truth."""
    model, file, problem, *more = case
    run, out = tmp_path / "run", tmp_path / "out"
    fresh = ",".join(_node(folder, model)["fresh"])
    settings = [f"model.name={folder / model}", f"model.fresh=[{fresh}]", f"data.path={folder / file}", "optim.lr=1e-2"]
    settings += [f"loss.problem={problem}", "trainer.max_epochs=1", "batch.global_size=8", "batch.micro_size=4"]
    succeed("experiment=finetune-classifier", *settings, *more, "metrics=jsonl", f"hydra.run.dir={run}", world=2)
    merge = ("--merge",) if "model.lora.r=2" in more else ()
    done = succeed(run, out, "--best", *merge, script=ROOT / "distaccum" / "tools" / "export.py")
    average = "the moving average of the weights" if "callbacks=ema" in more else "the weights that train"
    assert done.stdout.endswith(f", {average}\n")
    (tmp_path / "new.csv").write_text("\n".join(["id,text", *(f'{i},"{text}"' for i, text in enumerate(TEXTS[::3]))]))
    arguments = (run, f"data={tmp_path}/new.csv", f"out={tmp_path}/out.jsonl")
    succeed(*arguments, script=ROOT / "distaccum" / "tools" / "predict.py", world=2)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    pipeline = transformers.pipeline("text-classification", str(out))
    assert pipeline.model.config.problem_type.startswith(problem)
    found = pipeline(TEXTS[::3], top_k=None)
    near = {"rel": 1e-4, "abs": 1e-6}
    for row, one in zip(rows, found, strict=True):
        scores = {each["label"]: each["score"] for each in one}
        if problem == "single_label":
            best = max(scores, key=lambda name: scores[name])
            assert (row["name"], row["probability"]) == (best, pytest.approx(scores[best], **near))
        elif problem == "multi_label":
            named = dict(zip(["bad", "good", "new"], row["probabilities"], strict=True))
            assert named == pytest.approx(scores, **near)
            assert row["names"] == [name for name, each in named.items() if each > 0.5]
        else:
            assert row["value"] == pytest.approx(scores["LABEL_0"], **near)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")  # PEFT's, of what is proved here
@pytest.mark.parametrize(
    ("model", "more"),
    [
        pytest.param("llama", (), marks=pytest.mark.heavy),
        ("llama", ("model.base_dtype=bf16", "precision=bf16")),
        ("tied", ("model.lora.modules_to_save=[lm_head]", "callbacks=ema", "callbacks.ema.evaluate=true")),
    ],
)
def test_a_merged_model_gives_the_logits_of_its_adapters(
    folder: Path, tmp_path: Path, model: str, more: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    settings = ["data.prompt=label", "data.completion=text", f"data.path={folder / 'train.csv'}", "optim.lr=1e-2"]
    settings += [f"model.name={folder / model}", "trainer.max_steps=4", "batch.global_size=8", "batch.micro_size=8"]
    succeed("experiment=finetune-lora", *settings, *more, "metrics=jsonl", f"hydra.run.dir={run}")
    checkpoint = run / "checkpoints" / "step-4"
    merged = tmp_path / "merged"
    export(checkpoint, merged, merge=True)
    export(checkpoint, tmp_path / "bf16", merge=True, dtype="bf16")
    node = json.loads((checkpoint / "state.json").read_text())["config"]["model"]
    torch.manual_seed(1337)
    trained: Any = pretrained(**{key: value for key, value in node.items() if key != "_target_"})
    set_base_aside(trained)
    before = {name: p.clone() for name, p in trained.named_parameters() if p.requires_grad}
    weights.fill(trained, checkpoint, average=average_evaluated(checkpoint))
    assert average_evaluated(checkpoint) == ("ema" if "callbacks=ema" in more else "")
    assert any(not torch.equal(before[name], trained.get_parameter(name)) for name in before)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = trained.float().eval()(input_ids=ids).logits
        found = transformers.AutoModelForCausalLM.from_pretrained(merged)
        assert found.config.use_cache
        torch.testing.assert_close(found.eval()(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
        half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    assert tokenizer("a fine lamp") == transformers.AutoTokenizer.from_pretrained(folder / model)("a fine lamp")
