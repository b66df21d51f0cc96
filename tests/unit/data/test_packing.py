"""Documents packed into rows: gradient and losses are those of the same documents alone, in fp64."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distaccum import Accumulator, CausalLM, ConfigError, CrossEntropy, DataSpec, PadCollator, Trainer
from distaccum.config.batch import BatchConfig
from distaccum.data.packing import PackCollator, rows_of
from distaccum.distributed.world import World
from distaccum.engines.state import whole_state
from distaccum.models import gpt
from distaccum.train.packing import check_model, pack
from tests.support.packing import LENGTHS, VOCABULARY, descend, documents, make_model, off, spec
from tests.support.runs import settings
from tests.support.threads import on_ranks


def test_every_document_is_in_one_row_with_room() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, size=300)
    rows = rows_of(lengths, 64)
    assert sorted(i for row in rows for i in row) == list(range(300))
    assert all(lengths[row].sum() <= 64 for row in rows)
    assert len(rows) <= 11 / 9 * -(-lengths.sum() // 64) + 1
    assert rows_of(lengths, 64) == rows


def test_rows_have_the_documents_and_nothing_else() -> None:
    chosen = documents()[:4]
    ids, labels, positions = PackCollator(PadCollator((0, -100)), 16, shifted=False)(chosen)
    assert positions.tolist() == [[*range(14), *range(2)], [*range(9), *range(3), *range(4)]]
    assert torch.equal(ids[0], torch.cat([chosen[2][0], chosen[3][0]]))
    assert torch.equal(labels[1], torch.cat([chosen[0][1], chosen[1][1], torch.full((4,), -100)]))
    named = [{"input_ids": one, "labels": one, "attention_mask": torch.ones_like(one)} for one, _ in chosen]
    batch = PackCollator(PadCollator({}), 16, shifted=True)(named)
    assert batch.keys() == {"input_ids", "labels", "position_ids"}
    assert batch["labels"][[0, 0, 1, 1], [0, 14, 0, 9]].tolist() == [-100] * 4
    assert (batch["labels"] == -100).sum() == 4 + 4


def train(engine: str, world: World, positions: str, updates: int) -> Tensor:
    """The weights' change by updates of SGD at a rate of 1, over windows of 5, 5 and 3 documents."""
    model, loss = make_model(positions).double(), CrossEntropy()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    names = [name for name, _ in model.named_parameters()]
    data = pack(spec(), BatchConfig(packing="documents"), loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sizes: Any = {"global_batch_size": 5, "micro_batch_size": 3}
    acc = Accumulator(model, optimizer, engine=engine, world=world, verify="never", count=loss.count, **sizes)
    while acc.progress.step < updates:
        for window in acc.windows(data):
            acc.step(window, loss)
            if acc.progress.step == updates:
                break
    weights = whole_state(acc.engine, world).model
    acc.close()
    return before - torch.cat([weights[name].flatten() for name in names])


ENGINES, WORLDS, POSITIONS = ("ddp", "zero1", "fsdp2"), (1, 2, 4), ("rotary", "learned")


def _cells() -> Iterator[Any]:
    """Every engine, world and kind of positions; positions take turns, and the other half is heavy."""
    for (i, engine), (j, world), (k, positions) in product(*map(enumerate, (ENGINES, WORLDS, POSITIONS))):
        yield pytest.param(engine, world, positions, marks=pytest.mark.heavy if (i + j + k) % 2 else ())


@pytest.mark.parametrize(("engine", "world", "positions"), list(_cells()))
def test_the_gradient_is_that_of_documents_alone(engine: str, world: int, positions: str) -> None:
    """Of one window, and of three, the last of which is ragged."""
    for updates in (1, 3):
        alone = descend(make_model(positions).double(), updates)
        truth = torch.cat([change.flatten() for change in alone.values()])
        for found in on_ranks(world, lambda one, updates=updates: train(engine, one, positions, updates)):
            assert off(found, truth) < 1e-12


def test_a_model_that_does_not_tell_documents_apart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "documents_mask", lambda positions: None)
    data = pack(spec(), BatchConfig(packing="documents"), CrossEntropy())
    with pytest.raises(ConfigError, match="GPT sees the documents before another one in its row"):
        check_model(make_model(), data)


