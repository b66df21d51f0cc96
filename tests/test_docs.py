"""README, CONTRIBUTING and docs/ are true: their commands and Python blocks run, their links and names exist."""

import ast
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from distaccum.config.precision import ALIASES
from distaccum.data.datasets.lines import lines
from distaccum.distributed.world import World
from distaccum.engines.optimizer_step import StepOptions
from distaccum.precision.policy import FP32
from distaccum.program import commands
from distaccum.tools.settings import settings
from launch.docs import json_schema
from launch.docs.pictures import IMAGES, PICTURES
from launch.docs.settings import with_tables
from tests.support import faults
from tests.support.commands import ROOT, TRAIN, captured, metrics, status, succeed

AT_THE_TOP = ("README.md", "AGENTS.md", "CONTRIBUTING.md")
PAGES = (*AT_THE_TOP, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, and the mark in an HTML comment above it (``setup``, ``alone``, ``loop``).

    Those that are marked ``guide`` are run by ``distributed/test_guides.py``, where its page leaves its files.
    """

    page: str
    number: int
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text()


@cache
def blocks(page: str) -> tuple[Block, ...]:
    fence = re.compile(r"^(?:<!-- (\w+) -->\n)?( *)```(\w*)\n(.*?)^\2```$", re.MULTILINE | re.DOTALL)
    found = enumerate(fence.finditer(text_of(page)))
    return tuple(Block(page, i, m[3], m[1] or "", dedent(m[4])) for i, m in found)


def blocks_of(page: str, section: str) -> list[Block]:
    """The blocks of a page that stand under one of its headings of the second level."""
    text = text_of(page).split(f"\n## {section}\n")[1]
    end = re.search(r"^## ", re.sub(r"^```.*?^```$", lambda m: " " * len(m[0]), text, flags=re.M | re.S), re.MULTILINE)
    fences = re.findall(r"^( *)```\w*\n(.*?)^\1```$", text[: end.start() if end else None], re.MULTILINE | re.DOTALL)
    under = [dedent(inner) for _, inner in fences]
    return [block for block in blocks(page) if block.text in under]


ALL = [block for page in PAGES for block in blocks(page)]

# ---------------------------------------------------------------------------------------------- commands


def _commands_of(page: str, section: str | None = None) -> Iterator[str]:
    """The commands of a page, or of a section, one line each, without comments and exports."""
    for block in blocks(page) if section is None else blocks_of(page, section):
        for line in block.text.replace("\\\n", " ").splitlines() if block.language == "bash" else ():
            command = re.sub(r"\s+#\s.*$", "", line).strip()
            if command and not re.match(r"export \w+=\S+( \w+=\S+)*$", command):
                # Both names are one function: tests/unit/commands/test_main.py
                yield " ".join(command.split()).replace("-m distaccum train", "-m distaccum.train")


COMMANDS = {command: page for page in reversed(PAGES) for command in _commands_of(page)}  # README's first

# Commands that another test runs, or a longer or shorter one of their kind.
SHOWN_BY = yaml.safe_load((ROOT / "tests" / "shown_by.yaml").read_text())
ELSEWHERE = {command: test for test, listed in SHOWN_BY["commands"].items() for command in listed}
START = "distributed/test_guides.py::test_the_commands_of_the_start_print_what_the_page_says"
RECIPES = "distributed/test_guides.py::test_a_recipe_ends_in_a_file_of_predictions"
OWN = "distributed/test_guides.py::test_pieces_of_your_own_run_in_python_and_by_name"
ELSEWHERE |= dict.fromkeys((c for c in _commands_of("docs/index.md") if "runs/" in c), START)
ELSEWHERE |= dict.fromkeys(_commands_of("docs/bring-your-own.md"), OWN)
ELSEWHERE |= dict.fromkeys(_commands_of("docs/recipes.md"), RECIPES)
ELSEWHERE |= {
    on_two: test
    for command, test in ELSEWHERE.items()
    if command.startswith("python launch/examples/")
    and (on_two := command.replace("python", "torchrun --standalone --nproc-per-node=2", 1)) in COMMANDS
}
FINETUNING = ("Fine-tune a Hugging Face classifier", "A LoRA chat model")
for _recipe in FINETUNING:
    ELSEWHERE |= dict.fromkeys(
        _commands_of("docs/recipes.md", _recipe), "distributed/test_finetuning.py::test_a_recipe"
    )


def _training(command: str) -> tuple[int, list[str]] | None:
    """Processes and arguments of a command that trains here; None for another command."""
    words = shlex.split(command)
    variables = {name: value for name, _, value in (w.partition("=") for w in words if re.match(r"[A-Z]+=", w))}
    words = [word for word in words if not re.match(r"[A-Z]+=", word)]
    match words:
        case ["bash", "launch/train.sh", *arguments]:
            return int(variables.get("NPROC", 2)), arguments
        case (
            ["python", "launch/train.py", *arguments]
            | ["distaccum", "train", *arguments]
            | ["python", "-m", "distaccum.train", *arguments]
        ):
            return 1, arguments
        case ["torchrun", "--standalone", "--nproc-per-node=2", "-m", "distaccum.train", *arguments]:
            return 2, arguments
        case ["torchrun", "--standalone", "--nproc-per-node=2", "launch/train.py", *arguments]:
            return 2, arguments
    return None


def _only_prints(arguments: list[str]) -> bool:
    return any(argument.startswith(("--cfg", "--check", "--help")) for argument in arguments)


def _sbatch(command: str) -> list[str] | None:
    """The overrides of a job that Slurm would start; None for another command."""
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z]+=", word)]
    return words[1:] if words[0] == "sbatch" else None


REPLAY = [command for command in COMMANDS if command.startswith("python tests/support/replay.py")]
CHAIN = [
    command for command in COMMANDS if _training(command) and "resume=auto" in command and command not in ELSEWHERE
]
TRAINING = [command for command in COMMANDS if _training(command) and command not in {*CHAIN, *ELSEWHERE}]
TRAINED = [command for command in TRAINING if not _only_prints((_training(command) or (0, []))[1])]
JOBS = [command for command in COMMANDS if _sbatch(command) is not None and command not in ELSEWHERE]
PLAN = [command for command in COMMANDS if command.startswith("distaccum plan ")]
CONTAINERS = [command for command in COMMANDS if command.startswith(("docker ", "kubectl "))]
DEVELOPMENT = [
    command
    for command in COMMANDS
    if command.startswith(("pytest", "ruff ", "mypy", "bash launch/test.sh", "bash .ci/run"))
]


def test_every_command_of_the_pages_is_run_or_checked_by_a_test() -> None:
    """A command that is added to a page needs a test: one of this file's kinds, or one in ``shown_by.yaml``."""
    kinds = [ELSEWHERE, REPLAY, CHAIN, TRAINING, JOBS, PLAN, CONTAINERS, DEVELOPMENT]
    assert sorted(COMMANDS) == sorted(command for kind in kinds for command in kind)


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_what_runs_elsewhere_is_there(test: str) -> None:
    file, name = test.split("::")
    assert re.search(rf"^def {name}", (ROOT / "tests" / file).read_text(), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in TRAINING if COMMANDS[c] != "README.md" or c not in TRAINED])
