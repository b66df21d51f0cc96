"""The GPUs: as the driver's ``nvidia-smi`` sees them, as torch does, and the links between them.

Both are asked, since the one says why the other sees nothing: a driver that is too old, a torch that was built for
CPUs, or CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import asdict, dataclass

from distaccum.config.checks import size_of
from distaccum.tools.doctor.facts import Look
from distaccum.tools.doctor.here import COUNT

_MIB = 2**20
_FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.free")
# Asked apart: a driver that does not know one of them answers none.
_HEALTH = (
    "uuid",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.active",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "temperature.gpu",
)
_APPS = ("gpu_uuid", "pid", "process_name", "used_memory")
# nvml.h, nvmlClocksThrottleReasons: those that are no part of normal work (idle, power cap, application clocks).
_THROTTLED = {0x08: "hardware slowdown", 0x20: "too hot", 0x40: "too hot for the hardware", 0x80: "power brake"}
# Of memory that others hold; a driver's own context takes some hundred MiB.
_OTHERS = 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What the driver says; memory in bytes."""

    index: int
    uuid: str
    name: str
    driver: str
    total: int
    free: int


def gpus() -> Look:
    """The GPUs of this machine, their health, who uses them, and the links between them."""
    found = Look()
    driver = _smi(f"--query-gpu={','.join(_FIELDS)}") if shutil.which("nvidia-smi") else None
    listed = parse(driver) if driver is not None else []
    visible = _torch(found, listed)
    if driver is None:
        found.tell("nvidia-smi", "not found, or has no driver to ask", "")
        return found
    ours = [gpu for gpu in listed if not visible or gpu.uuid in visible]
    if listed:
        found.tell("driver", listed[0].driver)
    for gpu in ours:
        text = f"{gpu.name}, {size_of(gpu.free)} free of {size_of(gpu.total)}"
        found.tell(f"GPU {gpu.index}", text, asdict(gpu))
    judge_use(found, ours, _smi(f"--query-compute-apps={','.join(_APPS)}") or "")
    judge_health(found, ours, _smi(f"--query-gpu={','.join(_HEALTH)}") or "")
    if len(ours) > 1:
        judge_links(found, _run("nvidia-smi", "topo", "-m"), _run("nvidia-smi", "nvlink", "-s"))
    return found


def _torch(found: Look, listed: list[Gpu]) -> set[str]:
    """What torch sees, and why not more; the GPUs' names for the driver, of those that it may use."""
    import torch  # noqa: PLC0415  it may be what is wrong

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found.tell(COUNT, f"{seen} by torch" + (f", {len(listed)} by the driver" if listed else ""), seen)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        found.tell("CUDA_VISIBLE_DEVICES", hidden or "'' (none)", hidden)
    if listed and not seen:
        _blind(found, len(listed), listed[0].driver, hidden)
    known = torch.cuda.get_arch_list() if seen else []
    names: set[str] = set()
    for index in range(seen):
        properties = torch.cuda.get_device_properties(index)
        names.add(f"GPU-{properties.uuid}")
        capability = (properties.major, properties.minor)
        if not runs_on(capability, known):
            what = f"{properties.name} is of compute capability {capability[0]}.{capability[1]}, for which this torch "
            found.find(f"{what}has no kernels (it has {', '.join(known)})", _install())
    if seen > 1:
        blocked = [
            (a, b) for a in range(seen) for b in range(seen) if a != b and not torch.cuda.can_device_access_peer(a, b)
        ]
        found.tell(
            "peer access",
            f"not between {len(blocked)} of {seen * (seen - 1)} pairs" if blocked else "all pairs",
            blocked,
        )
        if blocked:
            what = (
                f"GPUs {blocked[0][0]} and {blocked[0][1]} have no peer access: what they exchange goes over the host"
            )
            found.find(what, "nvidia-smi topo -p2p r    # says why: the board, or IOMMU/ACS in the BIOS", wrong=False)
    return names


def _blind(found: Look, there: int, driver: str, hidden: str | None) -> None:
    import torch  # noqa: PLC0415  it may be what is wrong

    if torch.version.cuda is None:
        found.find(f"torch {torch.__version__} was built without CUDA, and here are {there} GPUs", _install())
    elif hidden is not None:
        found.find(f"CUDA_VISIBLE_DEVICES={hidden} hides all of {there} GPUs", "unset CUDA_VISIBLE_DEVICES")
    else:
        why = ""
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            why = f": {str(error).splitlines()[0]}"
        what = f"torch (for CUDA {torch.version.cuda}) cannot use the {there} GPUs with driver {driver}{why}"
        found.find(
            what, "install a newer driver, or a torch for an older CUDA: https://pytorch.org/get-started/locally"
        )


def _install() -> str:
    return f"{sys.executable} -m pip install --force-reinstall torch    # a build for this GPU: pytorch.org/get-started"


def runs_on(capability: tuple[int, int], built: Collection[str]) -> bool:
    """Whether a GPU runs what torch was built with: binaries of its major version, or code that its driver compiles.

    CUDA's rules: ``sm_XY`` runs on X.Y and later minor versions, ``compute_XY`` on everything later.
    """
    for name in built:
        kind, _, digits = name.rstrip("af").rpartition("_")
        of = (int(digits[:-1]), int(digits[-1]))
        if of <= capability and (kind == "compute" or of[0] == capability[0]):
            return True
    return False


