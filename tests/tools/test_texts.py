"""Texts at evaluations: what they are, the same on any number of ranks, in every tracker, and without a trace."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from distaccum import Accumulator, CrossEntropy, DataSpec, Trainer
from distaccum.config.engine import DDPConfig, EngineConfig, FSDP2Config
from distaccum.config.trainer import EvalConfig
from distaccum.data.datasets.tokenizer import ByteTokenizer, train_tokenizer
from distaccum.data.datasets.tokens import tokens
from distaccum.distributed.world import World
from distaccum.engines.modules import train_again
from distaccum.errors import ConfigError
from distaccum.losses.transformers import CausalLM
from distaccum.models.gpt import GPT
from distaccum.tools.texts import Prompts, Texts
from distaccum.train.metrics.console import _line
from tests.support.commands import metrics
from tests.support.runs import settings
from tests.support.threads import run_ranks

BYTES = 256


def _gpt(**settings: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=BYTES, seq_len=24, n_layer=1, n_head=2, n_embd=16, **settings)


def _sample(text: bytes) -> tuple[Tensor, Tensor]:
    ids = torch.tensor(list(text))
    return ids[:-1], ids[1:]


def _data(**more: Any) -> DataSpec:
    train = [_sample(f"row {i:03d} of many".encode()) for i in range(16)]
    held_out = [_sample(f"held {i} out of all".encode()) for i in range(4)]
    return DataSpec(**{"train": train, "eval_dataset": held_out, "tokenizer": ByteTokenizer(), **more})


def _trainer(
    folder: Path,
    model: nn.Module,
    data: DataSpec | None = None,
    loss: Any = None,
    *,
    metrics: dict[str, Any] | None = None,
    compile: Any = "none",  # noqa: A002  torch's own word
    eval_every: int = 1,
    lr: float = 0.01,
    **texts: Any,
) -> Trainer:
    trainer, metrics = {"max_steps": 2, "eval_every": eval_every}, {"report": False, **(metrics or {})}
    config = settings((4, 2), trainer, metrics=metrics, optim={"lr": lr}, compile=compile, eval=texts)
    return Trainer(model, loss or CrossEntropy(), data or _data(), config=config, run_dir=folder)


def _likeliest(model: GPT, prompt: bytes, number: int) -> str:
    """Token by token in fp64, with nothing of ``generate``."""
    ids = list(prompt)
    model = deepcopy(model).double().eval()
    with torch.no_grad():
        for _ in range(number):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return bytes(ids[len(prompt) :]).decode(errors="replace")


@pytest.mark.parametrize("prompts", [[], ["a", "row"]])
def test_the_texts_are_what_the_trained_model_goes_on_with(
    prompts: list[str], gloo_world: World, tmp_path: Path
) -> None:
    model = _gpt(dropout=0.5)
    _trainer(tmp_path, model, samples=3, prompt_tokens=5, max_new_tokens=9, temperature=0.0, prompts=prompts).fit()
    begins = ["a", "row", "a"] if prompts else ["held "] * 3
    first, last = metrics(tmp_path)
    assert [one["prompt"] for one in last["eval_texts"]] == begins
    assert [one["text"] for one in last["eval_texts"]] == [_likeliest(model, one.encode(), 9) for one in begins]
    assert [one["prompt"] for one in first["eval_texts"]] == begins


def test_what_is_drawn_follows_the_models_probabilities_and_the_seed() -> None:
    model = _gpt()
    ids = torch.tensor([list(b"row")]).repeat(20000, 1)
    with torch.no_grad():
        truth = (model.double()(ids[:1])[0, -1] / 0.5).softmax(-1)
    torch.manual_seed(1)
    drawn = model.generate(ids, max_new_tokens=1, temperature=0.5)[:, -1]
    shares = torch.bincount(drawn, minlength=BYTES) / len(drawn)
    assert float((shares - truth).abs().sum()) < 0.1  # of two samples of this size: 0.09, of uniform ones: 0.3
    assert not drawn.equal(model.generate(ids, max_new_tokens=1, temperature=0.5)[:, -1])


def test_a_logit_that_is_no_number_ends_no_run() -> None:
    model = _gpt()
    nn.init.constant_(model.norm.weight, float("nan"))
    for temperature in (0.0, 1e-30, 1.0):
        assert model.generate(torch.zeros(1, 2).long(), max_new_tokens=3, temperature=temperature).shape == (1, 5)


class Notes(nn.Module):
    """Writes texts, and notes in a buffer, in modes and with random numbers that it did."""

    notes: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gpt = _gpt(dropout=0.3)
        self.register_buffer("notes", torch.zeros(1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        logits: Tensor = self.gpt(ids)
        return logits * (1 + 0.1 * self.notes)

    def generate(self, ids: Tensor, *, max_new_tokens: int, temperature: float) -> Tensor:
        self.notes += 1
        self.seen = self.seen + 5
        self.gpt.train()
        return self.gpt.generate(ids, max_new_tokens=max_new_tokens, temperature=temperature)


@pytest.mark.parametrize("make", [lambda: _gpt(dropout=0.3), Notes])
def test_a_run_that_writes_texts_ends_in_the_weights_of_one_that_does_not(
    make: Any, gloo_world: World, tmp_path: Path
) -> None:
    states = []
    for samples in (0, 2):
        model = make()
        _trainer(tmp_path / str(samples), model, samples=samples, max_new_tokens=5, prompt_tokens=4).fit()
        train_again(model)
        states.append((model.state_dict(), torch.get_rng_state(), [m.training for m in model.modules()]))
    (without, numbers, modes), (with_texts, *others) = states
    assert all(torch.equal(value, with_texts[name]) for name, value in without.items())
    assert torch.equal(numbers, others[0])
    assert modes == others[1]


@pytest.mark.parametrize("engine", [DDPConfig(), FSDP2Config()], ids=["ddp", "fsdp2"])
def test_the_same_weights_give_the_same_texts_on_any_number_of_ranks(engine: EngineConfig) -> None:
    prompts = Prompts(ids=[list(b"a"), list(b"row 1"), list(b"xyz")], tokenizer=ByteTokenizer())
    settings = EvalConfig(samples=3, max_new_tokens=8, temperature=0.0)  # threads share the generators

    def write(world: World) -> list[dict[str, str]]:
        model = copies[world.size][world.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        acc = Accumulator(
            model, optimizer, global_batch_size=2, micro_batch_size=1, count=len, engine=engine, world=world
        )
        return Texts(prompts, settings)(acc.engine)

    copies = {size: [_gpt() for _ in range(size)] for size in (1, 2)}
    alone, (first, second) = run_ranks(1, write)[0], run_ranks(2, write)
    assert isinstance(alone, list), alone
    assert alone == first == second
    assert len({one["text"] for one in alone}) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of torch.compile
def test_a_compiled_model_writes_without_being_compiled_for_every_length(gloo_world: World, tmp_path: Path) -> None:
    model = _gpt()
    texts, recompiles = [], []
    for samples, way in ((2, "none"), (2, "model"), (0, "model")):
        model = _gpt()
        folder = tmp_path / f"{way}{samples}"
        asked = {"samples": samples, "max_new_tokens": 6, "prompt_tokens": 4, "temperature": 0.0}
        _trainer(
            folder, model, compile={"name": way, **({} if way == "none" else {"backend": "eager"})}, lr=1e-4, **asked
        ).fit()
        texts.append([one.get("eval_texts") for one in metrics(folder)])
        recompiles.append([one.get("recompiles") for one in metrics(folder)])
    assert texts[0] == texts[1]
    assert recompiles[1] == recompiles[2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_of_hugging_face_writes_by_its_own_generate(
    temperature: float, gloo_world: World, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = train_tokenizer([f"row {i}" for i in range(40)], vocab_size=270)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=32, n_layer=1, n_head=2, n_embd=16, eos_token_id=tokenizer.eos_token_id
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    before = deepcopy(model.generation_config)
    ids = [torch.tensor(tokenizer.encode(f"row {i}")) for i in range(8)]
    samples = [{"input_ids": one[:4], "labels": one[:4]} for one in ids]
    data = DataSpec(train=samples, eval_dataset=samples[:2], tokenizer=tokenizer)
    asked = {"samples": 2, "prompts": ["row", "row 3"], "max_new_tokens": 6, "temperature": temperature}
    _trainer(tmp_path, model, data, CausalLM(), **asked).fit()
    assert model.generation_config == before
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    texts = metrics(tmp_path)[-1]["eval_texts"]
    prompts = [tokenizer.encode(one)[:-1] for one in ("row", "row 3")]  # without the mark of the end
    assert [one["prompt"] for one in texts] == [tokenizer.decode(one) for one in prompts]
    if not temperature:
        for found, begin in zip(texts, prompts, strict=True):
            new = list(begin)
            for _ in range(6):
                new.append(int(model.eval()(input_ids=torch.tensor([new])).logits[0, -1].argmax()))
            new = new[len(begin) :]
            end = new.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in new else 6
            assert found["text"] == tokenizer.decode(new[:end])


class Ends:
    """Bytes, of which ``!`` ends a text."""

    eos_token_id = ord("!")
    encode = ByteTokenizer().encode
    decode = ByteTokenizer().decode


class Says(nn.Module):
    """Always the same, whatever it has learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = _gpt()

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.gpt(ids)
        return logits

    def generate(self, ids: Tensor, *, max_new_tokens: int, temperature: float) -> Tensor:
        said = torch.tensor([list(b"ab!cd\x1b[2J"[:max_new_tokens])])
        return torch.cat((ids, said), dim=1)


