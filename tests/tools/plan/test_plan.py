"""``distaccum plan``: what it counts, measures, prints and writes, and what it says where it cannot."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from distaccum.config.engine import engine_config
from distaccum.config.extras import install_command
from distaccum.config.schema import RunConfig
from distaccum.data.collate import PadCollator
from distaccum.data.spec import DataSpec
from distaccum.errors import ConfigError
from distaccum.tools.plan import command as plan
from distaccum.tools.plan import settings_command
from distaccum.train.components import components_from_config
from tests.support.commands import ROOT, TINY, run, succeed

PLAN = ROOT / "launch" / "plan.py"


def test_the_command_plans_a_model_larger_than_the_machine(tmp_path: Path) -> None:
    """A GPT of 39 billion parameters, which would take 155 GB."""
    finished = succeed(
        "engine=fsdp2",
        "model.n_layer=48",
        "model.n_embd=8192",
        "model.n_head=64",
        "batch.global_size=4",
        "batch.micro_size=1",
        "cluster.micro_step_ms=1000",
        f"hydra.run.dir={tmp_path}",
        script=PLAN,
        COLUMNS="100",
    )
    found = json.loads((tmp_path / "plan.json").read_text())
    block = 12 * 8192**2 + 2 * 8192
    assert found["block_sizes"] == [block] * 48
    assert found["model"] == {"parameters": 48 * block + 257 * 8192, "tensors": 290, "blocks": 48}
    assert found["memory"]["optimizer state"] == 8 * found["model"]["parameters"] / 16
    assert found["batch"]["idle"] == 12
    assert "12 ranks have nothing to do" in finished.stdout
    assert "*16" in finished.stdout
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_measures_here_where_it_is_told_no_time(tmp_path: Path) -> None:
    file = tmp_path / "elsewhere" / "found.json"
    succeed(*TINY, "optim=sgd", f"plan.json={file}", f"hydra.run.dir={tmp_path}", script=PLAN)
    found = json.loads(file.read_text())
    assert found["cluster"]["micro_step_ms"] > 0
    assert found["cluster"]["update_ms"] > 0
    angles = 2 * 16 * 4  # the cosine and sine at 16 positions, of 4 pairs of channels
    assert found["memory"]["parameters"] == 4 * (7216 + angles)
    assert found["memory"]["optimizer state"] == 4 * 7216  # momentum


def test_the_command_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    """Whether Hydra finds it, or the cluster's settings."""
    for argument, message in (
        ("cluster.link_gbps=-1", "plan: configuration error: cluster.link_gbps=-1: must be a positive finite number"),
        ("engine=fsdp3", "plan: configuration error: engine=fsdp3: no such choice"),
    ):
        finished = run(argument, f"hydra.run.dir={tmp_path / 'refused'}", script=PLAN)
        assert (finished.returncode, finished.stdout) == (2, "")
        assert finished.stderr.startswith(message)
        assert finished.stderr.count("\n") == 1
        assert not (tmp_path / "refused").exists()


def test_a_budget_of_tokens_cannot_be_planned_without_the_data() -> None:
    values = {"cluster": {"micro_step_ms": 1.0}, "batch": {"global_size": None, "tokens": 4096}}
    with pytest.raises(ConfigError, match=r"batch\.tokens=4096: cannot be planned without the data"):
        plan.plan(values)


def test_automatic_replicas_are_the_planned_nodes() -> None:
    stated, automatic = (
        plan.plan(_values(engine={"name": "fsdp2", "replicas": one}, cluster=CLUSTER | {"nodes": 2, "gpus": 2}))
        for one in (2, "auto")
    )
    assert (
        automatic.pop("engine") == f"{stated.pop('engine')}, replicas as cluster.nodes says, at every number of ranks"
    )
    assert automatic == stated


def test_the_stages_of_a_schedule_are_said_to_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT | {"vocab_size": 8, "seq_len": 8, "n_layer": 1, "n_head": 1, "n_embd": 4}
    batch = {"global_size": 32, "schedule": [{"global_size": 8, "updates": 3}]}
    values = {"cluster": {"micro_step_ms": 1.0}, "batch": batch, "model": model}
    found = plan.plan(values, activations=False)
    plan.show(found)
    assert found["batch"]["global_size"] == 32
    assert "after the stages of batch.schedule (1), which these figures leave out" in capsys.readouterr().out


def test_a_plot_is_an_error_only_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    default = tmp_path / "plan.png"
    assert settings_command.plot_file("plan.plot", None, default) == default
    assert settings_command.plot_file("plan.plot", "my.png", default) == Path("my.png")
    monkeypatch.setattr(settings_command, "find_spec", lambda _: None)
    assert settings_command.plot_file("plan.plot", None, default) is None
    assert capsys.readouterr().err == f"no plan.png: matplotlib is missing; {install_command('plot')}\n"
    with pytest.raises(ConfigError, match=r"plan\.plot=my\.png: matplotlib is missing"):
        settings_command.plot_file("plan.plot", "my.png", default)


