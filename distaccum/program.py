"""What every command does as a program: its version, its help, and pipes that nobody reads.

The one command, ``distaccum NAME``, and its table of names are here, too: a command's module is loaded once it is
chosen, so that ``--help`` and ``--version`` load neither torch nor Hydra. Begin with ``TABLE``.
"""

from __future__ import annotations

import io
import logging
import os
import platform
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import distaccum
from distaccum.errors import near_misses

# The subcommands of ``distaccum``: a name, what is called, and a sentence.


@dataclass(frozen=True)
class Command:
    """A subcommand: ``target`` is ``module:function``, which reads ``sys.argv[1:]`` and may exit."""

    name: str
    target: str
    says: str

    @property
    def module(self) -> str:
        """The module that is imported once the command is chosen."""
        return self.target.partition(":")[0]

    def is_there(self) -> bool:
        """Whether this installation has the command; looks for its module, and imports none but empty packages."""
        try:
            return find_spec(self.module) is not None
        except ModuleNotFoundError:
            return False

    def load(self) -> Any:
        """Imports the function."""
        return load(self.target)


def load(target: str) -> Any:
    """What ``module:name`` is; its module is imported. So the core reaches tools that it does not import."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


REPORT = "distaccum.tools.report.at_end:ReportAtEnd"
"""A context around a run, which writes its report at its end."""
BEST_EVALUATION = "distaccum.tools.report.at_end:best_evaluation"
"""Gives a run's best evaluation in words, for the summary."""
PROFILER = "distaccum.tools.profiling:Profiler"
"""A part of a run, where some of its windows are to be profiled."""
BEGAN = "distaccum.tools.diagnose:where_it_began"
"""Says where a gradient became NaN or infinite, of the window that ends a run."""
FAULT = "distaccum.tools.gradient_fault:what_is_wrong"
"""Says what is wrong with a gradient that a proof found not to be the window's."""
KEPT, STEP_FAULT = (f"distaccum.tools.kept_beside:{name}" for name in ("check_kept", "fault_of_step"))
"""Refuses an optimizer that keeps tensors by its parameters' places; says what a step of an optimizer's code raises."""
GATHERED = "distaccum.tools.gather:expect_none_of_torch"
"""Refuses nodes of a graph that torch's own ``all_gather`` has made, where its gradient is wrong."""
ALIASES = "distaccum.tools.aliases:Aliases"
"""Refuses an engine that trains weights in other memory than what shares theirs."""
CHECK_FP8, FP8 = "distaccum.tools.fp8:check", "distaccum.tools.fp8:Fp8"
"""Refuses what ``precision=fp8`` cannot do; has a model's linear layers compute in it, where that is the precision."""
STEPPED = "distaccum.tools.steps_in_backward:expect_none"
"""Refuses a model whose parameters torch steps in the backward."""
SLOPE = "distaccum.tools.directional:compare_with_slope"
"""Compares a window's gradient with the slope of its loss, where a model is sharded and large."""
HOOKED = "distaccum.tools.steps_in_backward:apply"
"""What users' post-accumulate hooks make of gradients; None where there are no hooks."""
HOOKS = "distaccum.tools.steps_in_backward:watch"
"""Has the users' hooks on a model's parameters refused that step them in the backward; gives what takes that back."""
OWNERS, WHOLE_NORMS = "distaccum.tools.owners:Owners", "distaccum.tools.owners:WholeNorms"
"""Steps, on an engine that shards parameters, the rules that need whole tensors; and takes the norms of whole ones."""
SHARD_FUNCTIONS = "distaccum.tools.shard_functions:ShardFunctions"
"""Refuses, within the block, torch's functions that compute with shards."""
PLAIN_STATE = "distaccum.tools.function_state:ProgramState"
"""Keeps and puts back the plain attributes of modules and other objects, and what hooks and functions keep."""
RELATIONS = "distaccum.tools.relations:Relations"
"""Looks at what holds in a window of every right program."""
MEANS = "distaccum.tools.means:Means"
"""Says of a window's losses that one is a mean and was given as a sum, or with another count than it is a mean over."""
FIRST_LOSS = "distaccum.tools.first_loss:FirstLoss"
"""Says of an untrained classifier's loss that it looks divided by a number that the step is made of."""
DIVERGED = "distaccum.tools.divergence:who_differs"
"""Says which ranks' weights or optimizer state differ from the others', and in which tensors."""
LOOP_CHECKPOINTS = "distaccum.tools.loop_checkpoints:LoopCheckpoints"
"""Saves and resumes an Accumulator's loop."""
SWEEP = "distaccum.tools.sweeps:Sweep"
"""Says what a sweep asks of a job of the command line, and what the job returns to it."""
OBJECTIVE = "distaccum.tools.sweeps:check_of_records"
"""Refuses an objective that no record has."""
STRAGGLERS = "distaccum.tools.stragglers:Stragglers"
"""A hook that finds the rank that the others wait for."""
BESIDE, STAGES = "distaccum.tools.batch:attached", "distaccum.tools.growth:stages"
"""Has what the batch's settings ask for look at a run's windows; says what is set in stages of the global batch."""
REPLICAS = "distaccum.tools.nodes:with_replicas"
"""Gives an engine's settings a replica for each node."""
NOISE = "distaccum.tools.noise:check"
"""Refuses a gradient noise scale of a run that has none."""
BALANCED, LONGEST_RANK = (f"distaccum.tools.balance:{name}" for name in ("balanced", "LongestRank"))
"""Makes a plan whose ranks compute as much; a part of a run that records how much more the longest rank does."""
WINDOWS = "distaccum.tools.compare.windows:WindowRecorder"
"""A part of a run that records every window."""
MODULES = "distaccum.tools.modules:modules_of"
"""Gives the lines of the header's table of a model."""
UTILIZATION = "distaccum.tools.flops:build_utilization"
"""What tells TFLOP/s and MFU of a run's components, or None."""
ENVIRONMENT = "distaccum.tools.environment:note_environment"
"""Adds this process to what the run ran on, and says what has changed since it was saved."""
ACCELERATORS, OWN_DEVICE = (f"distaccum.tools.accelerators:{name}" for name in ("accelerators", "own_device"))
"""The machine's accelerators, type and number; makes one this process's, and says what its group is opened with."""
NOTE_START, CRASH_LOOP = (f"distaccum.tools.restarts:{name}" for name in ("note_start", "refuse_crash_loop"))
"""Notes a start in a run directory; refuses one after three that a machine has started in a row and that failed."""
NEWEST, BEGINNING = (f"distaccum.tools.history:{name}" for name in ("newest_checkpoint", "beginning"))
"""The checkpoint that a run directory's run goes on from; what is said of a start from zero there."""
TENSORBOARD = "distaccum.tools.tensorboard:TensorBoardLogger"
"""A logger that writes TensorBoard's event files."""
WANDB, WANDB_KEY, WANDB_RUN_ID = (f"distaccum.tools.wandb:{name}" for name in ("loggers", "require_key", "run_id"))
"""Makes loggers that send records to W&B, one or none; requires the key that a server asks for; the id of a new run."""
MLFLOW = "distaccum.tools.mlflow:logger"
"""Makes a logger that sends records to MLflow, of its settings and the run's folder."""
METRICS = "distaccum.tools.metric_results:MetricResults"
"""Makes results of what metrics compute, for a run's data and its model."""
FROM_DATA, CLASSES, DESCRIBE = (f"distaccum.tools.hugging_face:{name}" for name in ("from_data", "check", "describe"))
"""What data and a loss say of labels; compares a classifier with that; writes what describes it beside a run."""
TARGETS = "distaccum.tools.targets:labelled_rows"
"""Reads texts and labels of a file, these as losses take them, with the names of the classes."""
TEXTS = "distaccum.tools.texts:writer"
"""Makes what writes texts at evaluations, of a run's data, its model and its settings."""
LONGEST = "distaccum.tools.longest:longest_micro_batch"
"""The longest micro-batch of some data, of so many samples."""
REHEARSAL = "distaccum.tools.rehearsal:rehearse"
"""Finds the micro-batch by running some sizes of it, where nobody states one."""
HOST_MEMORY = "distaccum.tools.host_memory:most_ahead"
"""Says how many micro-batches may be loaded ahead within ``trainer.host_memory``, where that is stated."""
BEST, SCORE, PREDICT = (f"distaccum.tools.inference:{name}" for name in ("load_best", "score", "predict"))
"""What a Trainer does with its model between two runs; each is given components and a World first."""
HELP = "distaccum.tools.help:show"
"""Prints what can be set, given ``train`` or ``plan`` and a key or group, and gives the exit code."""
COMPLETE = "distaccum.tools.completion:complete"
COMPLETE_WORDS = "distaccum.tools.completion:complete_words"
"""Answer a shell that completes what is typed: settings alone, or behind ``distaccum``."""
FLAGS = "distaccum.tools.command_line:flags_as_settings"
"""Makes settings of flags: ``--optim.lr=0.01``."""
LORA = "distaccum.tools.lora:adapters"
"""Makes what puts adapters into a model, of their settings."""
HUB = "distaccum.tools.hub:fetched"
"""Makes something of a model of the Hugging Face hub, from its cache where it is there."""
ANSWERS = "distaccum.tools.answers:samples"
"""Makes samples of a language model, of which answers alone are learned, of a file's rows and a tokenizer."""
WEIGHTS = "distaccum.tools.rows:weights"
"""The weight of each row of a CSV, JSON-lines or Parquet file, from a column or a file of its own."""
STREAM_WORKERS = "distaccum.tools.stream_workers:warn_of_workers"
"""Warns of a ``DataLoader`` over a stream that each of its processes may yield whole."""
REFUSED = "distaccum.tools.command_line:refused"
"""Says what is wrong with a command line, without torch, where it can tell; else None."""
SAID_BY_HYDRA = "distaccum.tools.command_line:from_hydra"
"""Makes a ConfigError of what Hydra raises where it cannot compose a command line."""
MODEL_AND_DATA = "distaccum.tools.own_files:of_model_and_data"
"""Makes a ConfigError that says what the data give, of one for a model's setting that was to be theirs."""
KERAS_MODEL, KERAS_LOSS = "distaccum.tools.keras_model:KerasModel", "distaccum.tools.keras_loss:KerasLoss"
"""What Keras's models and losses are trained by."""
TORCH_SCHEDULE = tuple(f"distaccum.tools.torch_schedule:{name}" for name in ("TorchSchedule", "copies"))
"""Makes a schedule of a scheduler of torch's, and what copies one."""
RECORD_FILE, REWIND, LAST_WINDOW, LINES = (
    f"distaccum.tools.record_file:{name}" for name in ("RecordFile", "rewind", "last_window", "lines_of")
)
"""What appends to a run's ``metrics.jsonl``, takes records back, and tells of the last one and of their number."""
STORE = "distaccum.tools.joining:joined"
"""The launcher's store, of a rank and the number of ranks."""
SUBMITIT = "distaccum.tools.submitit:SubmititJob"
"""A job of a sweep, as Hydra's submitit launcher calls it on another machine."""


