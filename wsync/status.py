"""What the coordinator knows of a version: the record behind `Publication.status()`."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class VersionPhase(StrEnum):
    """Life of a version. The last three are final."""

    PENDING = "pending"  # packed or being packed; waits for the version before it
    TRANSFERRING = "transferring"
    STAGED = "staged"  # whole on every host that wants it
    SUPERSEDED = "superseded"  # a newer one took its place before it was sent
    ABORTED = "aborted"


class HolderPhase(StrEnum):
    PULLING = "pulling"
    WHOLE = "whole"
    FAILED = "failed"
    LOST = "lost"


class ReplicaPhase(StrEnum):
    JOINING = "joining"
    PULLING = "pulling"
    STAGED = "staged"
    COMMITTED = "committed"
    FAILED = "failed"


class HolderStatus(msgspec.Struct, frozen=True):
    """One receiving host. `transfer_s` runs from the order to pull until all digests matched."""

    host: str
    phase: HolderPhase
    nbytes_received: int = 0
    transfer_s: float = 0.0
    parents: tuple[str, ...] = ()
    error: str = ""


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One replica, as far as this version is concerned."""

    member_id: str
    host: str
    phase: ReplicaPhase
    commit_pause_s: float = 0.0
    error: str = ""


class VersionStatus(msgspec.Struct, frozen=True):
    """One version of a channel. `nbytes` are the bytes of one replica."""

    channel: str
    version: int
    step: int
    phase: VersionPhase
    nbytes: int
    error: str = ""
    holders: tuple[HolderStatus, ...] = ()
    replicas: tuple[ReplicaStatus, ...] = ()

    def count(self, *phases: ReplicaPhase) -> int:
        """How many replicas are in one of `phases`."""
        return sum(replica.phase in phases for replica in self.replicas)

    def describe_replicas(self) -> str:
        """``name (phase)`` of every replica, for messages that must name who is missing."""
        return ", ".join(f"{r.member_id} ({r.phase})" for r in self.replicas) or "none"
