"""wsync inside Ray: the coordinator is a named, restartable actor, and so is the holder of each node.

`wsync.Publisher` and `wsync.Replica` find both by themselves in any actor (sync, threaded or async), task or driver.
Ray starts, places and restarts these actors; bytes and per-chunk messages never go through it. Members of one Ray job
share them; `Config(job="name")` shares them among several Ray jobs of a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from wsync.auth import new_token
from wsync.config import Config
from wsync.engine.coordinator import Coordinator
from wsync.engine.holder import Holder
from wsync.engine.link import HolderAddress
from wsync.errors import ConfigError, ConnectError, ErrorContext

logger = logging.getLogger("wsync")

NAMESPACE = "wsync"
_LOOPBACK = ("127.0.0.1", "::1", "[::1]", "localhost")
_ATTEMPT_S = 5.0


class HolderPlace(msgspec.Struct, frozen=True):
    """A holder and where it runs."""

    node_id: str
    pid: int


class CoordinatorPlace(msgspec.Struct, frozen=True):
    """Where the coordinator listens, the job's token, and the address by which Ray knows its node."""

    host: str
    port: int
    token: str
    node_ip: str


class _Loop:
    """An event loop in a thread of its own, so that Ray's threads never wait for ours."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="wsync-loop", daemon=True).start()

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30.0)

    def run_then_leave(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run to the end, then end this actor for good: it was not a crash, so Ray must not restart it."""

        async def run() -> None:
            try:
                await coroutine
            except Exception:
                logger.exception("a wsync actor failed; Ray restarts it")
                os._exit(1)
            await asyncio.to_thread(ray.kill, ray.get_runtime_context().current_actor, no_restart=True)

        asyncio.run_coroutine_threadsafe(run(), self.loop)


class _CoordinatorActor:
    """One per job. Ray replays the constructor's arguments on a restart, so the token stays.

    Its methods are plain: a coroutine among them would make Ray run everything in an event loop of its own.
    """

    def __init__(self, config: bytes, token: str) -> None:
        local = _local_config(msgspec.msgpack.decode(config, type=Config))
        loop = _Loop()
        self._token = token
        self._coordinator: Coordinator = loop.call(_make_coordinator(local, token))
        loop.run_then_leave(_serve_while_used(self._coordinator, local))

    def place(self) -> bytes:
        host, port = self._coordinator.address
        return msgspec.msgpack.encode(CoordinatorPlace(host, port, self._token, _node_ip()))

    def pid(self) -> int:
        return os.getpid()

    def holders(self) -> list[tuple[str, int]]:
        return [(record.host, record.pid) for record in self._coordinator.view.holders]


class _HolderActor:
    """One per node and job. Plain methods only, as above."""

    def __init__(self, config: bytes, token: str, host: str, coordinator_name: str) -> None:
        local = _local_config(msgspec.msgpack.decode(config, type=Config))
        loop = _Loop()
        self._token, self._host = token, host
        self._holder: Holder = loop.call(_make_holder(local, token, host, coordinator_name))
        loop.run_then_leave(self._holder.run())

    def place(self) -> tuple[str, str, str]:
        return self._holder.socket_name, self._token, self._host


async def _make_coordinator(config: Config, token: str) -> Coordinator:
    coordinator = Coordinator(config, token)
    coordinator.start()
    return coordinator


async def _serve_while_used(coordinator: Coordinator, config: Config) -> None:
    """Until no holder has been connected for long enough that none is on its way either."""
    serving = asyncio.create_task(coordinator.run())
    last_used = time.monotonic()
    while time.monotonic() - last_used < config.linger_s + config.join_timeout_s:
        await asyncio.sleep(0.25)
        if serving.done():
            serving.result()
        if coordinator.num_holders:
            last_used = time.monotonic()
    serving.cancel()


async def _make_holder(config: Config, token: str, host: str, coordinator_name: str) -> Holder:
    async def resolve() -> tuple[str, int]:
        place = await asyncio.to_thread(_ask_coordinator, coordinator_name)
        return place.host, place.port

    holder = Holder(config, token, host=host, resolve=resolve)
    holder.start()
    return holder


