"""A small sysfs below a folder, linked as the kernel links it: PCI functions, and the devices that hang on them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


class Sysfs:
    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return file

    def link(self, path: str, target: Path) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent))

    def function(self, *path: str, pci_id: str = "", numa_node: int | None = -1, driver: str = "") -> Path:
        """The PCI function at the end of the path (`pci0000:00`, bridges, itself)."""
        folder = self.root / "sys/devices" / "/".join(path)
        folder.mkdir(parents=True, exist_ok=True)
        where = folder.relative_to(self.root)
        if pci_id:
            vendor, device = pci_id.split(":")
            self.write(f"{where}/vendor", f"0x{vendor}")
            self.write(f"{where}/device", f"0x{device}")
        if numa_node is not None:
            self.write(f"{where}/numa_node", str(numa_node))
        if driver:
            home = self.root / "sys/bus/pci/drivers" / driver
            home.mkdir(parents=True, exist_ok=True)
            self.link(f"{where}/driver", home)
        self.link(f"sys/bus/pci/devices/{path[-1]}", folder)
        return folder

    def rdma(self, name: str, function: Path | None, *ports: Mapping[str, str]) -> None:
        """A verbs device with these ports, numbered from 1; files are named as below `ports/1`."""
        home = function or self.root / "sys/devices/virtual"
        folder = home / "infiniband" / name
        for number, files in enumerate(ports, start=1):
            for file, text in files.items():
                self.write(f"{folder.relative_to(self.root)}/ports/{number}/{file}", text)
        folder.mkdir(parents=True, exist_ok=True)
        if function:
            self.link(f"{folder.relative_to(self.root)}/device", function)
        self.link(f"sys/class/infiniband/{name}", folder)

    def interface(self, name: str, device: Path | None, **files: str) -> Path:
        """A network interface of the device, or a virtual one; a file that is named '' is a folder (unreadable)."""
        folder = (device or self.root / "sys/devices/virtual") / "net" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            self.write(f"{folder.relative_to(self.root)}/{file}", text)
        if device:
            self.link(f"{folder.relative_to(self.root)}/device", device)
        self.link(f"sys/class/net/{name}", folder)
        return folder


def port(layer: str = "InfiniBand", state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)") -> dict[str, str]:
    return {"state": state, "rate": rate, "link_layer": layer}
