"""The order of the rooms: imports point down, each room keeps to its job."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from distaccum.config.engine import ENGINES

PACKAGE = Path(__file__).parents[1] / "distaccum"

# From bottom to top; a room imports from its own files and from lower lines, never from its neighbours on a line.
ORDER = (
    {"errors"},
    {"program"},
    {"config", "distributed", "losses", "models"},
    {"precision", "data"},
    {"engines"},
    {"verification", "auditing"},
    {"accumulation"},
    {"functional", "checkpoint", "audit"},
    {"train", "doctor"},
    {"elastic"},
    {"commands"},
    {"__main__"},
)
BESIDE = {
    "forecast": {"errors", "config", "data"},
    "report": {"errors", "program", "config"},
    "testing": {"errors", "distributed"},
}
# Rooms beside the order, by who may import them: the command distaccum-plan and what an all-reduce sends; a run's end.
USED_BY = {"train": {"forecast", "report"}, "doctor": {"forecast"}}
FLOOR = {room: number for number, rooms in enumerate(ORDER) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "distaccum":
            yield from (f"distaccum.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@cache
def _imports(path: Path) -> tuple[str, ...]:
    return tuple(_modules(_parse(path)))


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports_point_down(path: Path) -> None:
    room = _room(path)
    if room == "__init__":
        return
    used = {name.split(".")[1] for name in _imports(path) if name.startswith("distaccum.")} - {room}
    allowed = BESIDE[room] if room in BESIDE else {other for other, floor in FLOOR.items() if floor < FLOOR[room]}
    allowed = allowed | USED_BY.get(room, set())
    assert used <= allowed, f"{room} imports {sorted(used - allowed)}"


def test_every_room_has_its_place_and_says_what_lives_there() -> None:
    assert {_room(path) for path in FILES} - {"__init__"} == FLOOR.keys() | BESIDE.keys()
    for room in (path for path in FILES if path.name == "__init__.py" and path.parent.parent == PACKAGE):
        said = ast.get_docstring(_parse(room)) or ""
        assert len(said.splitlines()) >= 3, f"{_name(room)}: what lives here, what it may import, where to begin"
        assert "Begin with" in said, _name(room)


def _users_of(library: str) -> set[str]:
    return {_name(path) for path in FILES if any(name.split(".")[0] == library for name in _imports(path))}


def test_libraries_stay_in_their_rooms() -> None:
    assert _users_of("omegaconf") == {
        "config/arguments.py",
        "config/composed.py",
        "config/describe.py",
        "config/hydra_errors.py",
        "config/schema.py",
        "train/cli.py",
        "train/command.py",
    }
    assert _users_of("hydra") == {
        "config/command_line.py",
        "config/completion.py",
        "config/composed.py",
        "config/instantiate.py",
        "config/hydra_errors.py",
        "train/cli.py",
        "train/command.py",
        "train/submitit.py",
    }
    assert _users_of("wandb") == {"train/metrics/wandb.py"}
    assert _users_of("mlflow") == {"train/metrics/mlflow.py"}
    assert _users_of("tensorboard") == {"train/metrics/tensorboard.py"}
    of_torch = {path for path in FILES for name in _imports(path) if name.startswith("torch.utils.tensorboard")}
    assert of_torch == {PACKAGE / "train/metrics/tensorboard.py"}
    assert _users_of("safetensors") == {"checkpoint/tensors.py"}
    assert _users_of("blake3") == {"checkpoint/digest.py"}
    assert _users_of("matplotlib") == {"train/plan.py", "report/png.py"}
    assert _users_of("datasets") == {"data/adapters.py"}
    assert _users_of("pytest") == {"testing/fixtures.py"}


def test_the_plan_is_pure() -> None:
    pure = ("config/", "data/plan/", "engines/deepspeed/config/", "forecast/", "report/")
    pure_files = ("train/schedules.py", "accumulation/progress.py", "train/from_deepspeed.py")
    for path in FILES:
        if _name(path).startswith(pure) or _name(path) in pure_files:
            assert not {"torch", "deepspeed"} & {module.split(".")[0] for module in _imports(path)}, path


# What a user of levels 1 and 2 does not wait for: a fresh interpreter has none of these.
UNUSED = (
    "hydra",
    "omegaconf",
    "rich",
    "wandb",
    "mlflow",
    "tensorboard",
    "blake3",
    "deepspeed",
    "transformers",
    "datasets",
    "pandas",
    "matplotlib",
)
UNUSED_ROOMS = ("train", "forecast", "testing", "models", "checkpoint", "config.schema", "config.instantiate")


@pytest.mark.parametrize("program", ["import distaccum.functional", "from distaccum import Accumulator"])
def test_levels_1_and_2_load_no_command_line(program: str) -> None:
    listed = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(listed.stdout.split())
    assert not loaded & set(UNUSED)
    assert not {name for name in loaded if name.startswith(tuple(f"distaccum.{room}" for room in UNUSED_ROOMS))}
    # Seconds of imports that torch itself leaves out, too.
    assert not loaded & {"torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"}


def test_engines_are_named_in_their_factory_only() -> None:
    shared = {
        "base",
        "buffers",
        "compiled",
        "context",
        "dtensor",
        "extra_state",
        "factory",
        "gradient_watch",
        "group_settings",
        "guard",
        "host_copy",
        "memory_marks",
        "memory_report",
        "ownership",
        "partial_sums",
        "shares",
        "step_memory",
    }
    shared |= {"blocks", "modules", "ownership", "state"}
    for path in FILES:
        for module in _imports(path):
            if module.startswith("distaccum.engines.") and _room(path) != "engines":
                inner = module.split(".")[2:]
                told = inner[:2] in (["deepspeed", "config"], ["deepspeed", "ops"])
                assert inner[0] in shared or told, f"{_name(path)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_code_outside_asks_for_an_engine_by_its_name(path: Path) -> None:
    """Names in docstrings are for people; what decides by one belongs to the engines and their settings."""
    if _name(path).startswith(("engines/", "config/engine.py")) or _name(path) == "train/from_deepspeed.py":
        return
    tree = _parse(path)
    asked = [node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.MatchValue)]
    words = {c.value for node in asked for c in ast.walk(node) if isinstance(c, ast.Constant)}
    assert not words & set(ENGINES)
    defaults = ("config/schema.py", "accumulation/accumulator.py", "functional.py", "train/trainer.py")
    if _name(path) not in defaults:  # where "ddp" is what is taken by default
        assert not {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)} & set(ENGINES)


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_no_environment_writes_no_globals_no_type_questions(path: Path) -> None:
    for node in ast.walk(_parse(path)):
        assert not isinstance(node, ast.Global)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            assert ast.unparse(node.value) != "os.environ"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("os.putenv", "os.environ.update", "os.environ.setdefault")
            if called == "isinstance":
                assert "Engine" not in ast.unparse(node.args[1])


def test_public_things_say_what_they_are() -> None:
    silent = []
    for path in FILES:
        tree = _parse(path)
        nodes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef))]
        for node in nodes:
            public = not getattr(node, "name", "").startswith("_")
            if public and not ast.get_docstring(node):
                silent.append(f"{_name(path)}:{getattr(node, 'name', 'module')}")
    assert not silent