def test_a_training_command_passes_the_check(command: str, tmp_path: Path) -> None:
    """What it says can be configured and built; nothing is trained, as the others are below."""
    found = _training(command)
    assert found is not None
    processes, arguments = found
    check = [] if _only_prints(arguments) else [f"--check={processes}", f"hydra.run.dir={tmp_path / 'run'}"]
    succeed(*arguments, *check, cwd=ROOT)
    assert not (tmp_path / "run").exists()


def _tiny(arguments: list[str]) -> list[str]:
    """Overrides that make a command's run short: a model of milliseconds, few updates, no W&B."""
    chosen = dict(argument.split("=", 1) for argument in arguments)
    model = ["model.channels=4"] if chosen.get("model") == "cnn" else ["model.n_layer=1", "model.n_embd=16"]
    heads = [] if chosen.get("model") == "cnn" else ["model.n_head=2"]
    steps = min(3, int(chosen.get("trainer.max_steps", 3)))
    return [*model, *heads, f"trainer.max_steps={steps}", "schedule.warmup_steps=1", "metrics=jsonl"]


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=[] if COMMANDS[c] == "README.md" else pytest.mark.heavy) for c in TRAINED]
)
def test_a_training_command_trains(command: str, tmp_path: Path) -> None:
    """As it stands, on as many processes, but for a tiny model and three updates."""
    found = _training(command)
    assert found is not None
    processes, arguments = found
    succeed(*arguments, *_tiny(arguments), f"hydra.run.dir={tmp_path}", world=processes, cwd=ROOT)
    assert status(tmp_path)["state"] == "done"
    assert metrics(tmp_path)


