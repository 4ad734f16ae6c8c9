"""What the coordinator knows of a version: the record behind `Publication.status()`."""

from __future__ import annotations

from collections.abc import Sequence
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


_VERSION_PHASES = (
    VersionPhase.ABORTED,
    VersionPhase.SUPERSEDED,
    VersionPhase.PENDING,
    VersionPhase.TRANSFERRING,
    VersionPhase.STAGED,
)
_HOLDER_PHASES = (HolderPhase.LOST, HolderPhase.FAILED, HolderPhase.PULLING, HolderPhase.WHOLE)
_REPLICA_PHASES = (
    ReplicaPhase.FAILED,
    ReplicaPhase.JOINING,
    ReplicaPhase.PULLING,
    ReplicaPhase.STAGED,
    ReplicaPhase.COMMITTED,
)
"""What counts of several: the first of these."""


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


def merged_status(lanes: Sequence[VersionStatus], workers: Sequence[ReplicaStatus]) -> VersionStatus:
    """The lanes of one version as one: everything is as far as the lane in which it is least far; bytes add up.

    `workers` are those that the coordinator knows; one that has failed has, of others the lanes know better.
    """
    replicas: dict[str, list[ReplicaStatus]] = {}
    holders: dict[str, list[HolderStatus]] = {}
    for lane in lanes:
        for replica in lane.replicas:
            replicas.setdefault(replica.member_id, []).append(replica)
        for holder in lane.holders:
            holders.setdefault(holder.host, []).append(holder)
    for worker in workers:
        if worker.phase is ReplicaPhase.FAILED or worker.member_id not in replicas:
            replicas.setdefault(worker.member_id, []).append(worker)
    return VersionStatus(
        channel="",
        version=0,
        step=0,
        phase=min((lane.phase for lane in lanes), key=_VERSION_PHASES.index, default=VersionPhase.PENDING),
        nbytes=sum(lane.nbytes for lane in lanes),
        error=next((lane.error for lane in lanes if lane.error), ""),
        holders=tuple(_merged_holder(parts) for parts in holders.values()),
        replicas=tuple(_merged_replica(parts) for parts in replicas.values()),
    )


def _merged_replica(parts: Sequence[ReplicaStatus]) -> ReplicaStatus:
    return msgspec.structs.replace(
        min(parts, key=lambda part: _REPLICA_PHASES.index(part.phase)),
        commit_pause_s=max(part.commit_pause_s for part in parts),
    )


def _merged_holder(parts: Sequence[HolderStatus]) -> HolderStatus:
    return msgspec.structs.replace(
        min(parts, key=lambda part: _HOLDER_PHASES.index(part.phase)),
        nbytes_received=sum(part.nbytes_received for part in parts),
        transfer_s=max(part.transfer_s for part in parts),
        parents=tuple(sorted({parent for part in parts for parent in part.parents})),
    )