def test_the_state_of_several_optimizers_is_counted_by_what_each_steps() -> None:
    model = {"_target_": "distaccum.models.gpt.GPT", "vocab_size": 257, "seq_len": 16}
    muon = {"match": "blocks.*", "dims": 2, "optimizer": {"_target_": "torch.optim.Muon"}}
    groups = [{"dims": 1, "weight_decay": 0.0}, muon]
    config = RunConfig.from_dict(
        {"model": model | {"n_layer": 1, "n_head": 2, "n_embd": 16}, "optim": {"groups": groups}}
    )
    rest, thin, matrices = 257 * 16, 3 * 16, 12 * 16**2
    assert [group.parameters for group in plan.groups_of(config)] == [rest, thin, matrices]
    expected = (8 * (rest + thin) + 4 * matrices) / (rest + thin + matrices)
    assert plan.moments_of(config) == pytest.approx(expected)
    for engine, owned in (
        ("fsdp2", (3 * 16**2, 16**2, 4 * 16**2, 4 * 16**2)),
        ("zero1", ()),
    ):  # fsdp2's shards are whole again on their owners
        sizes = plan.job_of(replace(config, engine=engine_config(engine))).sizes
        assert (sizes.owned, sizes.owned_moments) == (owned, 4 if owned else 0)


