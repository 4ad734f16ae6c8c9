"""Settings of a job: one frozen record, defaults that work on one machine, units in the names.

What is not given comes from the environment (the few variables that a launcher needs), else from the defaults here.
"""

from __future__ import annotations

import os

import msgspec

from wsync.errors import ConfigError

MIB = 1 << 20
DEFAULT_CHUNK_NBYTES = 8 * MIB


def _from_env(name: str, default: str) -> str:
    field: str = msgspec.field(default_factory=lambda: os.environ.get(name) or default)
    return field


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """How a process takes part in a job. The first process on a host passes it on to the holder it starts."""

    job: str = _from_env("WSYNC_JOB", "default")
    """Keeps jobs of one machine, or of one Ray cluster, apart. Where `WSYNC_ADDRESS` names a coordinator, that is the
    job, whatever the name. A name, not a secret.
    """
    host: str = _from_env("WSYNC_HOST", "auto")
    """Identity of this host. `auto`: the Ray node id inside Ray, else the machine's boot id and network namespace."""
    listen: str = _from_env("WSYNC_LISTEN", "127.0.0.1")
    """Address for control and data sockets; `node`: the address by which Ray knows this node (inside Ray only)."""
    chunk_nbytes: int = 0
    """Unit of transfer, retry, relay and digest; the trainer's counts. 0: chosen for the routes, at most 8 MiB."""
    num_slots: int = 2
    """Staging slots per channel and host; each holds one version. Two keep one whole version beside the next."""
    arena: str = _from_env("WSYNC_ARENA", "memory")
    """`memory` (memfd), or a directory for file-backed slots."""
    topology: str = _from_env("WSYNC_TOPOLOGY", "auto")
    """What is known of this host and its network: `auto` looks, `none` does not, else a file as `wsync topo --json`
    writes it, which may describe other hosts too.
    """
    transports: tuple[str, ...] = ("shm", "tcp")
    """Allowed transports, best first. A pair of holders uses the first that reaches."""
    tcp_connections: int = 2
    """Connections per pair of holders."""
    heartbeat_s: float = 0.5
    lost_after_s: float = 2.0
    """A holder that is silent for so long has gone, whatever its sockets say."""
    join_timeout_s: float = 30.0
    """Finding or starting a holder and the coordinator, and reconnecting to them."""
    transfer_timeout_s: float = 600.0
    """A holder that has not staged a version by then is left behind with it."""
    linger_s: float = 10.0
    """A holder or coordinator without members leaves after so long."""

    def __post_init__(self) -> None:
        if self.job in ("", ".", "..") or "/" in self.job:
            raise ConfigError(f"job must be a non-empty name without '/', not {self.job!r}")
        if self.chunk_nbytes < 0 or self.chunk_nbytes % 4096:
            raise ConfigError(f"chunk_nbytes must be 0 or a multiple of 4096, not {self.chunk_nbytes}")
        if self.num_slots < 2:
            raise ConfigError(f"num_slots must be at least 2 (one whole version and the next), not {self.num_slots}")
        if self.tcp_connections < 1:
            raise ConfigError(f"tcp_connections must be at least 1, not {self.tcp_connections}")
        if not self.transports:
            raise ConfigError("transports is empty: name at least one of shm, tcp")
        for name in ("heartbeat_s", "lost_after_s", "join_timeout_s", "transfer_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
        if self.linger_s < 0:
            raise ConfigError(f"linger_s must not be negative, not {self.linger_s}")
        if self.lost_after_s < 2 * self.heartbeat_s:
            raise ConfigError("lost_after_s must be at least two heartbeats")
