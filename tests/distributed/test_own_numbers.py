"""What a loss, a callback and metrics give beside the loss: right on any number of ranks, and shown everywhere."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.distributed.test_wandb import _history as history
from tests.distributed.workers.own_numbers import CLASSES, samples
from tests.support.commands import ROOT, metrics, succeed

WORKER = Path(__file__).parent / "workers" / "own_numbers.py"


def _right(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ground truth: the predictions of the untrained model in fp64, and the labels."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    rows = samples(size, seed)
    return model(torch.stack([x for x, _ in rows]).double()).argmax(1), torch.stack([y for _, y in rows])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "numerics"), [pytest.param(1, "fast", marks=pytest.mark.heavy), (2, "fast"), (2, "reproducible")]
)
def test_own_numbers_are_those_of_the_whole_window(world: int, numerics: str, tmp_path: Path) -> None:
    imports = ["torchmetrics.classification"]
    succeed(tmp_path, numerics, world=world, script=WORKER, imports=imports, PYTHONPATH=str(ROOT))
    records = {record["window"]: record for record in metrics(tmp_path)}
    assert records.keys() == {2, 4}
    predicted, labels = _right(18, 0)
    for window, span in ((2, slice(5, 10)), (4, slice(15, 18))):
        record, right = records[window], (predicted == labels)[span]
        owls = labels[span] == CLASSES.index("owl")
        assert record["right"] == pytest.approx(right.double().mean().item())
        assert record.get("right_owls") == (pytest.approx(right[owls].double().mean().item()) if owls.any() else None)
        assert "never" not in record  # of no item
        assert (record["squared"], record["rank"]) == (record["step"] ** 2, 0)
        assert record["norm"] > 0
        assert record["twice"] == 2 * record["eval_loss"]
    last = records[4]
    predicted, labels = _right(23, 1)
    counted = [[int(((labels == i) & (predicted == j)).sum()) for j in range(3)] for i in range(3)]
    rows = [[name, *row] for name, row in zip(CLASSES, counted, strict=True)]
    assert last["eval_confusion"] == {"columns": ["class", *CLASSES], "rows": rows}
    for i, name in enumerate(CLASSES):
        seen = sum(counted[i]) + sum(row[i] for row in counted)
        assert last[f"eval_f1/{name}"] == pytest.approx(2 * counted[i][i] / seen if seen else 0.0)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    sent = {row["_step"]: row for row in history(file)[0]}
    assert {step: row["theirs"] for step, row in sent.items()} == {1: 1, 2: 2, 3: 3, 4: 4}
    assert {name: sent[4][name] for name in last if name != "eval_confusion"} == {
        name: value for name, value in last.items() if name != "eval_confusion"
    }
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/table/eval_confusion*.json"))
    report = (tmp_path / "report.html").read_text()
    assert "right_owls" in report
    assert f"<td>owl</td>{''.join(f'<td>{n}</td>' for n in counted[2])}" in report
    (events,) = (tmp_path / "tensorboard").iterdir()
    tags = ("train/right", "train/squared", "eval/f1/owl", "eval/confusion")
    assert all(tag.encode() in events.read_bytes() for tag in tags)
