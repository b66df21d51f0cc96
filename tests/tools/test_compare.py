"""``distaccum compare``: on made files, on runs in which one thing was changed, on several ranks and engines."""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distaccum import CrossEntropy, DataSpec, Trainer
from distaccum.checkpoint.store import MANIFEST
from distaccum.config.schema import RunConfig
from distaccum.tools.compare import command
from distaccum.tools.compare.difference import compare_checkpoints, compare_windows, same
from distaccum.tools.compare.tensors import differing
from distaccum.tools.export import save_whole
from tests.support.commands import QUIET, ROOT, TINY, run, succeed
from tests.support.runs import At

Said = tuple[int, str, str]
Compare = Callable[..., Said]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """The command's exit code, stdout and stderr."""

    def call(*arguments: object) -> Said:
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["distaccum compare", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            command.main()
        printed = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return int(stopped.value.code), printed.out, printed.err

    return call


# ------------------------------------------------------------------------------------------ made files


def _window(number: int, **changed: Any) -> dict[str, Any]:
    line = {
        "epoch": 0,
        "window": number,
        "step": number,
        "applied": True,
        "ids": 100 + number,
        "cut": 300 + number,
        "contents": 200 + number,
        "micro_batches": 2,
        "samples": 8,
        "counts": {"loss": 8.0},
        "loss": 1.0 / number,
        "grad_norm": 0.1 + number,
        "lr": [0.5, 0.25],
        "loss_scale": 1.0,
        "norms": {"first": 0.1, "second": 0.2, "third": 0.3},
    }
    return line | changed


def _made(folder: Path, windows: Sequence[Mapping[str, Any]], *, logged: bool = False, **environment: Any) -> Path:
    """A run directory with these windows, and nothing else."""
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps({"state": "done", "step": len(windows), "reason": ""}))
    (folder / "environment.json").write_text(json.dumps({"config": {"seed": 1}, "starts": []} | environment))
    lines = [dict(one) | ({"lr": one["lr"][0]} if logged else {}) for one in windows]
    name = "metrics.jsonl" if logged else "windows.jsonl"
    (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def _pair(tmp_path: Path, **changed: Any) -> tuple[Path, Path]:
    """Runs of nine windows, the fifth and later ones of B changed."""
    a = _made(tmp_path / "a", [_window(n) for n in range(1, 10)])
    b = _made(tmp_path / "b", [_window(n, **(changed if n >= 5 else {})) for n in range(1, 10)])
    return a, b


def test_bits_are_compared_and_nan_is_nan() -> None:
    assert same({"a": [math.nan, 1.0], "b": "x"}, {"b": "x", "a": [math.nan, 1.0]})
    assert same(1, 1.0)
    assert not same(0.1 + 0.2, 0.3)
    assert not same(0.0, -0.0)
    assert not same(math.nan, 1.0)
    assert not same([1.0], [1.0, 2.0])
    assert not same({"a": 1.0}, {"a": 1.0, "b": 1.0})
    assert not same(None, 1.0)
    assert same(None, None)


def test_the_same_windows_are_silence(tmp_path: Path, said: Compare) -> None:
    a, b = _pair(tmp_path, loss=math.nan)
    shutil.copy(b / "windows.jsonl", a / "windows.jsonl")
    assert said(a, b) == (0, "", "")


@pytest.mark.parametrize(
    ("changed", "line", "meaning"),
    [
        ({"ids": 7}, "data             other samples", "the window holds other samples"),
        ({"samples": 9}, "data             samples: 8 in A, 9 in B", "the window holds other samples"),
        ({"contents": 7}, "contents         other contents", "the same samples have other contents"),
        ({"counts": {"loss": 7.0}}, "counts           loss: 8.0 in A, 7.0 in B", "is counted otherwise"),
        ({"loss_scale": 2.0}, "loss scale       1.0 in A, 2.0 in B", "the loss scale of fp16 differs"),
        ({"loss": 0.25}, "loss             0.2 in A, 0.25 in B", "the gradient norms up to window 4: the forward"),
        ({"loss": 0.2000000000000001}, "loss             0.2 in A, 0.2000000000000001 in B", "the forward"),
        ({"grad_norm": 7.0}, "gradient         grad_norm: 5.1 in A, 7.0 in B", "the backward, or the reduction"),
        ({"lr": [0.5, 0.125]}, "learning rate    group 1: 0.25 in A, 0.125 in B", "the schedule"),
        ({"lr": [0.5]}, "learning rate    2 groups in A, 1 in B", "the schedule"),
        ({"applied": False}, "step             applied: True in A, False in B", "whether a window is applied"),
        (
            {"norms": {"first": 0.1, "second": 0.25, "third": 0.3}},
            "gradient         second: norm 0.2 in A, 0.25 in B\n",
            "the backward, or the reduction",
        ),
        (
            {"norms": {"first": 0.2, "second": 0.25, "third": 0.3}},
            "gradient         second: norm 0.2 in A, 0.25 in B (and 1 more parameter)\n",
            "the backward, or the reduction",
        ),
        (
            {"norms": {"first": 0.1, "second": 0.2}},
            "gradient         third: norm 0.3 in A, none in B\n",
            "the backward, or the reduction",
        ),
    ],
)
def test_the_first_window_that_differs_and_in_what(
    tmp_path: Path, said: Compare, changed: dict[str, Any], line: str, meaning: str
) -> None:
    a, b = _pair(tmp_path, **changed)
    code, out, err = said(a, b)
    assert (code, err) == (1, "")
    assert out.startswith("window 5 (epoch 0, update 5) is the first that differs\n")
    assert f"  {line}" in out
    assert meaning in out.splitlines()[-1]
    names = {found.split("  ")[1] for found in out.splitlines()[1:]}
    assert len(names & {"data", "contents", "counts", "loss scale", "loss", "gradient", "learning rate", "step"}) == 1


def test_what_comes_first_decides_what_it_means(tmp_path: Path, said: Compare) -> None:
    a, b = _pair(tmp_path, contents=7, loss=0.25, grad_norm=7.0, lr=[0.5, 0.1])
    _, out, _ = said(a, b)
    first = [line.split("  ")[1] for line in out.splitlines()[1:6]]
    assert first == ["contents", "loss", "gradient", "learning rate", "the same"]
    assert "the same samples have other contents" in out


def test_contents_are_not_compared_where_micro_batches_are_cut_otherwise(tmp_path: Path, said: Compare) -> None:
    a, b = _pair(tmp_path, contents=7, cut=1)
    assert said(a, b) == (0, "", "")
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    a, b = _pair(tmp_path, contents=7, cut=1, loss=0.25)
    _, out, _ = said(a, b)
    assert "contents         not compared: the samples are cut into other micro-batches (2 in A, 2 in B)" in out
    assert "The micro-batches are cut otherwise" in out


def test_the_numbers_of_a_streams_samples_are_not_compared(tmp_path: Path, said: Compare) -> None:
    a, b = _pair(tmp_path, ids=None)
    assert said(a, b) == (0, "", "")


def test_a_run_that_ends_earlier_is_the_same_as_far_as_it_goes(tmp_path: Path, said: Compare) -> None:
    a = _made(tmp_path / "a", [_window(n) for n in range(1, 10)])
    b = _made(tmp_path / "b", [_window(n) for n in range(1, 5)])
    code, out, err = said(a, b)
    assert (code, out) == (0, "")
    assert "the same as far as B goes: it ends with window 4, the other with window 9\n" in err
    found = json.loads(said(b, a, "--json")[1])
    assert found["same"]
    assert found["windows"]["last"] == [4, 9]
    assert "as far as A goes" in found["notes"][0]


def test_a_line_that_is_damaged_or_gone_is_told(tmp_path: Path, said: Compare) -> None:
    a = _made(tmp_path / "a", [_window(n) for n in range(1, 6)])
    b = _made(tmp_path / "b", [_window(n) for n in range(1, 6)])
    lines = (b / "windows.jsonl").read_text().splitlines()
    for damaged in ([*lines[:2], lines[2][:20], *lines[3:]], [*lines[:2], *lines[3:]]):
        (b / "windows.jsonl").write_text("\n".join(damaged) + "\n")
        code, out, err = said(a, b)
        assert (code, out) == (0, "")
        assert "1 window not compared: in windows.jsonl of one of them there is no line of it that can be read\n" in err
    assert json.loads(said(a, b, "--json")[1])["windows"]["alone"] == 1


def test_windows_that_one_run_has_no_record_of_are_passed_over(tmp_path: Path) -> None:
    a = _made(tmp_path / "a", [_window(n) for n in (1, 2, 3, 5, 6, 7)])
    b = _made(tmp_path / "b", [_window(n, **({"loss": 0.0} if n == 6 else {})) for n in (3, 4, 5, 6, 7, 8)])
    with (b / "windows.jsonl").open("a") as file:
        file.write('{"window": 9, "lo\n[]\n{"window": "ten"}\n')
    found = compare_windows(a, b)
    assert found.difference is not None
    assert (found.difference.window, found.same_until, found.compared, found.last) == (6, 5, 3, (7, 8))


def test_without_every_window_the_logged_ones_are_compared(tmp_path: Path, said: Compare) -> None:
    a = _made(tmp_path / "a", [_window(n) for n in range(1, 10)], logged=True)
    b = _made(tmp_path / "b", [_window(n, step_time_s=n) for n in (2, 4, 6, 8)], logged=True)
    (b / "windows.jsonl").write_text(json.dumps(_window(1)))
    code, out, err = said(a, b)
    assert (code, out) == (0, "")
    assert "4 logged windows are the same; the others are not recorded (no windows.jsonl in A" in err
    c = _made(tmp_path / "c", [_window(n, **({"loss": 0.0} if n > 5 else {})) for n in (2, 4, 6, 8)], logged=True)
    code, out, err = said(a, c)
    assert (code, err) == (1, "")
    assert out.startswith("window 6 (epoch 0, update 6) is the first logged one that differs\n")
    assert "seen             logged windows alone (no windows.jsonl in A and B: metrics.windows=true)" in out
    assert "the runs may differ since window 4, the last that is the same" in out
    assert "what came first is not known" in out


def test_settings_and_machines_that_differ_are_shown_where_something_is_to_be_explained(
    tmp_path: Path, said: Compare
) -> None:
    start = {"window": 0, "ranks": 1, "host": "one", "device": "H100", "git_commit": "aaaa", "versions": {"torch": "2"}}
    later = start | {"window": 4, "device": "H200", "versions": {"torch": "3"}}
    last = start | {"window": 5, "host": "two"}  # which has not run the window that differs
    config = {"seed": 1, "optim": {"lr": 0.1}, "metrics": {"windows": True}}
    other = {"seed": 2, "optim": {"lr": 0.1}, "metrics": {"windows": True, "console": False}}
    windows = [_window(n) for n in range(1, 10)]
    changed = [_window(n, **({"loss": 0.0} if n >= 5 else {})) for n in range(1, 10)]
    a = _made(tmp_path / "a", windows, config=config, starts=[start])
    _, out, _ = said(a, _made(tmp_path / "b", changed, config=other, starts=[start, later, last]))
    assert "  settings         seed: 1 in A, 2 in B\n" in out
    assert "  ran on           device: H100 in A, H200 in B; torch: 2 in A, 3 in B\n" in out
    _, out, _ = said(a, _made(tmp_path / "c", changed, config=config, starts=[start]))
    assert "the same, as are the machine, the git commit and the versions" in out
    assert said(a, _made(tmp_path / "d", windows, config=other, starts=[later])) == (0, "", "")


def test_misuse_is_one_message(tmp_path: Path, said: Compare) -> None:
    a = _made(tmp_path / "a", [_window(1)])
    apart = _made(tmp_path / "apart", [_window(2)])
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ([a, tmp_path / "gone"], "no such folder"),
        ([a, tmp_path / "empty"], "is no run"),
        ([a, a], "is named twice"),
        ([a, apart], "have no window and no checkpoint in common"),
    ):
        code, out, err = said(*arguments)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert message in err
    assert said(a)[0] == 2