def parse(answer: str) -> list[Gpu]:
    """The driver's table of GPUs, one a line, without a header or units."""
    found = []
    for index, uuid, name, driver, total, free in _rows(answer, len(_FIELDS)):
        memory = [_MIB * int(one) if one.isdecimal() else 0 for one in (total, free)]
        found.append(Gpu(index=int(index), uuid=uuid, name=name, driver=driver, total=memory[0], free=memory[1]))
    return found


def judge_use(found: Look, ours: list[Gpu], answer: str) -> None:
    """Who uses these GPUs; one whose memory others have is told of."""
    users: dict[str, list[str]] = {}
    for uuid, pid, name, used in _rows(answer, len(_APPS)):
        users.setdefault(uuid, []).append(f"{name.rpartition('/')[2]} ({pid}, {used} MiB)")
    for gpu in ours:
        who = ", ".join(users.get(gpu.uuid, []))
        if who:
            found.tell(f"GPU {gpu.index} is used by", who, users[gpu.uuid])
        if gpu.total - gpu.free > _OTHERS:
            taken = size_of(gpu.total - gpu.free)
            what = f"GPU {gpu.index}: {taken} of its memory are taken by {who or 'unseen processes'}"
            others = [str(one.index) for one in ours if one.total - one.free <= _OTHERS]
            elsewhere = f"export CUDA_VISIBLE_DEVICES={','.join(others)}" if others else "nvidia-smi    # who has it"
            found.find(what, elsewhere)


def judge_health(found: Look, ours: list[Gpu], answer: str) -> None:
    """Memory errors, a clock that is held down, a PCIe link with fewer lanes than it has."""
    by_uuid = {gpu.uuid: gpu for gpu in ours}
    for uuid, errors, throttled, width, most, degrees in _rows(answer, len(_HEALTH)):
        gpu = by_uuid.get(uuid)
        if gpu is None:
            continue
        reasons = _reasons(throttled)
        value = {"ecc errors": errors, "throttled": reasons, "pcie width": width, "of": most, "degrees": degrees}
        clock = f"its clock is held down ({', '.join(reasons)})" if reasons else "its clock is free"
        ecc = f"{errors} uncorrected memory errors" if errors.isdecimal() else "no ECC"
        found.tell(f"GPU {gpu.index} health", f"{ecc}, {clock}, PCIe x{width} of x{most}, {degrees} °C", value)
        if errors.isdecimal() and int(errors):
            what = f"GPU {gpu.index} has had {errors} uncorrected memory errors since its driver was loaded"
            found.find(what, f"sudo nvidia-smi --gpu-reset -i {gpu.index}    # idle; if they come again, replace it")
        if reasons:
            what = f"GPU {gpu.index}: its clock is held down ({', '.join(reasons)}, {degrees} °C)"
            found.find(
                what, f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {gpu.index}    # then its cooling or power"
            )
        if width.isdecimal() and most.isdecimal() and int(width) < int(most):
            what = f"GPU {gpu.index} has {width} of {most} PCIe lanes: data on its way to it is that much slower"
            found.find(what, f"nvidia-smi -q -i {gpu.index} | grep -A 12 'PCI$'    # then reseat it", wrong=False)


def _reasons(mask: str) -> list[str]:
    try:
        bits = int(mask, 16)
    except ValueError:  # [N/A]
        return []
    return [why for bit, why in _THROTTLED.items() if bits & bit]


def judge_links(found: Look, matrix: str, nvlink: str) -> None:
    """What joins the GPUs: the worst link of the driver's matrix, and NVLink's links that are not up."""
    kinds = link_kinds(matrix)
    if kinds:
        found.tell("links between GPUs", ", ".join(sorted(kinds)), sorted(kinds))
    rates = [float(one) for one in re.findall(r"([\d.]+) GB/s", nvlink)]
    if rates:
        found.tell("NVLink", f"{len(rates)} links, {max(rates):g} GB/s each", {"links": len(rates), "GB/s": max(rates)})
    down = len(re.findall(r"<?inactive>?", nvlink, re.IGNORECASE))
    if down and rates:
        what = f"{down} of {down + len(rates)} NVLink links are not up"
        found.find(what, "nvidia-smi nvlink -e    # then nvidia-fabricmanager: systemctl status nvidia-fabricmanager")


def link_kinds(matrix: str) -> set[str]:
    """The kinds of links between GPUs in ``nvidia-smi topo -m``: ``NV18``, ``PIX``, ``SYS``, ..."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", matrix)  # its header is underlined
    header = next((line.split() for line in plain.splitlines() if "GPU0" in line.split()[:1]), [])
    count = sum(1 for word in header if re.fullmatch(r"GPU\d+", word))
    rows = [line.split()[1 : 1 + count] for line in plain.splitlines() if re.match(r"GPU\d+\s+\S", line)]
    return {word for row in rows for word in row if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", word)}


def _rows(answer: str, columns: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in row] for row in csv.reader(answer.splitlines())]
    return [row for row in rows if len(row) == columns]


def _smi(question: str) -> str | None:
    done = _process("nvidia-smi", question, "--format=csv,noheader,nounits")
    return done.stdout if done.returncode == 0 else None


def _run(*command: str) -> str:
    return _process(*command).stdout


def _process(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  our own words