TABLE = (
    Command(
        "train", "distaccum.train.__main__:main", "trains what the settings describe, in one process or under torchrun"
    ),
    Command("plan", "distaccum.tools.plan.command:main", "forecasts what a run would hold, send and take on a cluster"),
    Command("launch", "distaccum.tools.launch:main", "starts a program of one's own on all GPUs of this machine"),
    Command(
        "verify",
        "distaccum.tools.verify:main",
        "says what a run directory holds, whole or not, and what resume=auto would do",
    ),
    Command(
        "compare", "distaccum.tools.compare.command:main", "says the first window in which two runs differ, and in what"
    ),
    Command("export", "distaccum.tools.export:main", "writes a checkpoint's weights into one safetensors file"),
    Command(
        "predict", "distaccum.tools.predict:main", "writes what a run's best weights say of each sample into a file"
    ),
    Command(
        "report", "distaccum.tools.report.command:main", "draws the curves of one run or several into one HTML file"
    ),
    Command(
        "audit",
        "distaccum.tools.audit.command:main",
        "compares the gradient of somebody's script with the global batch's",
    ),
    Command(
        "doctor",
        "distaccum.tools.doctor.command:main",
        "looks at this machine and the links between ranks, and says what to mend",
    ),
    Command("wandb-upload", "distaccum.tools.wandb_upload:main", "makes a W&B run of a run's metrics.jsonl"),
)