def test_what_follows_the_end_token_is_cut_off(gloo_world: World, tmp_path: Path) -> None:
    _trainer(tmp_path, Says(), _data(tokenizer=Ends()), samples=1, prompts=["x"], max_new_tokens=5).fit()
    assert metrics(tmp_path)[-1]["eval_texts"] == [{"prompt": "x", "text": "ab"}]


def test_tensorboard_and_wandb_have_the_texts(gloo_world: World, tmp_path: Path) -> None:
    trackers = {"tensorboard": {"enabled": True}, "wandb": {"mode": "offline"}}
    _trainer(tmp_path, Says(), metrics=trackers, samples=1, prompts=["x"], max_new_tokens=9).fit()
    wanted = [{"prompt": "x", "text": "ab!cd\x1b[2J"}]
    assert [record["eval_texts"] for record in metrics(tmp_path)] == [wanted] * 2

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = events.Tensors("eval/text_0/text_summary")
    assert [one.step for one in found] == [1, 2]
    assert "xab!cd" in found[0].tensor_proto.string_val[0].decode()

    tables = sorted((tmp_path / "wandb").rglob("*.table.json"))
    assert [json.loads(table.read_text())["data"] for table in tables] == [[["x", "ab!cd\x1b[2J"]]] * 2


def test_on_the_screen_a_text_is_one_line_that_moves_no_cursor() -> None:
    assert _line("a\nb\x1b[2Jc\u202e") == "a b [2Jc "
    assert len(_line("x" * 900)) == 200


