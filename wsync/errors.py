"""The errors of wsync, one tree. Every one says what happened, where, and what to do.

WsyncError
├── ConfigError            an argument or environment variable cannot be used
├── ManifestMismatch       trainer and replica do not agree on names, shapes, dtypes or ties
├── PlanError              a plan does not prove itself (a fault of ours or of a lying peer)
├── MembershipError        who takes part is not as asked for
│   ├── PeerLost           a process that was needed has gone
│   ├── ChannelError       no such channel, or its publisher is another one
│   └── StaleView          a message of a former membership or incarnation
├── TransportError         moving bytes failed
│   ├── ConnectError       nobody answers there
│   ├── TransferTimeout    a deadline passed; names whom it waited for
│   ├── RemoteFault        the peer answered that it cannot serve this
│   ├── ChecksumError      bytes differ from what their source had
│   └── AuthError          wrong or missing token
├── ProbeError             what a driver, tool or platform says of the hardware cannot be read
├── ArenaError             memory or disk for a version cannot be had
├── PublishError           a version cannot be published
└── CommitError            a version cannot be installed
"""

from __future__ import annotations

import msgspec


class ErrorContext(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where an error happened; every field is optional and part of the printed text."""

    channel: str = ""
    version: int = 0
    phase: str = ""
    peers: tuple[str, ...] = ()
    route: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    nbytes_done: int = -1
    nbytes_total: int = -1

    def describe(self) -> str:
        """The non-empty fields as ``key=value`` pairs, in a fixed order."""
        pairs: list[str] = []
        if self.channel:
            pairs.append(f"channel={self.channel}")
        if self.version:
            pairs.append(f"version={self.version}")
        if self.phase:
            pairs.append(f"phase={self.phase}")
        if self.peers:
            pairs.append(f"peers={','.join(self.peers)}")
        if self.route:
            pairs.append(f"route={'>'.join(self.route)}")
        if self.elapsed_s:
            pairs.append(f"elapsed={self.elapsed_s:.3f}s")
        if self.nbytes_total >= 0:
            pairs.append(f"bytes={max(self.nbytes_done, 0)}/{self.nbytes_total}")
        return " ".join(pairs)


class WsyncError(Exception):
    """Base of all errors of wsync.

    `problem` says what is wrong, `hint` what to do next, `context` where it happened.
    """

    def __init__(self, problem: str, *, hint: str = "", context: ErrorContext | None = None) -> None:
        self.problem = problem
        self.hint = hint
        self.context = context or ErrorContext()
        where = self.context.describe()
        text = problem + (f" [{where}]" if where else "") + (f"; {hint}" if hint else "")
        super().__init__(text)

    def __reduce__(self) -> tuple[object, tuple[type[WsyncError], str, str, ErrorContext]]:
        # Ray and multiprocessing carry exceptions of user code by pickle; keep all the fields.
        return _rebuild, (type(self), self.problem, self.hint, self.context)


def _rebuild(kind: type[WsyncError], problem: str, hint: str, context: ErrorContext) -> WsyncError:
    return kind(problem, hint=hint, context=context)


class ConfigError(WsyncError, ValueError):
    """An argument or an environment variable cannot be used."""


class ManifestMismatch(WsyncError, ValueError):
    """Trainer and replica do not agree on names, shapes, dtypes or ties."""


class PlanError(WsyncError):
    """A plan does not prove itself."""


class MembershipError(WsyncError):
    """Who takes part is not as asked for."""


class PeerLost(MembershipError):
    """A process that was needed has gone."""


class ChannelError(MembershipError):
    """There is no such channel, or another process publishes it."""


class StaleView(MembershipError):
    """A message of a former membership or incarnation."""


class TransportError(WsyncError):
    """Moving bytes failed."""


class ConnectError(TransportError):
    """Nobody answers at an address."""


class TransferTimeout(TransportError, TimeoutError):
    """A deadline passed; the text names whom it waited for."""


class RemoteFault(TransportError):
    """The peer answered that it cannot serve this."""


class ChecksumError(TransportError):
    """Bytes differ from what their source had."""


class AuthError(TransportError):
    """The token is wrong or missing."""


class ProbeError(WsyncError):
    """What a driver, tool or platform says of the hardware cannot be read."""


class ArenaError(WsyncError):
    """Memory or disk for a version cannot be had."""


class PublishError(WsyncError):
    """A version cannot be published."""


class CommitError(WsyncError):
    """A version cannot be installed."""


def _by_name(root: type[WsyncError]) -> dict[str, type[WsyncError]]:
    found = {root.__name__: root}
    for kind in root.__subclasses__():
        found.update(_by_name(kind))
    return found


_KINDS = _by_name(WsyncError)


class ErrorRecord(msgspec.Struct, frozen=True):
    """An error on the wire: its kind by name, never a pickled object."""

    kind: str
    problem: str
    hint: str = ""
    context: ErrorContext = ErrorContext()

    @classmethod
    def of(cls, error: BaseException) -> ErrorRecord:
        if isinstance(error, WsyncError):
            return cls(type(error).__name__, error.problem, error.hint, error.context)
        return cls("RemoteFault", f"{type(error).__name__}: {error}", "this is a fault in wsync, please report it")

    def build(self) -> WsyncError:
        """The same error on this side; an unknown kind becomes a plain `WsyncError`."""
        return _KINDS.get(self.kind, WsyncError)(self.problem, hint=self.hint, context=self.context)
