"""What probes ask: tools of the vendors, PCI functions in sysfs, and whole numbers in what these say."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from wsync.discovery.pci import address
from wsync.discovery.reading import text_of
from wsync.errors import ProbeError

SYSFS = Path("/sys")
TIMEOUT_S = 10.0
LARGEST = 2**63 - 1


class PciFunction(NamedTuple):
    """One function on the PCI bus. `numa_node` is -1 where the kernel does not know it."""

    address: str
    pci_id: str
    numa_node: int


def output_of(*argv: str) -> str:
    """What the tool prints; a `ProbeError` where it cannot be started, does not end in time or fails."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ProbeError(f"'{' '.join(argv)}' gives no answer: {exc}", hint="run it by hand on this host") from exc
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise ProbeError(
            f"'{' '.join(argv)}' failed with status {done.returncode}: {said:.200}", hint="run it by hand on this host"
        )
    return done.stdout


def number(text: str, what: str, *, largest: int = LARGEST) -> int:
    """A whole number of that size; anything else is a `ProbeError` naming `what`."""
    if not re.fullmatch("[0-9]{1,20}", text) or int(text) > largest:
        raise ProbeError(f"{what} is {text!r:.60}, which is no whole number up to {largest}")
    return int(text)


def numa_node_of(text: str, what: str) -> int:
    """The number of a NUMA node, or -1, which sysfs and tools say for none that they know."""
    return -1 if text in ("", "-1") else number(text, what, largest=9999)


def pci_functions(vendor: str, *, sysfs: Path = SYSFS) -> tuple[PciFunction, ...]:
    """The functions of that vendor (`1da3`), in the order of their addresses; none where there is no PCI bus."""
    folder = sysfs / "bus/pci/devices"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    found = (pci_function(name, sysfs=sysfs) for name in sorted(names, key=lambda name: (len(name), name)))
    return tuple(function for function in found if function and function.pci_id.startswith(f"{vendor}:"))


def pci_function(name: str, *, sysfs: Path = SYSFS) -> PciFunction | None:
    """The function at that address, None if it is not there."""
    entry = sysfs / "bus/pci/devices" / name
    if not name or not entry.is_dir():
        return None
    numa_node = numa_node_of(text_of(entry / "numa_node"), f"{entry}/numa_node")
    return PciFunction(address(name), f"{_hex(entry / 'vendor')}:{_hex(entry / 'device')}", numa_node)


def _hex(path: Path) -> str:
    text = text_of(path)
    if not re.fullmatch("0x[0-9a-f]{4,6}", text):
        raise ProbeError(f"{path} says {text!r:.60}, which is no PCI id", hint="is this sysfs?")
    return text[2:]