@pytest.mark.slow
def test_from_a_laptop_to_a_node_each_command_resumes_the_one_before(tmp_path: Path) -> None:
    steps = []
    for command in CHAIN:
        found = _training(command)
        assert found is not None
        tiny = [override for override in _tiny(found[1]) if not override.startswith("trainer.max_steps")]
        finished = succeed(*found[1], *tiny, "data.seq_len=16", "trainer.eval_every=0", world=found[0], cwd=tmp_path)
        steps.append(status(tmp_path / "runs/first")["step"])
        assert ("resuming" in finished.stdout) == (len(steps) > 1)
    assert steps == [50, 60]


@pytest.mark.slow
@pytest.mark.parametrize("command", JOBS)
def test_a_slurm_command_names_what_there_is(command: str, tmp_path: Path) -> None:
    """Its script exists and the configuration passes the check; tests/cluster/slurm submit jobs of each kind."""
    words = _sbatch(command)
    assert words is not None
    at = next(i for i, word in enumerate(words) if not word.startswith("--"))
    assert {word.split("=")[0] for word in words[:at]} <= {
        "--nodes",
        "--gpus-per-node",
        "--time",
        "--array",
        "--no-kill",
    }
    assert (ROOT / words[at]).is_file()
    overrides = [word for word in words[at + 1 :] if not word.startswith("hydra.run.dir")]
    succeed(*overrides, "--check=16", f"hydra.run.dir={tmp_path / 'run'}")


@pytest.mark.slow
@pytest.mark.parametrize("command", PLAN)
def test_a_forecast_command_forecasts(command: str, tmp_path: Path) -> None:
    module, function = commands()["plan"].target.split(":")
    script = tmp_path / "plan.py"
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    succeed(*shlex.split(command)[2:], f"hydra.run.dir={tmp_path}", script=script, cwd=tmp_path)
    assert (tmp_path / "plan.json").is_file()


@pytest.mark.parametrize("command", CONTAINERS)
def test_a_container_command_names_what_there_is(command: str) -> None:
    """Build arguments, files and variables that it names exist; tests/cluster/container build and run the image."""
    dockerfile, entry = (ROOT / "Dockerfile").read_text(), (ROOT / "launch" / "container.sh").read_text()
    words = shlex.split(command)
    assert words[:2] in (["docker", "build"], ["docker", "run"], ["kubectl", "apply"])
    for option, value in pairwise(words):
        if option == "--build-arg":
            assert re.search(rf"^ARG {value.split('=')[0]}\b", dockerfile, re.MULTILINE), value
        if option == "-e":
            assert value.split("=")[0] in entry, value
        if words[0] == "kubectl" and option == "-f":
            assert (ROOT / value).is_file()