def commands() -> dict[str, Command]:
    """The subcommands of this installation, by name."""
    return {command.name: command for command in TABLE if command.is_there()}


# ``distaccum NAME ...``: finds the subcommand, and calls it as if it had been started by its own script.

BAD_ARGUMENTS = 2
COMPLETION = ("-sc", "--shell-completion")
CONFIGURATIONS = {"train": "config", "plan": "plan"}
"""The commands that take settings, and the file of ``conf/`` of each."""
_HELP = ("--help", "-h", "help")
_EXAMPLES = """\
examples:
  distaccum train                             train the default model here
  distaccum train --help                      what can be set, group by group
  distaccum train --check=8 engine=fsdp2      would it run on 8 processes?
  torchrun --nproc-per-node=8 -m distaccum train engine=fsdp2
  distaccum verify runs/NAME
"""


def main() -> None:
    """Runs the subcommand that ``sys.argv[1]`` names, and exits as it does."""
    start(sys.argv[1:2])
    first, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    known = commands()
    if first in _HELP:
        if first == "help" and rest:  # `distaccum help train`
            first, rest = rest[0], ["--help"]
        else:
            say(overview(known))
            sys.exit(0)
    if first in COMPLETION or (first in CONFIGURATIONS and any(word in COMPLETION for word in rest)):
        load(COMPLETE_WORDS)(known, sys.argv[1:])
        sys.exit(0)
    if first not in known:
        complain(f"distaccum: {_unknown(first, known)}\n")
        sys.exit(BAD_ARGUMENTS)
    sys.argv = [f"distaccum {first}", *rest]
    known[first].load()()