def test_shards_have_the_tokenizer_that_is_named(tmp_path: Path) -> None:
    torch.arange(300).remainder(200).to(torch.uint16).numpy().tofile(tmp_path / "a.bin")
    train_tokenizer(["some text"], vocab_size=260).save_pretrained(tmp_path / "tokenizer")
    pattern, folder = str(tmp_path / "a.bin"), str(tmp_path / "tokenizer")
    data = tokens(path=pattern, vocab_size=260, seq_len=8, held_out=0.2, tokenizer=folder)
    assert data.tokenizer is not None
    assert data.tokenizer.decode(data.tokenizer.encode("any")).strip("[CLSEP]") == "any"


class Classifier(nn.Linear):
    """Of four numbers."""

    def __init__(self) -> None:
        super().__init__(4, 3)


ROWS = [(torch.randn(4), torch.tensor(0)) for _ in range(8)]


@pytest.mark.parametrize(
    ("make", "data", "settings", "says"),
    [
        (Classifier, DataSpec(train=ROWS, eval_dataset=ROWS), {}, "eval.samples=2: Classifier writes no texts"),
        (_gpt, _data(tokenizer=None), {}, "eval.samples=2: the data has no tokenizer"),
        (_gpt, _data(tokenizer=str), {}, "eval.samples=2: its tokenizer has no decode"),
        (_gpt, _data(eval_dataset=None), {}, "eval.samples=2: the run has no evaluation"),
        (_gpt, _data(), {"samples": 5}, "eval.samples=5: 4 samples are held out"),
        (_gpt, _data(), {"max_new_tokens": 20}, "with 9 tokens of text 0 before them, and the model takes 24 at most"),
        (_gpt, _data(), {"prompts": [""]}, "text 0 begins with no token"),
        (_gpt, _data(eval_dataset=ROWS), {}, "do not begin with token ids"),
    ],
)
def test_what_cannot_write_texts_is_refused_by_name(
    make: Any, data: DataSpec, settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    asked = {"samples": 2, "max_new_tokens": 4, "prompt_tokens": 9, **settings}
    with pytest.raises(ConfigError) as raised:
        _trainer(tmp_path, make(), data, **asked)
    assert says in str(raised.value)


def test_an_id_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=100, seq_len=24, n_layer=1, n_head=2, n_embd=16)
    with pytest.raises(ConfigError, match="begins with an id outside of the model's 100 token ids"):
        _trainer(tmp_path, model, samples=1, prompts=["row"], max_new_tokens=4)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"samples": -1}, "eval.samples=-1"),
        ({"prompts": ["a"]}, "eval.samples=0: and there are 1 prompts"),
        ({"max_new_tokens": 0}, "eval.max_new_tokens=0: must be at least 1"),
        ({"temperature": -0.5}, "eval.temperature=-0.5: out of range"),
        ({"temperature": float("nan")}, "eval.temperature=nan: out of range"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EvalConfig(**settings)
    assert says in str(raised.value)
