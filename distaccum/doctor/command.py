"""The command ``distaccum doctor``: which probes are asked where, in which order, and what is made of it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from distaccum.doctor.facts import Look
from distaccum.doctor.limits import Probe, look, start
from distaccum.doctor.table import Examination, Section, show

if TYPE_CHECKING:
    from distaccum.distributed.environment import LaunchEnvironment
    from distaccum.doctor.meeting import Meeting

_EPILOG = """\
examples:
  distaccum-doctor                                                     this machine
  distaccum-doctor --folder /scratch/$USER/runs                        and the disk that runs will go to
  torchrun --standalone --nproc-per-node=8 -m distaccum.doctor         and what its ranks do together
  srun torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d \\
       --rdzv-endpoint=$FIRST_NODE:29400 -m distaccum.doctor           the nodes of a job
  distaccum-doctor --json --only host,disk                             for a program

exit codes: 0 nothing is wrong; 1 something is; 2 for bad arguments
"""
_TITLES = {
    "software": "Software",
    "kernels": "DeepSpeed",
    "gpus": "GPUs",
    "host": "Machine",
    "network": "Network",
    "disk": "Disk",
    "job": "Job",
    "ranks": "Between the ranks",
}
# Seconds. The driver's program takes ten on eight GPUs without its daemon, DeepSpeed's import as long on a busy disk.
_LIMITS = {"software": 60, "kernels": 120, "gpus": 60, "host": 20, "network": 20, "disk": 60, "job": 20}
_MENDS = {
    "gpus": "nvidia-smi    # does it answer? dmesg | grep -i nvrm; if not, restart the node",
    "disk": "dmesg | tail; mount    # is the file system's server there? or --folder on another one",
    "kernels": "rm -rf ~/.cache/torch_extensions    # a lock of a build that died",
}
_LOCAL_S = float(sum(_LIMITS.values()))  # until a rank has looked at everything that is its own
_REDUCE_S, _FILE_S, _SEEN_S = 90.0, 10.0, 1.0
_PROGRAM = "distaccum-doctor"


def main() -> None:
    """Runs the command, with the arguments of this process; ends with its exit code."""
    try:
        code = _main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 1
    sys.exit(code)


def _main(arguments: Sequence[str]) -> int:
    quiet = os.environ.get("RANK", "0") != "0"
    with redirect_stdout(StringIO() if quiet else sys.stdout), redirect_stderr(StringIO() if quiet else sys.stderr):
        options = _parsed(arguments)
    chosen = options.only or list(_TITLES)
    _import_late()
    ranks, trouble = _launched()
    if ranks is None or ranks.size == 1:
        looks = _here(chosen, options.folder, None)
        return _report(options, {"": looks}, _alone(trouble), 1)
    from distaccum.doctor.meeting import AbsentError, Meeting, agree_on_a_name, gather  # noqa: PLC0415

    try:
        meeting = Meeting.open(ranks)
    except AbsentError as error:
        if ranks.rank:
            print(f"{_PROGRAM}: rank {ranks.rank}: {error}", file=sys.stderr)  # noqa: T201
            return 1
        mend = "look at what the missing ranks print; from their nodes: nc -zv $MASTER_ADDR $MASTER_PORT"
        trouble = Look()
        trouble.find(f"the ranks have not met: {error}", mend)
        return _report(options, {"": _here(chosen, options.folder, ranks)}, trouble, ranks.size)
    mine = {"about": _about(ranks), "looks": {}}
    if ranks.local_rank == 0:
        found = _here(chosen, options.folder, ranks)
        mine["looks"] = {name: one.to_json() for name, one in found.items()}
    everyone = gather(meeting, "found", mine, _LOCAL_S)
    name = agree_on_a_name(meeting, _LOCAL_S)
    if not name:
        print(f"{_PROGRAM}: rank {ranks.rank}: rank 0 is gone", file=sys.stderr)  # noqa: T201
        return 1
    if ranks.rank:
        if "ranks" in chosen:
            _take_part(meeting, name, options.folder)
        return 0
    return _together(meeting, name, options, chosen, everyone)


def _import_late() -> None:
    """What probes use, once, before they are forked; whatever cannot be imported is told of by the probe itself."""
    for module in ("software", "gpus", "host", "network", "disk", "job", "agreement", "meeting", "collective"):
        with suppress(Exception):
            import_module(f"distaccum.doctor.{module}")


def _launched() -> tuple[LaunchEnvironment | None, Look]:
    """What the launcher says; what is wrong with it is a finding, and this process then looks alone."""
    trouble = Look()
    try:
        from distaccum.distributed.environment import LaunchEnvironment  # noqa: PLC0415
    except ImportError:
        return None, trouble  # the probe of the software says why
    try:
        return LaunchEnvironment.from_environment(), trouble
    except ValueError as error:  # ConfigError
        trouble.find(str(error), "unset RANK WORLD_SIZE    # or start with torchrun")
        return None, trouble


def _alone(trouble: Look) -> Look | None:
    return trouble if trouble.findings else None


def _call(module: str, function: str, *arguments: Any, **named: Any) -> Look:
    """Imports late, so that a module that cannot be imported is one row."""
    called: Callable[..., Look] = getattr(import_module(f"distaccum.doctor.{module}"), function)
    return called(*arguments, **named)


def _probe(name: str, act: Callable[[], Look]) -> Probe:
    return Probe(name=_TITLES[name], act=act, limit_s=_LIMITS[name], mend=_MENDS.get(name, ""))


def _here(chosen: Sequence[str], folder: Path, ranks: LaunchEnvironment | None) -> dict[str, Look]:
    """Looks at this machine, on one of its ranks; the disk last, when nothing else is at work."""
    local, nodes = (1, 1) if ranks is None else (ranks.local_size, -(-ranks.size // ranks.local_size))
    slow = {"software": ("software", "installed"), "kernels": ("software", "kernels")}
    running = {name: start(_probe(name, partial(_call, *what))) for name, what in slow.items() if name in chosen}
    found: dict[str, Look] = {}
    try:
        found["gpus"] = look(_probe("gpus", partial(_call, "gpus", "gpus")))
        gpus = bool(found["gpus"].value("GPUs"))
        host = partial(_call, "host", "host", local_ranks=local, cpu_trains=not gpus)
        network = partial(_call, "network", "network", several_nodes=nodes > 1, gpus=gpus)
        quick = {"host": host, "network": network, "job": partial(_call, "job", "job")}
        wanted = {name: act for name, act in quick.items() if name in chosen or (name, "ranks" in chosen) == ("network", True)}
        running |= {name: start(_probe(name, act)) for name, act in wanted.items()}
        found |= {name: one.result() for name, one in running.items()}
    except BaseException:
        for one in running.values():
            one.end()
        raise
    if "disk" in chosen:
        work = f".distaccum-doctor-{token_hex(6)}"
        try:
            found["disk"] = look(_probe("disk", partial(_call, "disk", "disk", folder, work)))
        finally:
            look(Probe(name="", act=partial(_call, "disk", "clean", folder, work), limit_s=_FILE_S))
    return found


def _about(ranks: LaunchEnvironment) -> dict[str, Any]:
    from distaccum.doctor.agreement import About  # noqa: PLC0415

    return About.here(ranks.rank, ranks.local_rank).to_json()


def _mark(name: str) -> str:
    return f".distaccum-doctor-{name}"


def _reduced(ranks: LaunchEnvironment, name: str) -> Look:
    return look(Probe(name="all-reduce", act=partial(_call, "collective", "all_reduce", ranks, name), limit_s=_REDUCE_S))


def _take_part(meeting: Meeting, name: str, folder: Path) -> None:
    """On the ranks but 0: their part of what is looked at together."""
    from distaccum.doctor.meeting import MEET_S, answer_pings, gather  # noqa: PLC0415

    answer_pings(meeting)
    if meeting.take("marked", MEET_S) is not None:
        seen = partial(_call, "disk", "sees_mark", folder, _mark(name), _SEEN_S)
        gather(meeting, "seen", look(Probe(name="seen", act=seen, limit_s=_FILE_S)).to_json(), 0)
    if meeting.take("reduce", MEET_S) is not None:
        gather(meeting, "reduced", _reduced(meeting.ranks, name).to_json(), 0)


def _together(
    meeting: Meeting, name: str, options: argparse.Namespace, chosen: Sequence[str], everyone: dict[int, Any]
) -> int:
    """On rank 0: what the ranks are and do together; then everything is shown."""
    from distaccum.doctor.agreement import About, agreement, nodes  # noqa: PLC0415
    from distaccum.doctor.collective import judge_rate  # noqa: PLC0415
    from distaccum.doctor.meeting import clocks, gather  # noqa: PLC0415

    about = [About.from_json(one["about"]) for one in everyone.values() if one is not None]
    places = nodes(about)
    looks = {
        place: {kind: Look.from_json(one) for kind, one in everyone[members[0]]["looks"].items()}
        for place, members in places.items()
    }
    between = Look()
    for rank in (rank for rank, one in everyone.items() if one is None):
        between.find(f"rank {rank} came, and has told nothing within {_LOCAL_S:.0f} s", "look at what it prints")
    if "ranks" not in chosen:
        return _report(options, looks, _alone(between), meeting.ranks.size, places)
    _join(between, agreement(about))
    asked = {members[0]: place for place, members in places.items() if members[0]} or {1: next(iter(places))}
    _join(between, clocks(meeting, asked))
    _join(between, _shared(meeting, name, options.folder))
    meeting.give("reduce", 1)
    reduced = _reduced(meeting.ranks, name)
    others = gather(meeting, "reduced", reduced.to_json(), _REDUCE_S)
    links = {}
    for place, of in looks.items():
        kind = "NCCL takes" if reduced.value("backend") == "nccl" else "gloo takes"
        links[place] = of["network"].value(kind) if "network" in of else None
    judge_rate(reduced, links, nodes=len(places))
    if reduced.value("backend") is None:
        _not_connected(reduced, {rank: Look.from_json(one) for rank, one in others.items() if one is not None})
    _join(between, reduced)
    return _report(options, looks, between, meeting.ranks.size, places)


def _not_connected(reduced: Look, others: dict[int, Look]) -> None:
    """Which rank says what, where there was no all-reduce."""
    said: dict[str, list[int]] = {}
    for rank, one in others.items():
        for fact in one.facts[:1]:
            said.setdefault(fact.text, []).append(rank)
    reduced.facts.clear()
    for text, where in said.items():
        reduced.tell(f"all-reduce, rank {where[0]}{' ...' * (len(where) > 1)}", text)
    mend = "export GLOO_SOCKET_IFNAME=INTERFACE NCCL_SOCKET_IFNAME=INTERFACE    # one that all nodes reach; see Network"
    reduced.find("the ranks do not connect: there was no all-reduce", mend)


def _shared(meeting: Meeting, name: str, folder: Path) -> Look:
    """On rank 0: whether the others see a file that this rank makes."""
    from distaccum.doctor.meeting import gather  # noqa: PLC0415

    found, mark = Look(), _mark(name)
    made = look(Probe(name="shared folder", act=partial(_call, "disk", "shared_mark", folder, mark), limit_s=_FILE_S))
    if made.facts:  # no file: why
        meeting.give("marked", None)
        return made
    try:
        meeting.give("marked", 1)
        answers = gather(meeting, "seen", Look().to_json(), _FILE_S + _SEEN_S)
    finally:
        look(Probe(name="", act=partial(_call, "disk", "remove_mark", folder, mark), limit_s=_FILE_S))
    seen = {rank: Look.from_json(one).value("seen") for rank, one in answers.items() if rank and one is not None}
    times = [took for took in seen.values() if isinstance(took, float) and took >= 0]
    blind = [rank for rank in range(1, meeting.ranks.size) if rank not in seen or not isinstance(seen[rank], float) or seen[rank] < 0]
    from distaccum.doctor.agreement import listed  # noqa: PLC0415

    if not blind:
        found.tell("shared folder", f"every rank sees rank 0's file, the last after {max(times):.2f} s", max(times))
        return found
    found.tell("shared folder", f"{listed(blind)} did not see rank 0's file in {folder} within {_SEEN_S:.0f} s", blind)
    what = f"{listed(blind)} cannot see what rank 0 writes in {folder}, and every rank writes a part of a checkpoint"
    found.find(what, "distaccum-doctor --folder /scratch/$USER/runs    # a file system that all nodes share, for hydra.run.dir")
    return found


def _join(one: Look, other: Look) -> None:
    one.facts += other.facts
    one.findings += other.findings


def _report(
    options: argparse.Namespace,
    looks: dict[str, dict[str, Look]],
    between: Look | None,
    size: int,
    places: dict[str, list[int]] | None = None,
) -> int:
    """Shows what was found; 1 where something is wrong."""
    chosen = options.only or list(_TITLES)
    sections = [
        Section(title=title, looks={place: of[name] for place, of in looks.items() if name in of})
        for name, title in _TITLES.items()
        if name in chosen and name != "ranks"
    ]
    if between is not None:
        sections.append(Section(title=_TITLES["ranks"], looks={next(iter(looks)): between}))
    import socket  # noqa: PLC0415

    places = places or {socket.gethostname(): list(range(size))}
    examination = Examination(ranks=size, nodes=places, sections=sections)
    if options.json:
        json.dump(examination.to_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        show(examination)
    return int(not examination.right)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="What this machine, or the machines of this job, have for training; what is wrong, and what mends it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where runs will go (default: runs)")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")
    parser.add_argument(
        "--only",
        type=_sections,
        metavar="PART[,PART]",
        help=f"look at these alone: {', '.join(_TITLES)}",
    )
    return parser.parse_args(arguments)


def _sections(text: str) -> list[str]:
    from distaccum.errors import near_misses  # noqa: PLC0415

    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in _TITLES:
            raise argparse.ArgumentTypeError(f"{name}: no such part{near_misses(name, _TITLES)}; there are {', '.join(_TITLES)}")
    return names
