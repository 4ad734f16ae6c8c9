"""Errors keep kind and fields over the wire and over pickle; configurations that cannot work are refused."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from wsync.config import Config
from wsync.engine.coordinator import listening_socket
from wsync.errors import ConfigError, ErrorContext, ErrorRecord, RemoteFault, TransferTimeout, WsyncError

CONTEXT = ErrorContext(
    channel="policy",
    version=3,
    phase="transfer",
    peers=("a", "b"),
    route=("x", "y"),
    elapsed_s=1.5,
    nbytes_done=10,
    nbytes_total=20,
)


def every(kind: type[WsyncError]) -> Iterator[type[WsyncError]]:
    yield kind
    for sub in kind.__subclasses__():
        yield from every(sub)


KINDS = list(every(WsyncError))


@pytest.mark.parametrize("kind", KINDS)
def test_errors_keep_kind_and_fields(kind: type[WsyncError]) -> None:
    error = kind("it broke", hint="mend it", context=CONTEXT)
    encoded = msgspec.msgpack.encode(ErrorRecord.of(error))
    over_wire = msgspec.msgpack.decode(encoded, type=ErrorRecord).build()
    over_pickle = pickle.loads(pickle.dumps(error))
    for again in (over_wire, over_pickle):
        assert type(again) is kind
        assert (again.problem, again.hint, again.context) == ("it broke", "mend it", CONTEXT)
        assert str(again) == str(error)
    for part in ("it broke", "mend it", "policy", "version=3", "peers=a,b", "route=x>y", "1.500s", "bytes=10/20"):
        assert part in str(error)


def test_the_tree_has_every_name_once() -> None:
    names = [kind.__name__ for kind in KINDS]
    assert len(set(names)) == len(names) >= 17
    assert issubclass(TransferTimeout, TimeoutError)
    assert issubclass(ConfigError, ValueError)


def test_foreign_and_unknown_errors_are_still_named() -> None:
    record = ErrorRecord.of(KeyError("w"))
    assert isinstance(record.build(), RemoteFault)
    assert "KeyError: 'w'" in str(record.build())
    assert type(ErrorRecord("FromTheFuture", "new").build()) is WsyncError
    assert str(WsyncError("plain")) == "plain"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"job": ""}, "job must be"),
        ({"job": "a/b"}, "job must be"),
        ({"job": ".."}, "job must be"),
        ({"chunk_nbytes": 0}, "chunk_nbytes"),
        ({"chunk_nbytes": 4097}, "multiple of 4096"),
        ({"chunk_nbytes": -4096}, "chunk_nbytes"),
        ({"num_slots": 1}, "at least 2"),
        ({"tcp_connections": 0}, "tcp_connections"),
        ({"transports": ()}, "transports is empty"),
        ({"heartbeat_s": 0.0}, "heartbeat_s must be positive"),
        ({"join_timeout_s": -1.0}, "join_timeout_s must be positive"),
        ({"transfer_timeout_s": 0.0}, "transfer_timeout_s must be positive"),
        ({"linger_s": -0.1}, "linger_s must not be negative"),
        ({"lost_after_s": 0.6, "heartbeat_s": 0.5}, "at least two heartbeats"),
    ],
)
def test_configurations_that_cannot_work_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Config(**fields)
    encoded = msgspec.json.encode(fields)
    with pytest.raises(msgspec.ValidationError, match=text):
        msgspec.json.decode(encoded, type=Config)


def test_the_environment_fills_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WSYNC_JOB", "mine")
    monkeypatch.setenv("WSYNC_HOST", "h7")
    monkeypatch.setenv("WSYNC_LISTEN", "")
    monkeypatch.delenv("WSYNC_ARENA", raising=False)
    config = Config(num_slots=3)
    assert (config.job, config.host, config.listen, config.arena) == ("mine", "h7", "127.0.0.1", "memory")
    assert (config.num_slots, Config(job="given").job, Config(job="given").host) == (3, "given", "h7")


def test_an_address_that_cannot_be_had_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 203\.0\.113\.1:0"):
        listening_socket("203.0.113.1")
    with listening_socket("127.0.0.1") as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            listening_socket("127.0.0.1", port)