def test_tensors_are_read_only_where_manifests_differ(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    weights = {"a": torch.tensor([1.0, math.nan]), "b": torch.zeros(2)}
    for folder in (one, other):
        folder.mkdir()
        save_whole(weights, folder / "model.safetensors")
        (folder / MANIFEST).write_text(json.dumps({"model.safetensors": "x", "state.json": folder.name}))
    (other / "model.safetensors").write_bytes(b"")  # not looked at
    assert differing(one, other) == []
    save_whole({"a": weights["a"]}, other / "model-0.safetensors")
    save_whole({"b": -weights["b"], "c": weights["a"].clone()}, other / "model-1.safetensors")
    (other / "model.safetensors").unlink()
    (other / MANIFEST).write_text(json.dumps({"model-0.safetensors": "y", "model-1.safetensors": "z"}))
    assert differing(one, other) == ["b", "c"]  # the zero's sign, and one that is in one of them only
    assert differing(one, other, "optimizer") == []


# ------------------------------------------------------------------------------------------ runs

CONFIG = {
    "batch": {"global_size": 4, "micro_size": 2},
    "optim": {"lr": 0.05},
    "schedule": {"_target_": "distaccum.train.schedules.Constant"},
    "trainer": {"max_steps": 10, "eval_every": 0, "log_every": 3, "verify": "never"},
    "checkpoint": {"every": 2, "keep": 0},
    "metrics": {"console": False, "report": False, "windows": True, "wandb": {"mode": "disabled"}},
}


class Planted(CrossEntropy):
    """Knows its window, of two micro-batches, and adds a little to the loss of one of them."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    @property
    def window(self) -> int:
        return (self.calls + 1) // 2

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        self.calls += 1
        total = super().__call__(model, batch)
        assert isinstance(total, Tensor)
        return total + (1e-6 if self.window == self.at else 0.0)


def _samples(changed: int | None = None) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    samples = [(torch.randn(4, generator=generator), torch.tensor(i % 3)) for i in range(16)]
    if changed is not None:
        samples[changed] = (samples[changed][0] + 1e-6, samples[changed][1])
    return samples


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def _run(folder: Path, **changed: Any) -> Path:
    """Trains; ``changed`` may have a ``model``, a ``loss``, ``samples``, ``callbacks`` and nested settings."""
    model, loss = changed.pop("model", None) or _model(), changed.pop("loss", None) or CrossEntropy()
    data, callbacks = DataSpec(train=changed.pop("samples", None) or _samples()), changed.pop("callbacks", [])
    groups = {key: {**CONFIG.get(key, {}), **value} for key, value in changed.items() if isinstance(value, dict)}  # type: ignore[dict-item]
    config = RunConfig.from_dict(CONFIG | changed | groups)
    Trainer(model, loss, data, config=config, run_dir=folder, callbacks=callbacks).fit()
    return folder


def _hooked(loss: Planted, at: int) -> nn.Module:
    """A model in which a parameter's gradient is changed in one window."""
    model = _model()

    def hook(gradient: Tensor) -> Tensor:
        return gradient * 1.001 if loss.window == at else gradient

    model.get_parameter("0.weight").register_hook(hook)
    return model


@pytest.mark.usefixtures("gloo_world")
def test_a_run_and_its_repetition_and_what_was_changed_in_it(tmp_path: Path, said: Compare) -> None:
    base = _run(tmp_path / "base")
    assert len((base / "windows.jsonl").read_text().splitlines()) == 10
    assert said(base, _run(tmp_path / "again")) == (0, "", "")

    def differs(name: str, **changed: Any) -> list[str]:
        code, out, err = said(base, _run(tmp_path / name, **changed))
        assert (code, err) == (1, ""), name
        return out.splitlines()

    lines = differs("order", seed=7)
    assert lines[0] == "window 1 (epoch 0, update 1) is the first that differs"
    assert lines[1] == "  data             other samples"
    assert "  settings         seed: 0 in A, 7 in B" in lines

    order = json.loads((base / "windows.jsonl").read_text().splitlines()[0])["ids"]
    lines = differs("contents", samples=_samples(changed=3))
    assert lines[1] == "  contents         other contents"
    assert json.loads((tmp_path / "contents" / "windows.jsonl").read_text().splitlines()[0])["ids"] == order

    lines = differs("loss", loss=Planted(5))
    assert lines[0] == "window 5 (epoch 1, update 5) is the first that differs"
    assert lines[1].startswith("  loss             ")
    assert lines[2].startswith("  the same         data, contents, counts, loss scale, gradient, learning rate, step")
    assert lines[3] == "  weights          the same at step 4, the last checkpoint of both before it"
    assert lines[-1].endswith(
        "and so are the weights before it: the forward (code, kernels, threads, hardware, random numbers)"
    )

    counting = Planted()
    lines = differs("gradient", model=_hooked(counting, 7), loss=counting)
    assert lines[0] == "window 7 (epoch 1, update 7) is the first that differs"
    assert lines[1].startswith("  gradient         0.weight: norm ")
    assert lines[1].endswith(" in B")
    assert "  the same         data, contents, counts, loss scale, loss, learning rate, step" in lines
    assert "the backward" in lines[-1]

    lines = differs("rate", optim={"lr": 0.06})
    assert lines[1] == "  learning rate    0.05 in A, 0.06 in B"
    assert "  settings         optim.lr: 0.05 in A, 0.06 in B" in lines

    @torch.no_grad()
    def nudge(run: Any) -> None:
        run.model[2].weight[0, 0] += 1e-3

    lines = differs("weights", callbacks=[At(10, nudge)])
    assert lines[:2] == [
        "the checkpoint of step 10 is the first that differs; every window that was compared up to 10 is the same",
        "  weights          2.weight",
    ]
    assert lines[-1].endswith("the optimizer's step, or a change of the weights by hand")

    lines = differs("between", callbacks=[At(6, nudge)])
    assert lines[0].startswith("the checkpoint of step 6 is the first that differs")
    assert "window 7 (epoch 1, update 7) is the first that differs" in lines
    first = compare_checkpoints(base, tmp_path / "between")  # of three that differ
    assert first is not None
    assert (first.step, first.weights) == (6, ("2.weight",))

    assert (
        "the same as far as B goes"
        in said(base, _run(tmp_path / "short", trainer=CONFIG["trainer"] | {"max_steps": 6}))[2]
    )  # type: ignore[operator]


@pytest.mark.usefixtures("gloo_world")
def test_a_damaged_checkpoint_is_said(tmp_path: Path, said: Compare) -> None:
    a, b = _run(tmp_path / "a"), _run(tmp_path / "b")
    (b / "checkpoints" / "step-10" / MANIFEST).unlink()
    (b / "checkpoints" / "step-10" / "model.safetensors").write_bytes(b"nothing")
    code, out, err = said(a, b)
    assert (code, out) == (2, "")
    assert "cannot be read as safetensors" in err


RECORDED = (*TINY, *QUIET, "metrics.windows=true", "trainer.max_steps=4", "batch.global_size=10", "batch.micro_size=2")
SAYS = ROOT / "distaccum" / "__main__.py"


def _windows(folder: Path, *arguments: object, world: int) -> list[dict[str, Any]]:
    succeed(*RECORDED, *arguments, f"hydra.run.dir={folder}", world=world, DS_ACCELERATOR="cpu")
    return [json.loads(line) for line in (folder / "windows.jsonl").read_text().splitlines()]


@pytest.mark.heavy
def test_ranks_and_engines_record_the_same_window(tmp_path: Path) -> None:
    """Ten samples are fives on two ranks, and cut into other micro-batches than on one; eight are not."""
    base = _windows(tmp_path / "base", world=1)
    assert [line["micro_batches"] for line in base] == [5] * 4
    even = _windows(tmp_path / "even", "batch.global_size=8", world=1)
    split = _windows(tmp_path / "split", "batch.global_size=8", world=2)
    for key in ("ids", "cut", "contents", "micro_batches"):
        assert [line[key] for line in split] == [line[key] for line in even], key
    cells = {
        "ddp": ("engine=ddp",),
        "zero1": ("engine=zero1", "precision=fp16"),
        "fsdp2": ("engine=fsdp2",),
        "deepspeed": ("engine=deepspeed", "engine.stage=1"),
    }
    for name, settings in cells.items():
        lines = _windows(tmp_path / name, *settings, world=2)
        for key in ("window", "step", "ids", "samples", "counts", "lr"):
            assert [line[key] for line in lines] == [line[key] for line in base], (name, key)
        assert lines[0]["cut"] != base[0]["cut"]
        exact = 1e-2 if name == "zero1" else 1e-5
        for line, expected in zip(lines, base, strict=True):
            assert list(line["norms"]) == list(expected["norms"]), name
            for parameter, norm in expected["norms"].items():
                assert line["norms"][parameter] == pytest.approx(norm, rel=exact), (name, parameter)
            assert sum(norm**2 for norm in line["norms"].values()) ** 0.5 == pytest.approx(line["grad_norm"], rel=1e-6)


def test_the_command_of_the_page(tmp_path: Path) -> None:
    """Two ranks, twice; then with another seed."""
    for name, seed in (("before", 1), ("after", 1), ("other", 2)):
        _windows(tmp_path / "runs" / name, f"seed={seed}", world=2)
    before, after, other = (f"runs/{name}" for name in ("before", "after", "other"))
    same = succeed("compare", before, after, script=SAYS, cwd=tmp_path)
    assert (same.stdout, same.stderr) == ("", "")
    differ = run("compare", before, other, script=SAYS, cwd=tmp_path)
    assert differ.returncode == 1
    assert "window 1 (epoch 0, update 1) is the first that differs\n  data             other samples" in differ.stdout
    assert "settings         seed: 1 in A, 2 in B" in differ.stdout
    found = json.loads(run("compare", before, other, "--json", script=SAYS, cwd=tmp_path).stdout)
    assert found["windows"]["difference"]["window"] == 1
    assert found["settings"] == {"seed": [1, 2]}
