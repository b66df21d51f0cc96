"""Elastic runs whose members are killed, beside one that nobody disturbs: ``python -m tests.support.elastic_runs``."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.support.commands import ROOT, environment, logged, metrics, run, status

Fault = tuple[str, str, int, str]
References = Callable[..., Path]
"""Gives an undisturbed run with settings."""
TARGETS = "tests.support.elastic_targets"
BASE = (
    "data=digits",
    "~data.held_out",
    f"data._target_={TARGETS}.data",
    "model=cnn",
    "~model.channels",
    "~model.classes",
    f"model._target_={TARGETS}.Net",
    f"+callbacks.told._target_={TARGETS}.Told",
    "trainer.max_steps=24",
    "trainer.eval_every=8",
    "trainer.log_every=1",
    "metrics=jsonl",
    "metrics.report=false",
    "numerics=reproducible",
    "batch.global_size=24",
    "batch.micro_size=2",
    "checkpoint.every=6",
    "checkpoint.background=false",
    "optim.lr=0.01",
    "schedule.warmup_steps=4",
)
_TIMES = (
    "_per_s",
    "_s",
    "_bytes",
    "mfu",
    "slowest_rank",
    "slowest_over_median",
    "ranks",
    "recompiles",
    "underflow_share",
)


def same(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run, without what two runs need not share."""
    return [{key: value for key, value in one.items() if not key.endswith(_TIMES)} for one in metrics(run_dir)]


