"""docs/own-loop.md: the diff beside each program applies, and both sides train to the weights of a plain loop."""

import re
import shutil
from functools import cache
from inspect import signature
from pathlib import Path

import pytest
import torch

from tests.support.commands import ROOT, succeed

PAGE = "".join((ROOT / "docs" / page).read_text() for page in ("own-loop.md", "recipes.md"))
PROGRAMS = ROOT / "launch" / "examples" / "migrate"
NAMES = ("from_ddp", "from_accelerate", "from_lightning", "from_transformers", "from_deepspeed")
AT_ONCE = {"from_deepspeed": 2}  # processes, where one needs a launcher
LONG = ("from_lightning", "from_transformers", "from_deepspeed")  # tens of seconds of imports
RAGGED = ("--ragged",)
EXACT = 1e-6


@cache
def _diff(name: str) -> str:
    """The program's diff, beside it, without the lines that name the files."""
    assert f"`{name}.diff`" in PAGE
    return (PROGRAMS / f"{name}.diff").read_text().split(f"+++ {name}.py\n")[1]


def changed(name: str) -> str:
    """The program after the page's diff; each hunk fits in one place."""
    text = (PROGRAMS / f"{name}.py").read_text()
    for hunk in re.split(r"^@@.*\n", _diff(name), flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in (" ", sign)) for sign in "-+")
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def _weights(folder: Path, program: str, *arguments: str, world: int = 1) -> dict[str, torch.Tensor]:
    folder.mkdir()
    shutil.copy(PROGRAMS / "common.py", folder)
    if "import deepspeed" in program:  # else it compiles a reduction on the CPU, for inference alone: half a minute
        unbuilt = 'import deepspeed\ndeepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False\n'
        program = program.replace("import deepspeed\n", unbuilt)
    script = folder / "program.py"
    script.write_text(program)
    warm = "deepspeed" if "deepspeed" in program else "distaccum"
    variables = {"DS_ACCELERATOR": "cpu", "WANDB_MODE": "disabled"}
    succeed(*arguments, script=script, world=world, cwd=folder, warm=warm, **variables)
    found: dict[str, torch.Tensor] = torch.load(folder / "weights.pt")
    return found


def _distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.heavy if name in LONG else pytest.mark.slow) for name in NAMES]
)
def test_where_the_program_is_right_the_changed_one_trains_to_its_weights(name: str, tmp_path: Path) -> None:
    world = AT_ONCE.get(name, 1)
    before = _weights(tmp_path / "before", (PROGRAMS / f"{name}.py").read_text(), world=world)
    after = _weights(tmp_path / "after", changed(name), world=world)
    assert _distance(before, after) < EXACT


@pytest.mark.heavy
def test_hugging_faces_program_has_the_same_global_batch_on_two_processes(tmp_path: Path) -> None:
    before = _weights(tmp_path / "before", (PROGRAMS / "from_transformers.py").read_text(), world=2)
    assert _distance(before, _weights(tmp_path / "after", changed("from_transformers"), world=2)) < EXACT


def _plain_loop(folder: Path) -> dict[str, torch.Tensor]:
    """The truth: no micro-batches, no ranks; each update is made of the whole global batch at once."""
    program = """
import torch, torch.nn.functional as F
from common import Net, collate, text
torch.manual_seed(0)
net, data = Net(), text()
optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
for step in range(len(data) // 64):
    for group in optimizer.param_groups:
        group["lr"] = 0.5 * 0.99**step
    inputs, labels = collate(data[64 * step : 64 * step + 64])
    optimizer.zero_grad()
    F.cross_entropy(net(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
torch.save(net.state_dict(), "weights.pt")
"""
    return _weights(folder, program, *RAGGED)


@pytest.mark.slow
def test_of_unequal_lengths_the_changed_program_trains_on_the_mean_and_the_other_on_a_mean_of_means(
    tmp_path: Path,
) -> None:
    true = _plain_loop(tmp_path / "true")
    theirs = _weights(tmp_path / "before", (PROGRAMS / "from_ddp.py").read_text(), *RAGGED)
    assert _distance(true, theirs) > 1000 * EXACT
    for world in (1, 2):
        ours = _weights(tmp_path / f"after-{world}", changed("from_ddp"), *RAGGED, world=world)
        assert _distance(true, ours) < EXACT


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["from_accelerate", "from_lightning"])
def test_of_unequal_lengths_the_changed_program_is_right_on_one_process_and_on_two(name: str, tmp_path: Path) -> None:
    true = _plain_loop(tmp_path / "true")
    for world in (1, 2):
        assert _distance(true, _weights(tmp_path / str(world), changed(name), *RAGGED, world=world)) < EXACT


@pytest.mark.heavy
def test_of_unequal_lengths_hugging_faces_trainer_is_right_too(tmp_path: Path) -> None:
    before = _weights(tmp_path / "before", (PROGRAMS / "from_transformers.py").read_text(), *RAGGED)
    assert _distance(before, _weights(tmp_path / "after", changed("from_transformers"), *RAGGED)) < EXACT


def _theirs(heading: str) -> set[str]:
    """The names in the first column of the table below a heading, without arguments."""
    section = re.split(r"\n##+ ", PAGE.split(f"## {heading}\n")[1])[0]
    cells = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)(?:=[^`]*)?`", cell)}


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
def test_the_tables_name_what_the_other_frameworks_have() -> None:
    from accelerate import Accelerator  # noqa: PLC0415  seconds each
    from lightning import LightningModule, Trainer  # noqa: PLC0415
    from transformers import Trainer as HuggingFaceTrainer  # noqa: PLC0415
    from transformers import TrainingArguments  # noqa: PLC0415

    known = set(signature(TrainingArguments).parameters) | set(signature(HuggingFaceTrainer).parameters)
    assert _theirs("From Hugging Face's Trainer") - known == {"TrainingArguments"}
    known = set(signature(Trainer).parameters) | set(dir(LightningModule))
    assert _theirs("From Lightning") - known == {"EarlyStopping"}
    known = set(signature(Accelerator).parameters) | set(dir(Accelerator))
    plugins = {"FullyShardedDataParallelPlugin", "DeepSpeedPlugin"}
    assert _theirs("Accelerate") - known == plugins
