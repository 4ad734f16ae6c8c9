"""Errors keep kind and fields over the wire and over pickle; configurations that cannot work are refused."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from wsync.config import Config
from wsync.engine.coordinator import listening_socket
from wsync.engine.protocol import Done, HolderHello, Message
from wsync.engine.session import find_holder
from wsync.engine.upstream import Upstream
from wsync.engine.wire import Wire
from wsync.errors import ConfigError, ConnectError, ErrorContext, ErrorRecord, RemoteFault, TransferTimeout, WsyncError

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
        ({"chunk_nbytes": 100}, "multiple of 4096"),
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


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """No wsync variable is set but the runtime folder, in which nothing may appear."""
    for name in [name for name in os.environ if name.startswith("WSYNC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WSYNC_RUNTIME_DIR", str(tmp_path))
    yield monkeypatch
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["WSYNC_TOKEN", "WSYNC_TOKEN_FILE"])
@pytest.mark.parametrize("has_ray", [False, True])
def test_a_token_without_an_address_is_refused(name: str, has_ray: bool, bare: pytest.MonkeyPatch) -> None:
    """Whoever misspells WSYNC_ADDRESS would wait in a job of his own."""
    bare.setenv(name, "secret")
    bare.setenv("WSYNC_ADRESS", "10.0.0.1:7777")
    bare.setattr("wsync.engine.session._running_ray", lambda: has_ray or None)
    with pytest.raises(ConfigError, match=f"{name} is set, but WSYNC_ADDRESS is not.*or unset {name}"):
        find_holder(Config(), 5.0)


@pytest.mark.parametrize("address", ["", "127.0.0.1:7777"])
def test_the_address_of_a_ray_node_is_refused_outside_ray(address: str, bare: pytest.MonkeyPatch) -> None:
    if address:
        bare.setenv("WSYNC_ADDRESS", address)
        bare.setenv("WSYNC_TOKEN", "secret")
    bare.setenv("WSYNC_LISTEN", "node")
    why = "WSYNC_ADDRESS names a coordinator outside Ray" if address else r"ray\.init\(\) has not been called"
    for config in (Config(), Config(listen="node")):
        with pytest.raises(ConfigError, match=f"listening on 'node' needs Ray.*{why}.*WSYNC_LISTEN"):
            find_holder(config, 5.0)


def test_a_coordinator_that_is_not_there_is_told_once() -> None:
    async def ask(port: int) -> None:
        async def resolve() -> tuple[str, int]:
            return "127.0.0.1", port

        async def handle(_wire: Wire, _message: Message, _descriptors: list[int]) -> Message | None:
            return None

        def hello() -> HolderHello:
            raise AssertionError("nobody is there to greet")

        upstream = Upstream(Config(), "secret", resolve, hello, tuple, handle)
        running = asyncio.create_task(upstream.run())
        try:
            await upstream.call(Done(), timeout_s=0.5)
        finally:
            running.cancel()

    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(ConnectError) as got:
            asyncio.run(ask(port))
    text = str(got.value)
    assert text.startswith(f"no coordinator within 0.5 s: the coordinator at 127.0.0.1:{port} does not answer (")
    assert [text.count(part) for part in ("check that", "phase=", "WSYNC_ADDRESS")] == [1, 1, 1], text
