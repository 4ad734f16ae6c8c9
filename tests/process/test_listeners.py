"""Where wsync can be reached: on loopback only, unless told otherwise; and never through a name in the file system."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import msgspec
from _members import SMALL, Job, reference


def listening(pids: set[int]) -> set[str]:
    """Addresses at which these processes listen for tcp, from the kernel's tables."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = link.readlink().name
            except OSError:
                continue
            if target.startswith("socket:"):
                inodes.add(target[8:-1])
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            found.add(socket.inet_ntoa(struct.pack("<I", int(fields[1].split(":")[0], 16))))
    for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            found.add(f"ipv6 {fields[1]}")
    return found


def test_no_listener_outside_of_loopback(job: Job) -> None:
    trainer = job.trainer(seed=1)
    near, far = job.replica(), job.replica(host="B")
    version = trainer.publish(1, 1)
    for replica in (near, far):
        before = replica.digest()
        assert replica.wait_version(version) == version
        assert replica.digest() == reference(SMALL, 1) != before
    members = {member.pid for member in job.members}
    assert listening(members) == set(), "a member listens nowhere"
    assert listening(job.holder_pids()) == {"127.0.0.1"}
    sockets = [path for path in job.folder.rglob("*") if path.is_socket()]
    assert sockets == [], "the holder's socket is abstract"


def test_the_declared_address_is_the_only_one(job: Job) -> None:
    job.config = msgspec.structs.replace(job.config, listen="127.0.0.2")
    trainer = job.trainer(seed=1)
    far = job.replica(host="B")
    version = trainer.publish(1, 1)
    assert far.wait_version(version) == version
    assert far.digest() == reference(SMALL, 1)
    assert listening(job.holder_pids()) == {"127.0.0.2"}