@pytest.mark.parametrize("command", DEVELOPMENT)
def test_a_development_command_names_what_there_is(command: str) -> None:
    """Files and markers that it names exist."""
    markers = {marker.split(":")[0] for marker in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    words = shlex.split(command)
    for before, word in pairwise(["", *words]):
        if before == "-m":
            assert word in markers
        elif "/" in word:
            assert (ROOT / word).exists()


@pytest.mark.heavy
def test_the_replay_of_a_run_differs_in_nothing(tmp_path: Path) -> None:
    for command in REPLAY:
        arguments = [word.replace("runs/", f"{tmp_path}/") for word in shlex.split(command)[1:]]
        finished = captured([sys.executable, *arguments], cwd=ROOT)
        assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout == "nothing differs\n"


# ------------------------------------------------------------------------------------------ Python blocks

# A short text in place of the documentation of CPython, so that an epoch of it takes a moment.
SHORT_TEXT = """
import os
import distaccum.data.datasets.lines as _lines
_lines.documentation = lambda: b"\\n".join(b"line %d of a short text" % i for i in range(800))
"""
FIT = "\nif 'fit()' not in __source__ and 'trainer' in globals():\n    print(trainer.fit())\n"


LOOP = "docs/own-loop.md"
PYTHON = [b for b in ALL if b.language == "python" and b.mark not in ("setup", "guide", "interface")]


def run_block(block: Block, folder: Path) -> str:
    """Runs a block after its page's setup, or own-loop.md's, as a script in a process of its own; what it printed."""
    page = LOOP if block.mark == "loop" else block.page
    setup = "" if block.mark == "alone" else "".join(b.text for b in blocks(page) if b.mark == "setup")
    script = folder / "block.py"
    script.write_text(f"__source__ = {block.text!r}\n{SHORT_TEXT}{setup}\n{block.text}{FIT}")
    return succeed(script=script, cwd=folder).stdout


@pytest.mark.parametrize(
    "block", [pytest.param(b, marks=() if b.page == "README.md" else pytest.mark.slow, id=str(b)) for b in PYTHON]
)
def test_a_python_block_runs(block: Block, tmp_path: Path) -> None:
    run_block(block, tmp_path)


INTERFACES = {
    "DataSpec": "data/spec.py",
    "Loss": "losses/base.py",
    "WindowLoss": "losses/base.py",
    "Scorer": "losses/base.py",
    "Predictor": "losses/base.py",
    "Schedule": "accumulation/tracker.py",
    "Callback": "train/callbacks.py",
    "EvaluationMetric": "train/evaluate.py",
}


def _members(kind: ast.ClassDef) -> dict[str, str]:
    """A class's fields and methods, each as its declaration is written."""
    fields_of = {ast.unparse(node.target): ast.unparse(node) for node in kind.body if isinstance(node, ast.AnnAssign)}
    methods = (node for node in kind.body if isinstance(node, ast.FunctionDef))
    return fields_of | {m.name: f"({ast.unparse(m.args)}) -> {m.returns and ast.unparse(m.returns)}" for m in methods}


def _classes(source: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}


def test_interfaces_are_shown_as_they_are_in_the_code() -> None:
    shown = "".join(block.text for block in ALL if block.mark == "interface")
    assert sorted(_classes(shown)) == sorted(INTERFACES)
    for name, kind in _classes(shown).items():
        code = _members(_classes((ROOT / "distaccum" / INTERFACES[name]).read_text())[name])
        for member, declared in _members(kind).items():
            assert code[member] == declared, f"{name}.{member}"
        if name != "DataSpec":  # whose page says that it has more
            hooks = {member for member in code if not member.startswith("_") or member == "__call__"}
            assert hooks - {"lr_factor", "needs_evaluation", "watched_result"} == set(_members(kind))


def _diff() -> list[str]:
    (block,) = (block for block in blocks("README.md") if block.language == "diff")
    return block.text.splitlines()


def test_coming_from_accelerate_changes_under_ten_lines() -> None:
    removed, added = ([line for line in _diff() if line.startswith(sign)] for sign in "-+")
    replaced = min(len(removed), len(added))
    assert replaced + abs(len(removed) - len(added)) < 10


@pytest.mark.slow
@pytest.mark.parametrize("sign", ["-", "+"])
def test_both_sides_of_the_accelerate_diff_run(tmp_path: Path, sign: str) -> None:
    setup = "".join(block.text for block in blocks("README.md") if block.mark == "setup")
    loop = "\n".join(line[1:] for line in _diff() if line[:1] in (" ", sign))
    script = f"import torch\nimport torch.nn.functional as F\ntorch.manual_seed(0)\n{setup}\n{loop}"
    script += "\nprint(f'loss {loss.item():.4f} rate {scheduler.get_last_lr()[0]:.6f}')\n"
    path = tmp_path / "loop.py"
    path.write_text(script)
    finished = succeed(script=path, cwd=tmp_path)
    loss, rate = re.findall(r"[\d.]+", finished.stdout)
    assert float(loss) < 3.5
    updates = -(-len(lines(seq_len=64).train) // 64)  # type: ignore[arg-type]
    assert float(rate) == pytest.approx(3e-3 * 0.99**updates, rel=1e-3)


# ------------------------------------------------------------------------------------------ names and links


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_fault_of_the_tables_is_injected_by_a_test_that_names_it() -> None:
    files = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = {
        faults.row_of(ast.literal_eval(words)) for words in re.findall(r'mark\.fault\(\s*("(?:[^"\\]|\\.)+")', files)
    }
    assert named == faults.rows().keys()


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in _anchors(path), target


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_pages_name_no_machine(page: str) -> None:
    """Pages are for users: neither paths of one machine nor hosts of package registries."""
    assert not re.search(r"(?<![\w.<$}-])/(?:root|home|work|tmp|usr|mnt)/", text_of(page))
    assert not re.search(r"pypi\.org|pythonhosted|download\.pytorch|proxy\.|index-url", text_of(page))


def test_every_page_is_in_the_index() -> None:
    index = text_of("docs/index.md")
    assert "(docs/index.md)" in text_of("README.md")
    for page in (page.removeprefix("docs/") for page in PAGES if page.startswith("docs/") and page != "docs/index.md"):
        assert re.search(rf"\({page}[)#]", index), page


def test_what_is_read_first_is_short() -> None:
    assert len(text_of("README.md").splitlines()) <= 180
    assert len(text_of("AGENTS.md").splitlines()) <= 60


def _defined(file: Path) -> set[str]:
    """Names of a file's classes, functions and their methods: ``Class.method``."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else []
            names |= {f"{node.name}.{one.name}" for one in inner if isinstance(one, ast.FunctionDef)}
    return names


def test_the_architecture_page_names_functions_that_there_are() -> None:
    page = text_of("docs/architecture.md")
    found = re.findall(r"`([\w/]+\.py):([\w.]+)`", page)
    assert len(found) > 20
    for file, name in found:
        assert name in _defined(ROOT / file), f"{file}:{name}"
    for path in re.findall(r"`([\w/]+/(?:\w+\.py)?)`", page):
        assert (ROOT / path).exists(), path


OTHERS = {"__init__", "__init__.pyi", "__pycache__", "py.typed", "conf"}


def test_the_architecture_page_draws_every_room() -> None:
    drawing = blocks("docs/architecture.md")[0].text
    rooms = {path.name.removesuffix(".py") for path in (ROOT / "distaccum").iterdir()}
    assert all(re.search(rf"\b{room}\b", drawing) for room in rooms - OTHERS)


# ------------------------------------------------------------------------------------------ the reference


def test_what_a_program_makes_is_up_to_date() -> None:
    page = text_of("docs/reference.md")
    assert with_tables(page) == page, "run python -m launch.docs"
    assert json_schema.schema() == json_schema.FILE.read_text(), "run python -m launch.docs"
    for name, draw in PICTURES.items():
        assert draw() == (IMAGES / name).read_text(), f"{name}: run python -m launch.docs"


@pytest.mark.parametrize(
    "page", [f"docs/{name}.md" for name in ("index", "own-loop", "bring-your-own", "models", "reliability")]
)
def test_the_guides_name_keys_that_there_are(page: str) -> None:
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    named = re.findall(r"`((?:batch|checkpoint|metrics|optim|trainer)\.[\w.]+)(?:=[^`]*)?`", prose)
    known = {setting.key for setting in settings()} | {"metrics.jsonl", "metrics.superseded.jsonl"}
    assert [key for key in named if key not in known and not key.startswith("optim.optimizer.")] == []


@pytest.mark.parametrize(
    "group",
    [
        "batch",
        "engine",
        "precision",
        "compile",
        "data",
        "model",
        "loss",
        "optim",
        "schedule",
        "callbacks",
        "metrics",
        "experiment",
    ],
)
def test_the_reference_has_every_choice_of_a_group(group: str) -> None:
    (row,) = [line for line in text_of("docs/reference.md").splitlines() if line.startswith(f"| `{group}` | ")][-1:]
    choices = {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}
    choices |= set(ALIASES) if group == "precision" else set()
    named = {name for name in re.findall(r"`([\w.-]+)`", row) if not name.startswith(f"{group}.")}  # or a setting
    assert named == {group} | choices


def test_the_page_of_tools_names_every_command() -> None:
    rows = re.findall(r"^\| `(distaccum [\w-]+)` \|", text_of("docs/tools.md"), re.MULTILINE)
    assert sorted(rows) == sorted(f"distaccum {name}" for name in commands())


def test_the_example_programs_are_there() -> None:
    assert TRAIN.is_file()
    for file in re.findall(r"`(launch/[\w/.]+\.(?:py|sh|yaml))`", "".join(map(text_of, PAGES))):
        assert (ROOT / file).is_file(), file


# ------------------------------------------------------------------------------------------ messages


def _literals(file: Path) -> Iterator[str]:
    """The texts in a file, as a person reads them: what is put in is ``...``."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(?:\.\d)?[sdf]", "...", node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)


@pytest.mark.slow
def test_the_messages_to_look_up_are_those_of_the_code() -> None:
    """The first column of each table of the page, but the last, whose symptoms have no message."""
    page = text_of("docs/reliability.md").split("\n## Troubleshooting\n")[1].split("### Without a message")[0]
    quoted = re.findall(r"^\| `(.+?)`", page, re.MULTILINE)
    assert len(quoted) >= 20
    said = "\n".join(text for file in (ROOT / "distaccum").rglob("*.py") for text in _literals(file))
    assert [quote for quote in quoted if quote.strip(". ") not in said] == []


def test_the_engine_that_the_page_begins_steps_as_torch_does() -> None:
    """With what the page leaves out filled in for one process."""
    (begun,) = [block for block in blocks("docs/engines.md") if "class MyEngine" in block.text]
    namespace: dict[str, Any] = {}
    exec(begun.text, namespace)  # noqa: S102

    class Whole(namespace["MyEngine"]):  # type: ignore[misc]
        def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
            world = World(rank=0, size=1, device=torch.device("cpu"))
            super().__init__(model, optimizers, world, policy=FP32, options=StepOptions())
            self._whole = model

        @property
        def model(self) -> nn.Module:
            return self._whole

        def describe(self) -> str:
            return "whole"

        def micro_step(self, *, sync: bool) -> Any:
            super().micro_step(sync=sync)
            return nullcontext()

        def shadow_micro_step(self, *, sync: bool = True) -> None:
            pass

        def zero_gradients(self) -> None:
            for parameter in self.model.parameters():
                parameter.grad = None
            self._close_window()

        def state(self) -> Any:
            raise AssertionError

        def load_state(self, state: Any) -> None:
            raise AssertionError

    torch.manual_seed(0)
    trained = nn.Linear(3, 1)
    plain = deepcopy(trained)
    engine = Whole(trained, torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        batch = torch.randn(4, 3)
        for part in batch.split(2):
            with engine.micro_step(sync=True):
                engine.backward(engine.model(part).square().sum() / 4)
        assert engine.step().applied
        optimizer.zero_grad()
        plain(batch).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(trained.weight, plain.weight)