def overview(known: Mapping[str, Command]) -> str:
    """What ``distaccum --help`` prints."""
    width = max(map(len, known)) + 4
    listed = "".join(wrapped(f"  {one.name}".ljust(width) + one.says, width) for one in known.values())
    return (
        "usage: distaccum COMMAND [ARGUMENTS]\n\n"
        "State the global batch, get exactly its gradient: the trainer and its tools.\n\n"
        f"commands:\n{listed}\n"
        "options:\n"
        "  --help     this text; after a command, its own\n"
        "  --version  the versions of distaccum, torch and Python\n\n"
        f"{_EXAMPLES}"
    )


def _unknown(word: str, known: Mapping[str, Command]) -> str:
    if "=" in word or word.startswith("-"):
        return f"{word}: no command. Settings and flags follow one, as in: distaccum train {word}"
    return f"{word}: no such command{near_misses(word, known) or '.'} Use one of {', '.join(known)}"


_log = logging.getLogger(__name__)

_WIDEST = 120


def start(given: Sequence[str] | None = None) -> None:
    """Begins a command: pipes are quiet, and ``--version`` among ``given`` (by default all arguments) is answered.

    Called again, it does nothing more. Ends the process with 0 where the version was asked for.
    """
    quiet_pipes()
    if "--version" in (sys.argv[1:] if given is None else given):
        say(f"{version()}\n")
        sys.exit(0)


def help_asked(given: Sequence[str]) -> str | None:
    """What help is asked for: the KEY of ``--help KEY`` or ``--help=KEY``, empty for all of it; None for none."""
    for i, argument in enumerate(given):
        flag, _, key = argument.partition("=")
        if flag in ("--help", "-h"):
            following = given[i + 1] if i + 1 < len(given) else ""
            return key or (following if not following.startswith("-") and "=" not in following else "")
    return None


def say(text: str) -> None:
    """Writes to stdout on rank 0 alone, where torchrun has started several processes."""
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(text)


def complain(text: str) -> None:
    """Writes to stderr on rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(text)


def wrapped(text: str, indent: int = 0) -> str:
    """A paragraph that fits the terminal (80 columns where there is none, 120 at most), its further lines indented."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_long_words=False) + "\n"


def version() -> str:
    """distaccum's version, torch's and Python's in one line; torch is not imported for it."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "missing"
    return f"distaccum {distaccum.__version__}, torch {torch}, Python {platform.python_version()}"


def quiet_pipes() -> None:
    """From when the reader of stdout or stderr is gone (``| head -1``), what is written to it goes nowhere.

    The command itself goes on: its files are written, its exit code says how it went, and a run trains to its end. A
    stream that was closed from the beginning (``>&-``) is nowhere, too.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, io.TextIOWrapper(_Unread(os.open(os.devnull, os.O_WRONLY), "w")))
        elif stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.flush()
            setattr(sys, name, _quiet(stream))


def outlive_output() -> None:
    """From here on what cannot be written to stdout or stderr is lost, as on a full disk: a warning says so once.

    For a run of hours, whose results are elsewhere; another command whose output is not whole has failed.
    """
    for name in ("stdout", "stderr"):
        buffer = getattr(getattr(sys, name), "buffer", None)
        raw = getattr(buffer, "raw", buffer)
        if isinstance(raw, _Unread):
            raw.loses = True
            raw.is_told = name == "stdout"  # nothing can be told through stderr from within


def _quiet(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    raw = _Unread(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # python -u has none
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Unread(io.FileIO):
    """A descriptor that becomes one of the null device once its reader is gone, for child processes as well."""

    loses = False
    """Whether what cannot be written for another reason is lost, too, and the next write tried again."""
    is_told = False
    """Whether a warning says so, once."""

    def write(self, data: object, /) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
        except OSError as error:
            if not self.loses:
                raise
            told, self.is_told = self.is_told, False
            if told:
                _log.warning("stdout: %s; what is printed there is lost, and the run goes on", error)
        return memoryview(data).nbytes  # type: ignore[arg-type]
