"""The order of the rooms and the rings: imports point down, each room keeps to its job."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from distaccum.config.engine import ENGINES

PACKAGE = Path(__file__).parents[1] / "distaccum"

# The core from bottom to top; a room imports its own files and lower lines, never its neighbours on a line.
ORDER = (
    {"errors"},
    {"program"},
    {"config", "distributed", "losses", "models"},
    {"precision", "data"},
    {"engines"},
    {"verification"},
    {"accumulation"},
    {"functional", "checkpoint"},
    {"train"},
    {"__main__"},
)
FLOOR = {room: number for number, rooms in enumerate(ORDER) for room in rooms}
# Beside the core: a ring imports the core, and neither the core nor another ring imports it.
RINGS = {"tools", "elastic"}
BESIDE = {"testing": {"errors", "distributed"}}
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = {path: path.relative_to(PACKAGE).as_posix() for path in FILES}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


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
    return tuple(_modules(_tree(path)))


def _allowed(path: Path) -> set[str]:
    room = _room(path)
    if room in BESIDE:
        return BESIDE[room]
    if room in RINGS:
        return FLOOR.keys() - {"__main__"}
    return {other for other, floor in FLOOR.items() if floor < FLOOR[room]}


def test_imports_point_down_and_the_core_imports_no_ring() -> None:
    wrong = []
    for path in FILES:
        if _room(path) != "__init__":
            used = {name.split(".")[1] for name in _imports(path) if name.startswith("distaccum.")} - {_room(path)}
            wrong += [f"{NAMES[path]} imports {room}" for room in sorted(used - _allowed(path))]
    assert not wrong


def _uses(path: Path, module: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for name in _imports(path))


def test_every_room_has_its_place_and_says_what_lives_there() -> None:
    assert {_room(path) for path in FILES} - {"__init__"} == FLOOR.keys() | BESIDE.keys() | RINGS
    rooms = [path for path in FILES if path.name == "__init__.py" and path.parent.parent == PACKAGE]
    said = {NAMES[room]: ast.get_docstring(_tree(room)) or "" for room in rooms}
    # What lives here, what it may import, where to begin.
    assert not [name for name, text in said.items() if len(text.splitlines()) < 3 or "Begin with" not in text]
    for room in rooms:
        named = set(re.findall(r"``([\w/]+\.py)``", ast.get_docstring(_tree(room)) or "")) - {"conftest.py"}  # a user's
        assert not [name for name in named if not any(room.parent.rglob(name)) and not (PACKAGE / name).exists()]


LIBRARIES = {
    "omegaconf": {
        "tools/command_line.py",
        "tools/own_files.py",
        "tools/settings.py",
        "config/schema.py",
        "tools/plan/settings_command.py",
        "train/cli.py",
    },
    "hydra": {
        "config/command_line.py",
        "config/instantiate.py",
        "tools/completion.py",
        "tools/command_line.py",
        "tools/plan/settings_command.py",
        "train/cli.py",
        "tools/submitit.py",
        "tools/sweeps.py",
    },
    "wandb": {"tools/wandb_upload.py", "tools/wandb.py"},
    "mlflow": {"tools/mlflow.py"},
    "torch.utils.tensorboard": {"tools/tensorboard.py"},
    "safetensors": {"checkpoint/tensors.py", "tools/export.py"},
    "safetensors.torch": {"tools/export.py"},
    "blake3": {"checkpoint/files.py"},
    "matplotlib": {"tools/plan/command.py", "tools/report/png.py"},
    "datasets": {"data/adapters.py"},
    "pytest": {"testing/fixtures.py"},
}


def test_libraries_stay_in_their_rooms() -> None:
    users = {library: {NAMES[path] for path in FILES if _uses(path, library)} for library in LIBRARIES}
    assert users == LIBRARIES


def test_the_plan_is_pure() -> None:
    pure = ("config/", "data/plan/", "engines/deepspeed/config/", "tools/report/")
    pure += ("train/schedules.py", "accumulation/progress.py", "tools/from_deepspeed.py")
    pure += tuple(f"tools/plan/{name}.py" for name in ("cluster", "collectives", "memory", "overlap", "volume"))
    found = [NAMES[path] for path in FILES if NAMES[path].startswith(pure)]
    assert not [name for name in found if _uses(PACKAGE / name, "torch") or _uses(PACKAGE / name, "deepspeed")]


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
UNUSED_ROOMS = ("train", "tools", "testing", "models", "checkpoint", "config.schema", "config.instantiate")


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


# Modules of the engines that other rooms may import: none of them is an engine.
SHARED = {
    "base",
    "blocks",
    "buffers",
    "compiled",
    "context",
    "factory",
    "group_settings",
    "memory_marks",
    "modules",
    "numerics",
    "optimizer_step",
    "ownership",
    "partial_sums",
    "rules",
    "shard_rules",
    "state",
}


def test_engines_are_named_in_their_factory_only() -> None:
    wrong = []
    for path in FILES:
        for module in _imports(path):
            if module.startswith("distaccum.engines.") and _room(path) not in ("engines", "elastic"):
                inner = module.split(".")[2:]
                told = inner[:2] in (["deepspeed", "config"], ["deepspeed", "compat"])
                if inner[0] not in SHARED and not told:
                    wrong.append(f"{NAMES[path]} imports {module}")
    assert not wrong


def test_no_code_outside_asks_for_an_engine_by_its_name() -> None:
    """Names in docstrings are for people; what decides by one belongs to the engines and their settings."""
    # Where "ddp" is what is taken by default.
    defaults = ("config/schema.py", "accumulation/settings.py", "functional.py", "train/trainer.py")
    wrong = []
    for path in FILES:
        name, tree = NAMES[path], _tree(path)
        if name.startswith(("engines/", "config/engine.py", "elastic/engine/")) or name == "tools/from_deepspeed.py":
            continue
        asked = [node for node in ast.walk(tree) if isinstance(node, ast.Compare | ast.MatchValue)]
        words = {c.value for node in asked for c in ast.walk(node) if isinstance(c, ast.Constant)}
        if name not in defaults:
            words |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        wrong += [f"{name}: {word}" for word in words & set(ENGINES)]
    assert not wrong


def test_no_environment_writes_no_globals_no_type_questions() -> None:
    wrong = []
    for path in FILES:
        for node in ast.walk(_tree(path)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if (
                isinstance(node, ast.Global)
                or (
                    isinstance(node, ast.Subscript)
                    and isinstance(node.ctx, ast.Store | ast.Del)
                    and ast.unparse(node.value) == "os.environ"
                )
                or called in ("os.putenv", "os.environ.update", "os.environ.setdefault")
                # The host would wait for the device: from_host() does not.
                or (called == "torch.tensor" and any(word.arg == "device" for word in node.keywords))
                or (isinstance(node, ast.Call) and called == "isinstance" and "Engine" in ast.unparse(node.args[1]))
            ):
                wrong.append(f"{NAMES[path]}:{node.lineno} {ast.unparse(node)}")
    assert not wrong


def test_public_things_say_what_they_are() -> None:
    silent = []
    for path in FILES:
        tree = _tree(path)
        nodes = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef))]
        for node in nodes:
            public = not getattr(node, "name", "").startswith("_")
            if public and not ast.get_docstring(node):
                silent.append(f"{NAMES[path]}:{getattr(node, 'name', 'module')}")
    assert not silent