@pytest.mark.parametrize("by", ["tokens", "flops"])
def test_a_balance_is_told_by_the_windows_that_it_deals(by: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of texts of 1 to 40 tokens in a window of four ranks, by the run's own plan."""
    gpt = GPT | {"vocab_size": 8, "seq_len": 40, "n_layer": 1, "n_head": 1, "n_embd": 4}
    data = {"_target_": f"{__name__}.texts"}
    batch = {"global_size": 40, "micro_size": 2, "balance": by}
    values = _values(data=data, model=gpt, batch=batch, cluster=CLUSTER | {"gpus": 2})
    config = RunConfig.from_dict({key: value for key, value in values.items() if key != "cluster"})
    own: Any = components_from_config(config, world_size=4, device=torch.device("cpu")).plan
    found = plan.plan(values, activations=False)
    for key, dealt in (("longest_over_mean", True), ("without", False)):
        costs = own.epoch(0).costs(0, dealt=dealt)
        assert found["balance"][key] == max(costs) / np.mean(costs)
    assert 1 <= found["balance"]["longest_over_mean"] < 1.1 < found["balance"]["without"]
    plan.show(found)
    said = own.describe()[0].split(f"by {by}: ")[1]
    assert f"balance    by {by}: {said}; times here are the mean's\n" in capsys.readouterr().out
    elsewhere = plan.plan(_values(data=data | {"a": 1}, batch=batch), activations=False)
    assert elsewhere["balance"]["unknown"].startswith("is not known: data.a=1")
    with pytest.raises(ConfigError, match=rf"batch\.balance={by}: the data does not say how long"):
        plan.plan(_values(batch=batch), activations=False)


CROSS_ENTROPY = {"_target_": "distaccum.losses.cross_entropy.CrossEntropy"}
GPT = {"_target_": "distaccum.models.gpt.GPT", "vocab_size": 50257, "seq_len": 1024}
GPT2_XL = GPT | {"n_layer": 48, "n_head": 25, "n_embd": 1600, "positions": "learned", "bias": True}
CLUSTER = {"nodes": 2, "gpus": 8, "micro_step_ms": 50.0, "memory_gib": 80.0}


class Table(nn.Module):
    """Its forward reads a number where it is told to."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.layer, self._reads = nn.Linear(4, 10), reads

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x if not self._reads else x * x.sum().item())
        return logits


def rows(*, width: int, lengths: bool = False) -> DataSpec:
    """Forty rows of numbers with their labels; the last is as long as it says."""
    data: Any = [(torch.zeros(width), 0) for _ in range(40)]
    return DataSpec(train=data, lengths=np.arange(40) if lengths else None)


def texts() -> DataSpec:
    """Forty, of 1 to 40 tokens."""
    ids = [torch.ones(n, dtype=torch.long) for n in range(1, 41)]
    return DataSpec(train=[(x, x) for x in ids], lengths=np.arange(1, 41), collate=PadCollator((0, -100)))


def _values(**changes: Any) -> dict[str, Any]:
    here = {"_target_": f"{__name__}.rows", "width": 4}
    batch = {"global_size": 32, "micro_size": 8}
    plain = {"data": here, "model": {"_target_": f"{__name__}.Table", "reads": False}, "loss": CROSS_ENTROPY}
    return plain | {"batch": batch, "cluster": dict(CLUSTER)} | changes


def test_the_peak_of_a_model_that_no_machine_here_could_hold(tmp_path: Path) -> None:
    """GPT-2 of 1.5 billion parameters: its activations in bf16 by hand, in which a block keeps what follows."""
    np.zeros(20 * 1025, dtype=np.uint16).tofile(tmp_path / "train.bin")
    data = {"_target_": "distaccum.data.datasets.tokens.tokens", "path": str(tmp_path / "*.bin"), "vocab_size": 50257}
    data |= {"seq_len": 1024, "held_out": 0.1, "held_out_path": None}
    settings = {"data": data, "model": GPT2_XL, "loss": CROSS_ENTROPY | {"chunk": 512}, "precision": {"name": "bf16"}}
    sizes = {"global_size": 32, "micro_size": 2}
    found = plan.plan(_values(**settings, batch=sizes, engine={"name": "fsdp2"}))
    assert found["batch"]["micro_batches"] == [2]
    assert found["peak"]["state"] == found["memory"]["total"] == pytest.approx(1.557e9 * (4 + 12 / 16), rel=1e-2)
    tokens, width = 2 * 1024, 1600
    # In fp32 the stream before attention and feed-forward; in 16 bits the norms' outputs, queries, keys and values,
    # attention's output, and of four times the width what goes into the activation and what comes out of it.
    block = tokens * width * (2 * 4 + 2 * (2 + 3 + 1 + 4 + 4))
    assert found["micro_step"]["kept"] == pytest.approx(48 * block, rel=0.1)
    assert found["micro_step"]["kept"] < found["peak"]["activations"] < 1.2 * found["micro_step"]["kept"]
    assert found["peak"]["total"] == sum(list(found["peak"].values())[:-1])
    assert found["host"]["micro-batches"] == 2 * 2 * 1024 * 8
    (kept, card) = plan.about_peak(found)
    assert kept.endswith("by a CPU's operators" if not torch.cuda.is_available() else "by a GPU's operators")
    assert card.startswith("card       of 80 GiB: the peak fits, ")
    found["cluster"]["memory_gib"] = 8.0
    assert plan.about_peak(found)[-1].startswith("card       of 8 GiB: the peak does not fit: ")


def test_a_micro_batch_has_the_samples_of_a_rank() -> None:
    """On 16 ranks 2 of 32, whatever micro-batches are allowed; and the longest, where lengths are known."""
    here = plan.plan(_values())["micro_step"]
    assert here["batch"] == 2 * (4 * 4 + 8)
    alone = plan.plan(_values(cluster=CLUSTER | {"nodes": 1, "gpus": 1}))
    assert alone["micro_step"]["batch"] == alone["peak"]["micro-batches"] / 2 == 8 * (4 * 4 + 8)
    config = RunConfig.from_dict({key: value for key, value in _values().items() if key != "cluster"})
    assert plan.peak_bytes(config) == alone["peak"]["total"]
    assert plan.peak_bytes(config, 16) < plan.peak_bytes(config)
    with pytest.raises(ConfigError, match=r"batch\.micro_size=64: larger than batch\.global_size=32"):
        plan.peak_bytes(replace(config, batch=replace(config.batch, micro_size=64)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {"_target_": f"{__name__}.Table", "reads": True}}, "the model cannot be run without numbers: "),
        ({"data": {"_target_": f"{__name__}.rows", "width": 4, "height": 4}}, "there is no micro-batch: data.height=4"),
        ({"engine": {"name": "deepspeed", "stage": 3}}, "DeepSpeed decides while it runs"),
    ],
    ids=["reads", "no data", "deepspeed"],
)
def test_what_cannot_be_known_is_said_and_not_guessed(changes: dict[str, Any], reason: str) -> None:
    found = plan.plan(_values(**changes))
    assert found["peak"]["total"] is None
    assert plan.about_peak(found)[0].startswith(f"peak       is not known: {reason}")
    config = {key: value for key, value in _values(**changes).items() if key != "cluster"}
    with pytest.raises(ConfigError, match=reason):
        plan.peak_bytes(RunConfig.from_dict(config))


def test_a_model_in_16_bits_takes_its_inputs_in_them() -> None:
    """DeepSpeed's: kept are, of 2 samples, 4 inputs in them, 10 logarithms in fp32, and a loss with its count."""
    found = plan.plan(_values(precision={"name": "bf16"}, engine={"name": "deepspeed", "stage": 1}))
    assert found["peak"]["total"] is not None
    assert found["micro_step"]["kept"] == 2 * (4 * 2 + 10 * 4) + 2 * 4


def test_a_kernel_that_this_machine_has_not_is_said() -> None:
    text = {"_target_": "distaccum.data.datasets.text.docs", "seq_len": 16, "held_out": 0.1}
    small = {"vocab_size": 256, "seq_len": 16, "n_layer": 1, "n_head": 2, "n_embd": 16, "attention": "cudnn"}
    found = plan.plan(_values(data=text, model=GPT | small))
    if not torch.cuda.is_available():
        assert "model.attention=cudnn: torch has no such kernel" in found["micro_step"]["unknown"]


def test_model_and_data_that_do_not_fit_are_one_message() -> None:
    wide = {"data": {"_target_": f"{__name__}.rows", "width": 5}}
    with pytest.raises(
        ConfigError, match=r"^model=.*Table: does not take a micro-batch of the data \(.*plan\.activations"
    ):
        plan.plan(_values(**wide))
    found = plan.plan(_values(**wide), activations=False)
    assert (found["peak"]["total"], found["micro_step"]["unknown"]) == (None, "plan.activations=false")