def find_holder(config: Config, timeout_s: float) -> HolderAddress:
    """This node's holder, started (with the coordinator) if there is none. Raises ConnectError, ConfigError."""
    deadline = time.monotonic() + timeout_s
    name = _job_name(config)
    node_id = ray.get_runtime_context().get_node_id()
    host = config.host if config.host != "auto" else node_id
    problem = "Ray did not start it"
    while time.monotonic() < deadline:
        with contextlib.suppress(GetTimeoutError):
            try:
                holder = _holder_actor(config, name, node_id, host)
                socket_name, token, host = _get(holder.place.remote(), deadline)
                return HolderAddress(socket_name, token, host)
            except (RayActorError, ValueError) as exc:  # it is being restarted, or has just left
                problem = str(exc).splitlines()[0]
                time.sleep(0.05)
    raise ConnectError(
        f"no holder on this Ray node within {timeout_s:g} s: {problem}",
        hint="see the logs of the actor wsync-holder-* in Ray",
        context=ErrorContext(phase="join", elapsed_s=timeout_s),
    )


def holders(config: Config | None = None) -> list[HolderPlace]:
    """All holders of the job. Raises ConnectError when the job has no coordinator."""
    name = coordinator_name(config)
    try:
        actor = ray.get_actor(name, namespace=NAMESPACE)
        return [HolderPlace(node_id, pid) for node_id, pid in _get(actor.holders.remote(), time.monotonic() + 30.0)]
    except (RayActorError, GetTimeoutError, ValueError) as exc:
        raise ConnectError(f"there is no coordinator {name}", hint="create a Publisher or Replica first") from exc


def coordinator_name(config: Config | None = None) -> str:
    """Name of the job's coordinator actor, in the namespace `NAMESPACE`."""
    return f"wsync-coordinator-{_job_name(config or Config())}"


def actor_id() -> str:
    """Id of the Ray actor that this process is, the same after a restart; empty elsewhere."""
    return str(ray.get_runtime_context().get_actor_id() or "")


def _holder_actor(config: Config, name: str, node_id: str, host: str) -> Any:
    actor_name = f"wsync-holder-{name}-{host}"
    try:
        return ray.get_actor(actor_name, namespace=NAMESPACE)
    except ValueError:
        place = _coordinator_place(config, name)
    own_ip = _node_ip()
    if config.listen in _LOOPBACK and place.node_ip != own_ip:
        raise ConfigError(
            f"the coordinator is on {place.node_ip} and listens on {place.host} only, out of reach of {own_ip}",
            hint='let wsync listen on the address of each Ray node: WSYNC_LISTEN=node or Config(listen="node")',
        )
    remote: Any = ray.remote(_HolderActor).options(
        name=actor_name,
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=4,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    return remote.remote(msgspec.msgpack.encode(config), place.token, host, f"wsync-coordinator-{name}")


def _coordinator_place(config: Config, name: str) -> CoordinatorPlace:
    """The coordinator, started if there is none. Raises what Ray raises while it is being restarted."""
    remote: Any = ray.remote(_CoordinatorActor).options(
        name=f"wsync-coordinator-{name}",
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=4,
    )
    actor: Any = remote.remote(msgspec.msgpack.encode(config), new_token())
    return msgspec.msgpack.decode(_get(actor.place.remote(), time.monotonic() + _ATTEMPT_S), type=CoordinatorPlace)


def _ask_coordinator(actor_name: str) -> CoordinatorPlace:
    try:
        actor = ray.get_actor(actor_name, namespace=NAMESPACE)
        return msgspec.msgpack.decode(_get(actor.place.remote(), time.monotonic() + _ATTEMPT_S), type=CoordinatorPlace)
    except (RayActorError, GetTimeoutError, ValueError) as exc:
        raise ConnectError(f"the coordinator actor {actor_name} does not answer: {exc}") from exc


def _get(ref: Any, deadline: float) -> Any:
    return ray.get(ref, timeout=max(0.1, min(_ATTEMPT_S, deadline - time.monotonic())))


def _job_name(config: Config) -> str:
    return config.job if config.job != "default" else f"default-{ray.get_runtime_context().get_job_id()}"


def _node_ip() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _local_config(config: Config) -> Config:
    return msgspec.structs.replace(config, listen=_node_ip()) if config.listen == "node" else config