def test_another_document_moves_no_loss_by_a_bit() -> None:
    model, collate = make_model(), PackCollator(PadCollator((0, -100)), 40, shifted=False)
    first, second, third = documents()[:3]
    said = []
    for other in (first, (first[0].flip(0), first[1])):
        ids, _, positions = collate([other, second, third])  # in a row: the third, the first, the second
        logits = model(ids, position_ids=positions)[0]
        said.append(torch.cat([logits[:14], logits[23:26]]))
    assert torch.equal(*said)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  seconds to import

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes))


def test_a_causal_model_of_transformers_tells_documents_apart(gloo_world: World) -> None:
    lines = [ids for ids, _ in documents()]
    samples = [{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)} for ids in lines]
    loss, model = CausalLM(), _llama()
    data = pack(spec(samples), BatchConfig(packing="documents"), loss)
    check_model(model, data)
    assert data.collate is not None
    batch = data.collate(samples)
    truth = [F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="sum") for ids in lines]
    assert loss.count(batch) == sum(len(ids) - 1 for ids in lines)
    assert loss(model, batch).item() == pytest.approx(torch.stack(truth).sum().item(), rel=1e-5)


BATCH = {"global_size": None, "tokens": 40, "micro_size": 4}


def _fit(run_dir: Path, steps: int, *, model: nn.Module | None = None, **more: Any) -> tuple[dict[str, float], Any]:
    model = model or make_model()
    more["batch"] = BATCH | more.get("batch", {})
    config = settings(None, {"eval_every": 2, "log_every": 1}, save=2, **more)
    trainer = Trainer(model, CrossEntropy(), spec(), config=config, max_steps=steps, run_dir=run_dir)
    return trainer.fit(), model.state_dict()


@pytest.mark.slow
def test_a_run_learns_the_same_and_resumes_bit_by_bit(gloo_world: World, tmp_path: Path) -> None:
    packing = {"packing": "documents"}
    plain, weights = _fit(tmp_path / "plain", 4)
    packed, same = _fit(tmp_path / "packed", 4, batch=packing)
    assert packed == pytest.approx(plain, rel=1e-5)
    assert all(torch.allclose(same[name], value, atol=1e-5) for name, value in weights.items())
    _fit(tmp_path / "parts", 2, batch=packing)
    _, again = _fit(tmp_path / "parts", 4, batch=packing, resume="auto")
    assert all(torch.equal(again[name], value) for name, value in same.items())


class _Plain(nn.Module):
    """A model of tokens that knows no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    packing = BatchConfig(packing="documents")
    with pytest.raises(ConfigError, match=r"batch\.packing=rows: no such choice"):
        BatchConfig(packing="rows")
    with pytest.raises(ConfigError, match=r"batch\.row_tokens=64: and batch\.packing=none"):
        BatchConfig(row_tokens=64)
    with pytest.raises(ConfigError, match=r"batch\.group_by_length=True: rows are packed"):
        BatchConfig(packing="documents", group_by_length=True)
    with pytest.raises(ConfigError, match="does not say whether it shifts labels"):
        pack(spec(), packing, object())
    with pytest.raises(ConfigError, match="row_tokens=5: and the longest document has 14 tokens"):
        pack(spec(), BatchConfig(packing="documents", row_tokens=5), CrossEntropy())
    with pytest.raises(ConfigError, match="does not say how long its samples are"):
        pack(DataSpec(train=documents(), collate=PadCollator((0, -100))), packing, CrossEntropy())
    with pytest.raises(ConfigError, match="a collation of its own"):
        pack(DataSpec(train=documents(), lengths=np.array(LENGTHS)), packing, CrossEntropy())
    with pytest.raises(ConfigError, match="_Plain does not take position_ids"):
        check_model(_Plain(), pack(spec(), packing, CrossEntropy()))