def near(found: Path, expected: Path) -> None:
    """Asserts that two runs have the same windows, and their losses to the last bits."""
    ours, theirs = same(found), same(expected)
    assert [one["window"] for one in ours] == [one["window"] for one in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert abs(mine["loss"] - other["loss"]) <= 1e-6 * abs(other["loss"]), (mine, other)


def first_difference(found: Path, expected: Path) -> str:
    """Of two runs' records and last checkpoints, in words; empty where there is none."""
    ours, theirs = same(found), same(expected)
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return f"record {mine.get('window')} for {other.get('window')}: " + ", ".join(
                f"{key} {mine.get(key)} != {other.get(key)}"
                for key in mine.keys() | other.keys()
                if mine.get(key) != other.get(key)
            )
    if len(ours) != len(theirs):
        return f"{len(ours)} records instead of {len(theirs)}"
    latest = [max((one / "checkpoints").glob("step-*"), key=lambda p: int(p.name[5:])) for one in (found, expected)]
    if latest[0].name != latest[1].name:
        return f"{latest[0].name} instead of {latest[1].name}"
    tensors = [_tensors(one) for one in latest]
    for kind in sorted({*tensors[0], *tensors[1]}):
        mine, other = (one.get(kind, {}) for one in tensors)
        wrong = [key for key in other if key not in mine or (mine[key] != other[key]).any()]
        if mine.keys() != other.keys() or wrong:
            return f"the {kind} of {latest[0].name} differs in {(wrong or [*mine.keys() ^ other.keys()])[:3]}"
    states = [json.loads((one / "state.json").read_text()) for one in latest]
    for key in ("clocks", "callbacks", "spikes"):
        if states[0].get(key) != states[1].get(key):
            return f"{key} in state.json: {states[0].get(key)} != {states[1].get(key)}"
    return ""


def kills(*places: tuple[str, str, int]) -> list[Fault]:
    """Of members, each at its phase after so many windows."""
    return [(*place, "kill") for place in places]


def _tensors(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Of a checkpoint's files by kind: how many files there are of one is a matter of the engine and the ranks."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        found.setdefault(file.name.partition(".")[0].partition("-")[0], {}).update(load_file(file))
    return found


def undisturbed(folder: Path, *arguments: str) -> Path:
    done = run(*BASE, *arguments, f"hydra.run.dir={folder}", PYTHONPATH=str(ROOT), timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@dataclass
class Job:
    """Agents of one run; see :func:`job`."""

    folder: Path
    arguments: Sequence[str]
    agents: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *flags: str, faults: Sequence[Fault] = (), **extra: str) -> subprocess.Popen[str]:
        told = {"TEST_FAULTS": json.dumps(faults), "TEST_FOLDER": str(self.folder.parent)}
        number = len(self.agents)
        with self._log(number).open("w") as log:
            agent = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "distaccum.elastic",
                    *flags,
                    *BASE,
                    *self.arguments,
                    f"hydra.run.dir={self.folder}",
                ],
                env=environment(PYTHONPATH=str(ROOT), **told, **extra),
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.agents.append(agent)
        return agent

    def _log(self, number: int) -> Path:
        return self.folder.parent / f"{self.folder.name}.agent-{number}.log"

    def said(self) -> str:
        """What the agents and their workers have printed."""
        return "".join(self._log(number).read_text() for number in range(len(self.agents)))

    def logs(self) -> str:
        return "".join(file.read_text() for file in sorted(self.folder.glob("logs/rank-*.log")))

    def views(self) -> list[int]:
        """The ranks of each generation, as its members have logged it."""
        found = dict[int, int]()
        for line in self.logs().splitlines():
            if ": generation " in line or " generation " in line:
                words = line.partition("generation ")[2].split()
                if len(words) > 2 and words[2] == "ranks,":
                    found[int(words[0].rstrip(":"))] = int(words[1])
        return [found[number] for number in sorted(found)]

    def workers(self) -> dict[str, int]:
        """The processes of the members that are there, by member."""
        return _members(self.folder)

    def windows(self) -> int:
        return logged(self.folder)

    def wait_for(self, condition: Callable[[], Any], within_s: float = 60) -> Any:
        """Until it holds, while the agents run."""
        latest = time.monotonic() + within_s
        while not (found := condition()):
            assert time.monotonic() < latest, f"waited for {within_s:.0f} s\n{self.said()}"
            assert any(agent.poll() is None for agent in self.agents), self.said()
            time.sleep(0.005)
        return found

    def kill(self, *members: str, number: int = signal.SIGKILL) -> None:
        """Sends members a signal, all of them at once."""
        there = self.workers()
        for member in members:
            os.kill(there[member], number)

    def end(self, within_s: float = 90) -> int:
        """Waits for the agents; returns the first one's exit code."""
        latest = time.monotonic() + within_s
        for agent in self.agents:
            try:
                agent.wait(max(0.1, latest - time.monotonic()))
            except subprocess.TimeoutExpired:
                text = f"the run has not ended in {within_s:.0f} s: {self.workers()}\n{self.said()}"
                raise AssertionError(text) from None
        return self.agents[0].returncode

    def close(self) -> None:
        for agent in self.agents:
            with suppress(ProcessLookupError):
                agent.kill()
            agent.wait()
        for pid, _ in list(_environments(self.folder)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def job(folder: Path, *arguments: str) -> Iterator[Job]:
    """Of these settings beside :data:`BASE`; nothing of it is left after the block."""
    made = Job(folder, arguments)
    try:
        yield made
    finally:
        made.close()


def elastic(folder: Path, *arguments: str, faults: Sequence[Fault] = (), ranks: int = 3, within_s: float = 90) -> Job:
    """A run of one node with its faults, from start to end; its exit code is asserted to be 0."""
    with job(folder, *arguments) as made:
        made.start(f"--nproc={ranks}", faults=faults)
        code = made.end(within_s)
        assert code == 0, made.said() + made.logs()
        assert status(folder)["state"] == "done"
        return made


def _environments(folder: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Of the processes of the run in this folder; its folder is in nobody else's command line or environment."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().decode(errors="replace").split("\0")
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        known = dict(one.split("=", 1) for one in variables if "=" in one)
        if known.get("TEST_FOLDER") == str(folder.parent) and words != [""]:
            yield int(process.name), known


def _members(folder: Path) -> dict[str, int]:
    """Without the processes that load for them, which have come later."""
    found = dict[str, int]()
    for pid, known in sorted(_environments(folder), key=lambda one: one[0], reverse=True):
        if "DISTACCUM_MEMBER" in known:
            found[known["DISTACCUM_MEMBER"]] = pid
    return found


SOAKED: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "fp16": (
        "precision=fp16",
        "precision.scaler.initial_scale_power=22",
        "precision.scaler.growth_interval=2",
        "precision.scaler.hysteresis=1",
    ),
    "average": ("callbacks=ema", "callbacks.ema.decay=0.9", "callbacks.ema.evaluate=true", "optim.clip_norm=0.1"),
    "spikes": ("trainer.on_spike=skip", "trainer.spike_zscore=2", "trainer.max_skips=80"),
    "loading": ("trainer.num_workers=1",),
    "zero1": ("engine=zero1", "optim.clip_norm=0.1"),
    "fsdp2": ("engine=fsdp2", "elastic.memory_every=7"),
}
_SOAK = ("trainer.max_steps=80", "+data.delay_s=0.003", "elastic.expel_after=5")


@dataclass(frozen=True)
class Plan:
    """One run of the soak: its settings, its ranks, and after how many records and seconds how many are sent what."""

    settings: str
    ranks: int
    blows: tuple[tuple[int, float, int, int], ...]

    @classmethod
    def of(cls, seed: int) -> Plan:
        """The same one for a seed."""
        chosen = random.Random(seed)  # noqa: S311  to be made again
        ranks = chosen.randint(2, 4)
        blows = []
        for _ in range(chosen.randint(1, 3)):
            number = signal.SIGSTOP if chosen.random() < 0.1 else signal.SIGKILL
            count = chosen.choice((1, 1, 1, 2)) if number == signal.SIGKILL else 1
            blows.append((chosen.randint(0, 70), chosen.uniform(0, 0.3), count, int(number)))
        return cls(chosen.choice([*SOAKED]), ranks, tuple(sorted(blows)))

    def __str__(self) -> str:
        blows = ", ".join(
            f"{count} x {signal.Signals(number).name} at {at}+{after:.2f} s" for at, after, count, number in self.blows
        )
        return f"{self.settings:8} {self.ranks} ranks; {blows}"


def soak(folder: Path, seed: int, plan: Plan, expected: Path) -> str:
    """Makes one run; returns what is wrong with it, in words."""
    chosen = random.Random(-seed)  # noqa: S311
    with job(folder / "run", *_SOAK, *SOAKED[plan.settings]) as made:
        agent, struck = made.start(f"--nproc={plan.ranks}"), set[str]()
        for at, after, count, number in plan.blows:
            with suppress(AssertionError):
                made.wait_for(lambda at=at: made.windows() >= max(at, 1) or agent.poll() is not None, 60)
            time.sleep(after)
            there = sorted(set(made.workers()) - struck)
            have_state = [member for member in there if (folder / f"in-{member}").exists()]
            if not have_state:  # a newcomer is all that is left of the members that were not struck
                continue
            there.remove(chosen.choice(have_state))  # with the last one the run would be over
            for member in chosen.sample(there, min(count, len(there))):
                with suppress(ProcessLookupError, KeyError):
                    made.kill(member, number=number)
                struck.add(member)
        try:
            code = made.end(90)
        except AssertionError as error:
            return f"{error}"
        if code or status(made.folder).get("state") != "done":
            return f"exit code {code}, {status(made.folder)}\n{made.said()}\n{made.logs()}"
        ranks = "".join(str(one["ranks"]) for one in metrics(made.folder))
        print(f"     {ranks}", flush=True)
        return first_difference(made.folder, expected)


def main() -> int:
    """Prints a line a run, and how many have gone wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--soak", type=int, default=25, metavar="N", help="runs")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next have the next ones")
    parser.add_argument("--settings", choices=[*SOAKED], help="of all; by default each run has some")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/elastic-soak"), help="is replaced")  # noqa: S108
    asked = parser.parse_args()
    shutil.rmtree(asked.folder, ignore_errors=True)
    references: dict[str, Path] = {}
    wrong = dict[int, str]()
    for seed in range(asked.seed, asked.seed + asked.soak):
        plan = Plan.of(seed)
        plan = replace(plan, settings=asked.settings or plan.settings)
        if plan.settings not in references:
            folder = asked.folder / f"undisturbed-{plan.settings}"
            folder.mkdir(parents=True)
            references[plan.settings] = undisturbed(
                folder / "run", *(word for word in _SOAK if not word.startswith("elastic")), *SOAKED[plan.settings]
            )
        folder, began = asked.folder / f"seed-{seed}", time.monotonic()
        folder.mkdir()
        trouble = soak(folder, seed, plan, references[plan.settings])
        print(f"{seed:4} {time.monotonic() - began:5.1f} s  {'WRONG' if trouble else 'same'}  {plan}", flush=True)
        if trouble:
            wrong[seed] = trouble
            (asked.folder / f"seed-{seed}.txt").write_text(trouble)
    print(f"{asked.soak} runs, {len(wrong)} wrong: {sorted(wrong)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
