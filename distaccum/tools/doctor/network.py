"""The interfaces of this machine, and which of them ranks would talk over."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from distaccum.tools.doctor.facts import Look, rate

_SIOCGIFADDR = 0x8915  # the IPv4 address of an interface; netdevice(7)
_REQUEST = struct.Struct("256s")
INTERFACES, GLOO, NCCL = "interfaces", "gloo takes", "NCCL takes"
_GLOO_VARIABLE, _NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface; ``bits`` a second is None where the driver does not say."""

    name: str
    addresses: tuple[str, ...]
    up: bool
    mtu: int | None
    bits: float | None
    virtual: bool
    """Without a device of its own: its rate is a constant of the driver, and no promise (veth: 10 Gbit/s)."""

    @property
    def loopback(self) -> bool:
        """Whether it leads nowhere."""
        return any(ipaddress.ip_address(address).is_loopback for address in self.addresses) or self.name == "lo"

    def __str__(self) -> str:
        parts = [", ".join(self.addresses) or "no address", "up" if self.up else "down", f"MTU {self.mtu}"]
        parts.append("its rate is not told" if self.bits is None else rate(self.bits))
        return ", ".join([*parts, *(["virtual"] if self.virtual and not self.loopback else [])])


def network(*, several_nodes: bool, gpus: bool) -> Look:
    """The interfaces, and the choices of gloo and NCCL.

    Args:
        several_nodes: whether ranks of other machines have to reach this one.
        gpus: whether NCCL is used.
    """
    found = Look()
    seen = interfaces()
    for one in seen:
        found.tell(one.name, str(one), asdict(one))
    chosen, why = gloo_choice(seen)
    _tell_choice(found, GLOO, chosen, why)
    by_name = _named(os.environ.get(_GLOO_VARIABLE, ""), seen)
    reachable = [one for one in seen if one.up and one.addresses and not one.loopback]
    mend = f"export {_GLOO_VARIABLE}={reachable[0].name if reachable else 'INTERFACE'}"
    if os.environ.get(_GLOO_VARIABLE) and by_name is None:
        found.find(f"{_GLOO_VARIABLE}={os.environ[_GLOO_VARIABLE]}: there is no such interface here", mend)
    elif several_nodes and (chosen is None or chosen.loopback):
        found.find(f"ranks of other machines cannot reach this one over gloo: {why}", mend)
    if gpus:
        chosen, why = nccl_choice(seen)
        _tell_choice(found, NCCL, chosen, why)
        if chosen is None:
            found.find(f"NCCL finds no interface: {why}", f"unset {_NCCL_VARIABLE}")
        elif several_nodes and chosen.loopback:
            mend = f"export {_NCCL_VARIABLE}={reachable[0].name if reachable else 'INTERFACE'}"
            found.find(f"ranks of other machines cannot reach this one over NCCL: {why}", mend)
    adapters = sorted(Path("/sys/class/infiniband").glob("*"))
    for adapter in adapters:
        for port in sorted(adapter.glob("ports/*")):
            _tell_port(found, adapter.name, port)
    return found


def _tell_choice(found: Look, name: str, chosen: Interface | None, why: str) -> None:
    found.tell(name, f"{chosen.name if chosen else 'none'} ({why})", asdict(chosen) if chosen else {})


def _tell_port(found: Look, adapter: str, port: Path) -> None:
    state, told = _text(port / "state"), _text(port / "rate")
    found.tell(
        f"{adapter} port {port.name}", f"{state.partition(': ')[2] or state}, {told}", {"state": state, "rate": told}
    )
    if "DOWN" in state.upper():
        what = f"port {port.name} of {adapter} is down: NCCL does without it"
        found.find(what, f"ibstat {adapter} {port.name}    # its cable, its subnet manager", wrong=False)


def interfaces() -> list[Interface]:
    """Those of this machine, or of its container."""
    sixes: dict[str, list[str]] = {}
    for line in _text(Path("/proc/net/if_inet6")).splitlines():
        digits, *_, name = line.split()
        six = ipaddress.IPv6Address(int(digits, 16))
        if not six.is_link_local:
            sixes.setdefault(name, []).append(str(six))
    found = []
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net") / name
        told = _number(folder / "speed")
        fours = [address] if (address := _ipv4(name)) else []
        found.append(
            Interface(
                name=name,
                addresses=(*fours, *sixes.get(name, [])),
                up=_text(folder / "operstate") in ("up", "unknown")
                and bool(int(_text(folder / "flags") or "0", 16) & 1),
                mtu=_number(folder / "mtu"),
                bits=1e6 * told if told is not None and told > 0 else None,  # -1: the driver does not know
                virtual=not (folder / "device").exists(),
            )
        )
    return found


def gloo_choice(seen: list[Interface]) -> tuple[Interface | None, str]:
    """The interface that torch binds gloo to, and why: the named one, or the first address of this machine's name.

    As ``ProcessGroupGloo::createDefaultDevice``: where no address of the name can be bound, the loopback's.
    """
    told = os.environ.get(_GLOO_VARIABLE, "")
    if told:
        return _named(told, seen), f"{_GLOO_VARIABLE}={told}"
    name = socket.gethostname()
    try:
        addresses = [str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        addresses = []
    for address in addresses:
        if _is_here(address):
            owner = next((one for one in seen if address in one.addresses), None)
            if owner is None and ipaddress.ip_address(address).is_loopback:  # all of 127.0.0.0/8 is
                owner = next((one for one in seen if one.loopback), None)
            return owner, f"{name} is {address}"
    loop = next((one for one in seen if one.loopback), None)
    return loop, f"{name} is {addresses[0]}, no address of this machine" if addresses else f"{name} has no address"


def nccl_choice(seen: list[Interface]) -> tuple[Interface | None, str]:
    """The interface that NCCL's bootstrap and its sockets take, and why.

    As NCCL documents ``NCCL_SOCKET_IFNAME``: a list of prefixes, ``=`` for whole names, ``^`` for all others; without
    it, first those named ``ib``, then all but ``lo`` and ``docker``, then ``docker``, then ``lo``.
    """
    up = [one for one in seen if one.up and one.addresses]
    told = os.environ.get(_NCCL_VARIABLE, "")
    if told:
        words = told.lstrip("^").lstrip("=").split(",")
        whole = told.lstrip("^").startswith("=")
        hits = [one for one in up if any(one.name == word if whole else one.name.startswith(word) for word in words)]
        fits = [one for one in up if one not in hits] if told.startswith("^") else hits
        return (fits[0] if fits else None), f"{_NCCL_VARIABLE}={told}"
    for wanted, why in (
        ([one for one in up if one.name.startswith("ib")], "the first one named ib"),
        ([one for one in up if not one.name.startswith("docker") and not one.loopback], "the first one that is up"),
        ([one for one in up if one.name.startswith("docker")], "there is only docker's"),
        ([one for one in up if one.loopback], "there is only the loopback"),
    ):
        if wanted:
            return wanted[0], why
    return None, "none is up and has an address"


def _named(told: str, seen: list[Interface]) -> Interface | None:
    first = told.partition(",")[0].strip()  # gloo may use several; the first serves for what is said here
    return next((one for one in seen if one.name == first), None)


def _ipv4(name: str) -> str | None:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, _REQUEST.pack(name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def _is_here(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.bind((address, 0))
        return True
    return False


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:
        return None
