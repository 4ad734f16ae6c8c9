"""Known cases of weight sync, one test per case id, with real processes. What is right is computed without wsync."""

from __future__ import annotations

import os
import struct
from typing import Any

import pytest
from _members import (
    SMALL,
    Child,
    Job,
    Member,
    Spec,
    count_memfds,
    eventually,
    nbytes_of,
    reference,
    sha,
    source_bytes,
)

from wsync.errors import (
    ChannelError,
    CommitError,
    ConnectError,
    ManifestMismatch,
    MembershipError,
    TransferTimeout,
    WsyncError,
)
from wsync.status import ReplicaPhase

pytestmark = pytest.mark.process


def check_moved(member: Member, spec: Spec, old_seed: int, new_seed: int) -> None:
    """The live tensors have the new bytes, and they are other ones than before."""
    found, old, new = member.digest(), reference(spec, old_seed), reference(spec, new_seed)
    assert found == new
    assert all(old[name] != new[name] for name, dtype, shape in spec if len(source_bytes(name, dtype, shape, 0)) >= 4)


# --- A01
EMBED: Spec = [("embed", "float32", (8, 4)), ("norm", "float32", (4,))]


def tie(child: Child, is_cloned: bool) -> None:
    embed = child.tensors["embed"]
    child.tensors["lm_head"] = embed.clone() if is_cloned else embed


def has_one_pointer(child: Child) -> bool:
    return bool(child.tensors["embed"].data_ptr() == child.tensors["lm_head"].data_ptr())


def test_case_A01_tied_embedding_follows_under_both_names(job: Job) -> None:
    pytest.importorskip("torch")
    trainer, tied, cloned = (job.member(has_torch=True) for _ in range(3))
    for member, seed in ((trainer, 1), (tied, 0), (cloned, 0)):
        member.begin("make", EMBED, seed, "torch")
    for member, is_cloned in ((trainer, False), (tied, False), (cloned, True)):
        member.end()
        member.run(tie, is_cloned)
    trainer.open_publisher("policy")
    tied.open_replica("policy")
    cloned.open_replica("policy")
    for version in (1, 2):
        assert trainer.publish(version, seed=version) == version
        embed = reference(EMBED, version)["embed"]
        for replica in (tied, cloned):
            assert replica.digest()["lm_head"] != embed
            assert replica.wait_version(version) == version
            assert replica.digest() == reference(EMBED, version) | {"lm_head": embed}
    assert tied.run(has_one_pointer)
    assert not cloned.run(has_one_pointer)
    assert trainer.status(2).nbytes == nbytes_of(EMBED)  # one payload for both names


# --- A23, A28
def make_odd_sources(child: Child) -> None:
    """The same logical values under four layouts that are not plain row-major."""
    import torch

    child.tensors = {
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "channels_last": torch.arange(36.0).reshape(2, 3, 3, 2).to(memory_format=torch.channels_last),
        "expanded": torch.tensor([[1.5], [2.5]]).expand(2, 4),
        "sliced": torch.arange(24.0).reshape(4, 6)[:, ::2],
    }


def make_odd_targets(child: Child, is_strided: bool) -> None:
    import torch

    shapes = {"transposed": (3, 2), "channels_last": (2, 3, 3, 2), "expanded": (2, 4), "sliced": (4, 3)}
    child.tensors = {name: torch.full(shape, -1.0) for name, shape in shapes.items()}
    if is_strided:
        child.backing = torch.full((4, 6), -7.0)  # type: ignore[attr-defined]
        child.tensors["transposed"] = torch.full((2, 3), -1.0).t()
        child.tensors["channels_last"] = child.tensors["channels_last"].to(memory_format=torch.channels_last)
        child.tensors["sliced"] = child.backing[:, 1::2]  # type: ignore[attr-defined]


def values(child: Child) -> dict[str, list[float]]:
    return {name: tensor.reshape(-1).tolist() for name, tensor in child.tensors.items()}


def layout(child: Child) -> dict[str, tuple[int, tuple[int, ...], int]]:
    return {n: (t.data_ptr(), t.stride(), t.untyped_storage().nbytes()) for n, t in child.tensors.items()}


def gaps(child: Child) -> list[float]:
    return child.backing[:, ::2].reshape(-1).tolist()  # type: ignore[attr-defined, no-any-return]


def expand_target(child: Child) -> None:
    import torch

    child.tensors["expanded"] = torch.full((2, 1), -1.0).expand(2, 4)


def test_case_A28_non_contiguous_tensors_move_in_logical_order(job: Job) -> None:
    pytest.importorskip("torch")
    trainer, plain, strided = (job.member(host, has_torch=True) for host in "AAB")
    trainer.begin("run", make_odd_sources)
    plain.begin("run", make_odd_targets, False)
    strided.begin("run", make_odd_targets, True)
    for member in (trainer, plain, strided):
        member.end()
    right = {
        "transposed": [0.0, 3.0, 1.0, 4.0, 2.0, 5.0],
        "channels_last": [float(i) for i in range(36)],
        "expanded": [1.5] * 4 + [2.5] * 4,
        "sliced": [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 22.0],
    }
    trainer.open_publisher("policy")
    for replica in (plain, strided):
        replica.open_replica("policy")
    trainer.publish(1)
    for replica in (plain, strided):
        before = replica.run(layout)
        assert all(replica.run(values)[name] != right[name] for name in right)
        assert replica.wait_version(1) == 1
        assert replica.run(values) == right
        assert replica.run(layout) == before
        assert replica.verify() == []
    assert strided.run(gaps) == [-7.0] * 12
    strided.close()
    strided.run(expand_target)
    with pytest.raises(ManifestMismatch, match=r"'expanded'.*expanded"):
        strided.open_replica("policy")


def layout_of_module(child: Child) -> dict[str, tuple[int, tuple[int, ...], int]]:
    return {n: (t.data_ptr(), t.stride(), t.untyped_storage().nbytes()) for n, t in child.tensors.state_dict().items()}


def make_module(child: Child, seed: int) -> None:
    import torch

    torch.manual_seed(seed)
    child.tensors = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), torch.nn.BatchNorm2d(4), torch.nn.Linear(5, 7)
    )


def train(child: Child, seed: int) -> dict[str, str]:
    """Other values in every parameter and buffer; their sha256."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in child.tensors.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) if tensor.is_floating_point() else torch.tensor(seed))
    return child.digest()


def test_case_A23_pointers_strides_and_storages_stay(job: Job) -> None:
    pytest.importorskip("torch")
    trainer, replica = job.member(has_torch=True), job.member(has_torch=True)
    trainer.begin("run", make_module, 1)
    replica.begin("run", make_module, 2)
    trainer.end(), replica.end()
    trainer.open_publisher("policy")
    replica.open_replica("policy")
    before = replica.run(layout_of_module)
    for version in (1, 2, 3):
        old, new = replica.digest(), trainer.run(train, 10 + version)
        assert trainer.publish(version) == version
        assert replica.wait_version(version) == version
        assert replica.digest() == new
        assert all(old[name] != new[name] for name in new)
        assert replica.run(layout_of_module) == before


# --- A31, A32
EVERY_DTYPE: Spec = [
    ("bf16", "bfloat16", (3,)),
    ("fp32", "float32", (4,)),
    ("i64", "int64", (1,)),
    ("u8", "uint8", (1,)),
    ("fp8", "float8_e4m3fn", (7,)),
    ("fp8b", "float8_e5m2", (5,)),
    ("bool", "bool", (9,)),
    ("f16", "float16", (3, 3)),
    ("i16", "int16", (5,)),
    ("f64", "float64", (2, 1, 3)),
    ("empty", "float32", (0, 4)),
    ("last", "uint8", (4097,)),
]


def test_case_A31_scalars_keep_their_shape(job: Job) -> None:
    pytest.importorskip("torch")
    spec: Spec = [
        ("before", "float32", (3,)),
        ("scalar", "float32", ()),
        ("tiny", "int8", ()),
        ("z", "float32", (2, 2)),
    ]
    trainer, replica = job.member(has_torch=True), job.member("B", has_torch=True)
    trainer.begin("make", spec, 1, "torch")
    replica.begin("make", spec, 0, "torch")
    trainer.end(), replica.end()
    trainer.open_publisher("policy")
    replica.open_replica("policy")
    trainer.run(set_scalars, 2.5, -7)
    trainer.publish(1)
    assert replica.run(scalars) != ((2.5, ()), (-7, ()))
    replica.wait_version(1)
    assert replica.run(scalars) == ((2.5, ()), (-7, ()))
    assert replica.digest() == trainer.digest()
    assert replica.digest()["z"] == reference(spec, 1)["z"] != reference(spec, 0)["z"]


def set_scalars(child: Child, scalar: float, tiny: int) -> None:
    child.tensors["scalar"].fill_(scalar)
    child.tensors["tiny"].fill_(tiny)


def scalars(child: Child) -> tuple[tuple[float, tuple[int, ...]], tuple[int, tuple[int, ...]]]:
    scalar, tiny = child.tensors["scalar"], child.tensors["tiny"]
    return (scalar.item(), tuple(scalar.shape)), (tiny.item(), tuple(tiny.shape))


def test_case_A32_odd_sizes_and_every_dtype(job: Job) -> None:
    pytest.importorskip("torch")
    trainer, near, far = (job.member(host, has_torch=True) for host in "AAB")
    for member, seed in ((trainer, 1), (near, 0), (far, 0)):
        member.begin("make", EVERY_DTYPE, seed, "torch")
    for member in (trainer, near, far):
        member.end()
    trainer.open_publisher("policy")
    near.open_replica("policy")
    far.open_replica("policy")
    for version in (1, 2):
        trainer.publish(version, seed=version)
        for replica in (near, far):
            replica.wait_version(version)
            check_moved(replica, EVERY_DTYPE, version - 1, version)
            assert replica.verify() == []
    assert trainer.status(2).nbytes == nbytes_of(EVERY_DTYPE)


# --- A33
def empty_parameters(child: Child) -> None:
    """What offloading does: the parameter stays, its data goes."""
    import torch

    for name in ("w", "s"):
        child.tensors[name] = torch.empty(0)


def swap_data(child: Child, numel: int) -> None:
    """What offloading does to an `nn.Parameter`: the object stays, its data is another tensor."""
    import torch

    child.tensors["w"].data = torch.full((numel,), 3.0).reshape((37, 5) if numel else (0,))


def mark_partitioned(child: Child) -> None:
    """What ZeRO-3 does: an empty tensor that says what its shape would be."""
    import torch

    child.make(SMALL, 1, "torch")
    child.tensors["w"] = torch.empty(0)
    child.tensors["w"].ds_shape = (37, 5)


def test_case_A33_offloaded_and_partitioned_parameters_are_refused(job: Job) -> None:
    pytest.importorskip("torch")
    trainer, replica = job.member(has_torch=True), job.replica(seed=0)
    trainer.make(SMALL, 1, "torch")
    trainer.open_publisher("policy")
    trainer.publish(1)
    assert replica.wait_version(1) == 1
    trainer.run(swap_data, 0)
    with pytest.raises(ManifestMismatch, match=r"w was \[37, 5\] float32 and is \[0\]"):
        trainer.publish(2)
    trainer.run(empty_parameters)
    with pytest.raises(ManifestMismatch, match=r"w was \[37, 5\] float32 and is \[0\]"):
        trainer.publish(2)
    assert replica.commit_latest() == 0
    check_moved(replica, SMALL, 0, 1)
    trainer.close()
    trainer.run(mark_partitioned)
    with pytest.raises(ManifestMismatch, match=r"'w' is only a shard"):
        trainer.open_publisher("policy")
    trainer.make(SMALL, 2, "torch")
    trainer.open_publisher("policy")
    assert trainer.publish(3) == 2
    assert replica.wait_version(2) == 2
    check_moved(replica, SMALL, 1, 2)
    trainer.run(swap_data, 37 * 5)  # loaded back, to other memory
    assert trainer.publish(4) == 3
    assert replica.wait_version(3) == 3
    assert replica.digest() == trainer.digest() != reference(SMALL, 2)
    assert replica.digest()["w"] == sha(struct.pack("f", 3.0) * 37 * 5)


# --- A48
def layers(count: int) -> Spec:
    return [(f"layers.{i}.{part}", "float32", (6, 3)) for i in range(count) for part in ("up", "down")]


def test_case_A48_every_destination_is_written_or_named(job: Job) -> None:
    trainer = job.trainer(layers(24))
    trainer.publish(1)
    deeper = job.member()
    misspelt = [(name.replace("layers.3.up", "layers.3.pu"), dtype, shape) for name, dtype, shape in layers(24)]
    wrong = [
        (layers(25), r"the replica has tensors that the trainer does not publish: layers\.24\.up, layers\.24\.down"),
        ([*layers(24), ("bias", "float32", (1,))], r"does not publish: bias"),
        (layers(23), r"the trainer publishes tensors that the replica does not have: layers\.23\.up, layers\.23\.down"),
        (misspelt, r"does not publish: layers\.3\.pu; .*does not have: layers\.3\.up"),
    ]
    for spec, text in wrong:
        deeper.make(spec, 0)
        with pytest.raises(ManifestMismatch, match=text):
            deeper.open_replica("policy")
        assert deeper.digest() == reference(spec, 0)
    declared = ["layers.5.up", "layers.7.down"]
    deeper.make(layers(25), 0)
    deeper.open_replica("policy", names=declared)
    assert deeper.wait_version(1) == 1
    new, old = reference(layers(24), 1), reference(layers(25), 0)
    assert deeper.digest() == {name: new[name] if name in declared else old[name] for name in old}
    assert all(new[name] != old[name] for name in declared)
    deeper.close()
    with pytest.raises(ManifestMismatch, match=r"declared names are not there: layers\.99\.up"):
        deeper.open_replica("policy", names=["layers.99.up"])


def test_case_A48_mismatch_with_a_trainer_that_comes_later(job: Job) -> None:
    replica = job.replica(layers(25))
    trainer = job.trainer(layers(24))
    publication = trainer.publish(1)
    with pytest.raises(ManifestMismatch, match=r"does not publish: layers\.24\.up, layers\.24\.down"):
        replica.wait_version(1)
    with pytest.raises(ManifestMismatch, match=r"layers\.24\.up"):
        replica.commit_latest()
    assert replica.digest() == reference(layers(25), 0)
    assert replica.get("replica.is_ready") is False
    with pytest.raises(CommitError, match=r"layers\.24\.up"):
        trainer.wait_committed(publication, 20.0)


# --- A51
def replace_slot(child: Child, what: str) -> None:
    """What the replica maps is not what it leased: never filled, or of another version."""
    from wsync.engine.link import Pinned
    from wsync.memory import Slot

    whole = Pinned.slot

    def slot(self: Pinned, slot_id: int, *, timeout_s: float) -> Any:
        Pinned.slot = whole  # the next one is right again
        theirs = whole(self, slot_id, timeout_s=timeout_s)
        false = Slot.reserve(theirs.nbytes, theirs.chunk_nbytes)
        false.begin(theirs.version + (what == "other"), theirs.channel_key)
        false.data[:] = b"\xc5" * theirs.nbytes
        if what == "other":
            false.seal()
        return false

    Pinned.slot = slot


@pytest.mark.parametrize("what", ["unsealed", "other"])
def test_case_A51_bytes_that_never_arrived_are_not_committed(job: Job, what: str) -> None:
    trainer, replica = job.trainer(), job.replica()
    trainer.publish(1)
    trainer.wait_staged(1)
    replica.run(replace_slot, what)
    with pytest.raises(CommitError, match="the slot of version 1 "):
        replica.commit_latest()
    assert replica.digest() == reference(SMALL, 0)
    assert replica.get("replica.is_ready") is False
    assert replica.wait_version(1) == 1
    check_moved(replica, SMALL, 0, 1)


# --- B16, B17
def test_case_B16_expected_replicas_that_are_not_there_are_counted(job: Job) -> None:
    trainer = job.trainer()
    names = [f"engine-{i}" for i in range(4)]
    members = [job.member() for _ in names]
    for member in members:
        member.make(SMALL, 0)
    for member, name in zip(members, names, strict=True):
        member.open_replica("policy", member_id=name)
    trainer.publish(1)
    for member in members:
        member.wait_version(1)
    with pytest.raises(MembershipError, match="expected 8 replicas, present 4: ") as caught:
        trainer.wait_committed(1, 2.0, num_replicas=8)
    assert trainer.took_s < 10.0
    assert all(name in str(caught.value) for name in names)
    status = trainer.wait_committed(1, num_replicas=4)
    assert status.count(ReplicaPhase.COMMITTED) == 4
    check_moved(members[3], SMALL, 0, 1)


def test_case_B17_one_publisher_per_channel(job: Job) -> None:
    first, replica = job.trainer(member_id="first"), job.replica()
    assert first.publish(1) == 1
    assert replica.wait_version(1) == 1
    second = job.member("B")
    second.make(SMALL, 2)
    for _ in range(2):
        with pytest.raises(ChannelError, match=r"channel 'policy' is already published by first"):
            second.open_publisher("policy", member_id="second")
    assert first.publish(2, seed=5) == 2
    first.kill()
    second.open_publisher("policy", member_id="second")
    assert second.took_s < 15.0
    assert second.publish(3) == 3
    assert replica.wait_version(3) == 3
    check_moved(replica, SMALL, 1, 2)


# --- B18
def test_case_B18_every_call_ends_while_the_holder_is_stopped(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica()
    waiter = job.trainer(channel="waiter")
    waiter.publish(1)
    job.replica(channel="waiter").wait_version(1)
    for version in (1, 2):
        trainer.publish(version, version)
        replica.wait_version(version)
    calls: list[tuple[Member, str, tuple[Any, ...], dict[str, Any]]] = [
        (trainer, "publish", (3, 3), {"timeout_s": 1.0}),
        (replica, "commit_latest", (), {}),
        (waiter, "wait_staged", (1, 1.0), {}),
    ]
    for name, args in (("wait_committed", (1, 1.0)), ("status", (1,))):
        other = job.trainer(channel=name)
        other.publish(1)
        calls.append((other, name, args, {}))
    for name, args in (("wait_version", (3, 1.0)), ("rollback", ())):
        follower = job.replica()
        follower.wait_version(2)
        calls.append((follower, name, args, {}))
    verifier, leaver, joiners = job.replica(), job.replica(), [job.member(join_timeout_s=4.0) for _ in range(2)]
    verifier.wait_version(2)
    hasty = job.replica()
    hasty.wait_version(2)
    calls.append((hasty, "verify", (1.0,), {}))
    for member, what in zip(joiners, ("open_publisher", "open_replica"), strict=True):
        member.make(SMALL, 0)
        calls.append((member, what, ("joiners",), {}))
    holder = job.holder_pid("A")
    job.stop(holder)
    for member, name, args, options in calls:
        member.begin(name, *args, **options)
    verifier.begin("verify")  # with its own deadline of a minute: it is met with an answer, below
    leaver.close()
    assert leaver.took_s < 5.0
    for member, name, _, _ in calls:
        if name == "commit_latest":  # inference goes on with what it has
            assert member.end() == 0
        else:
            with pytest.raises(WsyncError, match="holder"):
                member.end()
        assert member.took_s < 15.0, name
    job.resume(holder)
    assert verifier.end() == []
    assert job.holder_pids() == {holder}
    check_goes_on(trainer, replica, 3)
    for member, name, args, options in calls:  # the same calls again
        if name == "wait_committed":
            with pytest.raises(MembershipError, match="expected 1 replicas, present 0"):
                member.wait_committed(*args)
        elif name not in ("commit_latest", "rollback", "verify"):  # nothing newer, and nothing older any more
            getattr(member, name)(*args, **options)


def check_goes_on(trainer: Member, replica: Member, seed: int) -> None:
    """After the trouble: a publish and a commit work as ever, more often than there are slots."""
    for turn in range(4):
        old, seed = replica.digest(), seed + 1
        version = trainer.publish(seed, seed)
        assert replica.wait_version(version) == version
        assert replica.digest() == reference(SMALL, seed) != old, turn
        assert replica.verify() == []
    trainer.wait_committed(version, num_replicas=1)


def run_coordinator(child: Child, port: int) -> tuple[str, int]:
    """A coordinator in a thread of this process, with a loop of its own."""
    import asyncio
    import threading

    from wsync.engine.coordinator import Coordinator

    ready = threading.Event()

    async def serve() -> None:
        child.coordinator = Coordinator(child.config, "secret" * 8)  # type: ignore[attr-defined]
        child.coordinator.start(port)  # type: ignore[attr-defined]
        ready.set()
        await child.coordinator.run()  # type: ignore[attr-defined]

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    assert ready.wait(20.0)
    return child.coordinator.address  # type: ignore[attr-defined, no-any-return]


def with_coordinator(job: Job) -> tuple[Member, tuple[str, int]]:
    """A coordinator in a process of its own; members that start from now on use it."""
    coordinator = job.member()
    host, port = coordinator.run(run_coordinator, 0)
    job.env |= {"WSYNC_ADDRESS": f"{host}:{port}", "WSYNC_TOKEN": "secret" * 8}
    return coordinator, (host, port)


def test_case_B18_every_call_ends_while_the_coordinator_is_stopped(job: Job) -> None:
    coordinator, _ = with_coordinator(job)
    short = {"join_timeout_s": 3.0}
    trainer, replica = job.trainer(config=short), job.replica(config=short, host="B")
    joiner = job.member("C", **short)
    joiner.make(SMALL, 9)
    trainer.publish(1)
    replica.wait_version(1)
    trainer.wait_committed(1)
    job.stop(coordinator.pid)
    joiner.begin("open_publisher", "other")
    trainer.begin("publish", 2, 2, timeout_s=1.0)
    replica.begin("wait_version", 2, 1.0)
    assert trainer.end() == 2, "a snapshot needs no coordinator"
    trainer.begin("wait_staged", 2, 1.0)
    with pytest.raises(TransferTimeout, match="version 2 of 'policy' is not staged on this host"):
        replica.end()
    assert replica.took_s < 10.0
    with pytest.raises((TransferTimeout, ConnectError), match="coordinator"):
        trainer.end()
    assert trainer.took_s < 10.0
    trainer.begin("wait_committed", 2, 1.0)
    assert replica.commit_latest() == 0
    assert replica.verify() == []
    with pytest.raises(CommitError, match="not kept"):
        replica.rollback()
    with pytest.raises((TransferTimeout, ConnectError), match="coordinator"):
        trainer.end()
    with pytest.raises(WsyncError, match=r"coordinator|holder"):
        joiner.end()
    assert joiner.took_s < 15.0
    joiner.begin("open_replica", "policy")
    with pytest.raises(WsyncError, match=r"coordinator|holder"):
        joiner.end()
    assert joiner.took_s < 15.0
    job.resume(coordinator.pid)
    assert replica.wait_version(2) == 2
    check_moved(replica, SMALL, 1, 2)
    check_goes_on(trainer, replica, 5)
    joiner.open_replica("policy")
    assert joiner.wait_version(1) == trainer.get("publisher.last_version")
    assert joiner.digest() == replica.digest()


# --- C09
def test_case_C09_twenty_kills_leave_nothing(job: Job) -> None:
    in_shm = set(os.listdir("/dev/shm"))
    trainer, survivor = job.trainer(seed=1), job.replica(seed=0)
    trainer.publish(1)
    survivor.wait_version(1)
    holder, files = job.holder_pid("A"), job.files()
    num_fds = len(os.listdir(f"/proc/{holder}/fd"))
    for turn in range(10):
        fresh_trainer, fresh_replica = job.member(), job.member()
        trainer.begin("publish", turn, seed=50 + turn)
        if turn % 2:
            trainer.end()
        trainer.kill()
        for member in (fresh_trainer, fresh_replica):
            member.make(SMALL, 100 + turn)
        fresh_trainer.open_publisher("policy")
        fresh_replica.open_replica("policy")
        version = fresh_trainer.publish(turn)
        assert fresh_replica.wait_version(version) == version
        if turn % 2:
            fresh_replica.begin("wait_version", version + 5)
        fresh_replica.kill()
        trainer = fresh_trainer
    assert survivor.wait_version(version) == version
    check_moved(survivor, SMALL, 0, 109)
    assert job.holder_pid("A") == holder
    assert job.files() == files
    for pid in (holder, survivor.pid, trainer.pid):
        assert count_memfds(pid) <= 2, pid
    eventually(lambda: len(os.listdir(f"/proc/{holder}/fd")) <= num_fds, "the holder has as many descriptors as before")
    new = {name for name in set(os.listdir("/dev/shm")) - in_shm if "wsync" in name or "psm" in name}
    assert not new


# --- D03
def test_case_D03_many_small_tensors_travel_as_one_lane(job: Job) -> None:
    """The same bytes cross as for one tensor; `small_tensors_vs_one_tensor` of the benchmark has the times."""
    num, config = 20_000, {"chunk_nbytes": 1 << 20}
    shapes: dict[str, Spec] = {
        "one": [("all", "float32", (num, 1024))],
        "many": [(f"t{i}", "float32", (1024,)) for i in range(num)],
    }
    for channel, spec in shapes.items():
        trainer = job.trainer(spec, channel=channel, config=config)
        replica = job.replica(spec, channel=channel, host="B", config=config)
        old = replica.digest()
        version = trainer.publish(0)
        assert replica.wait_version(version) == version
        assert replica.digest() == reference(spec, 1)
        assert not set(replica.digest().items()) & set(old.items())
        status = trainer.status(version)
        assert status.nbytes == num * 4096
        assert [holder.nbytes_received for holder in status.holders if holder.host == "B"] == [num * 4096]
        trainer.close()
        replica.close()


# --- E01
def test_case_E01_a_restarted_replica_is_not_ready_before_it_has_the_current_version(job: Job) -> None:
    trainer = job.trainer()
    near, far, other = job.replica(), job.replica(host="B"), job.replica(host="B")
    trainer.publish(1)
    trainer.publish(2, seed=2)
    for replica in (near, far, other):
        assert replica.get("replica.is_ready") is False
        assert replica.wait_version(2) == 2
        assert replica.get("replica.is_ready") is True
    trainer.wait_committed(2, num_replicas=3)
    received = {h.host: h.nbytes_received for h in trainer.status(2).holders}
    assert received == {"B": nbytes_of(SMALL)}
    far.kill()
    again = job.replica(host="B")
    assert again.get("replica.is_ready") is False
    assert again.get("replica.version") == 0
    assert again.digest() == reference(SMALL, 0)
    assert again.commit_latest() == 2, "its own host has the version"
    assert again.get("replica.is_ready") is True
    check_moved(again, SMALL, 0, 2)
    trainer.wait_committed(2, num_replicas=3)
    assert {h.host: h.nbytes_received for h in trainer.status(2).holders} == received


# --- E14
def break_install(child: Child, how: str) -> None:
    """The next install writes some tensors and then fails."""
    from wsync.engine.tensors import NumpyTensors

    whole = NumpyTensors.install

    def half(self: NumpyTensors, *args: Any, **options: Any) -> None:
        if how != "always":
            NumpyTensors.install = whole  # type: ignore[method-assign]
        for array in list(child.tensors.values())[:2]:
            array.fill(3)
        raise RuntimeError("the device fell off the bus")

    NumpyTensors.install = half  # type: ignore[method-assign]
    child.mend = lambda: setattr(NumpyTensors, "install", whole)  # type: ignore[attr-defined]


def mend(child: Child) -> None:
    child.mend()  # type: ignore[attr-defined]


def test_case_E14_failed_commit_leaves_version_and_bytes(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica()
    trainer.publish(1)
    replica.wait_version(1)
    trainer.publish(2, seed=2)
    trainer.wait_staged(2)
    replica.run(break_install, "once")
    with pytest.raises(CommitError, match=r"version 2 could not .*fell off the bus.*former version is in place"):
        replica.commit_latest()
    assert replica.get("replica.version") == 1
    assert replica.get("replica.is_ready") is True
    check_moved(replica, SMALL, 0, 1)
    assert replica.verify() == []
    with pytest.raises(CommitError, match="fell off the bus"):
        trainer.wait_committed(2, 20.0)
    assert replica.commit_latest() == 2, "the next call tries again"
    check_moved(replica, SMALL, 1, 2)
    assert replica.rollback() == 1
    check_moved(replica, SMALL, 2, 1)
    assert replica.get("replica.version") == 1


def test_case_E14_a_replica_that_cannot_be_restored_is_not_ready(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica()
    trainer.publish(1)
    replica.wait_version(1)
    trainer.publish(2, seed=2)
    trainer.wait_staged(2)
    replica.run(break_install, "always")
    with pytest.raises(CommitError, match="commit another version before serving"):
        replica.commit_latest()
    assert replica.get("replica.is_ready") is False
    replica.run(mend)
    assert replica.commit_latest() == 2
    assert replica.get("replica.is_ready") is True
    check_moved(replica, SMALL, 1, 2)


def test_case_E14_the_former_version_is_restored_from_its_own_layout(job: Job) -> None:
    """The new trainer has the same tensors in another order: the bytes of each version lie elsewhere."""
    trainer, replica = job.trainer(), job.replica()
    trainer.publish(1)
    replica.wait_version(1)
    trainer.close()
    trainer.make(SMALL[::-1], 2)
    trainer.open_publisher("policy")
    trainer.publish(2)
    trainer.wait_staged(2)
    replica.run(break_install, "once")
    with pytest.raises(CommitError, match="former version is in place"):
        replica.commit_latest()
    check_moved(replica, SMALL, 0, 1)
    assert replica.commit_latest() == 2
    check_moved(replica, SMALL, 1, 2)
    assert replica.rollback() == 1
    check_moved(replica, SMALL, 2, 1)


# --- H01
def flip_bit(child: Child, name: str) -> None:
    import numpy as np

    child.tensors[name].reshape(-1).view(np.uint8)[-1] ^= 0x10


def test_case_H01_one_flipped_bit_is_named(job: Job) -> None:
    trainer, replica = job.trainer(), job.replica(host="B")
    trainer.publish(1)
    replica.wait_version(1)
    check_moved(replica, SMALL, 0, 1)
    assert trainer.call("publisher.digests", 1) == replica.call("replica.digests")
    assert replica.verify() == []
    replica.run(flip_bit, "b")
    assert replica.verify() == ["b"]
    ours, theirs = replica.call("replica.digests"), trainer.call("publisher.digests", 1)
    assert [name for name in theirs if ours[name] != theirs[name]] == ["b"]
    trainer.publish(2, seed=2)
    replica.wait_version(2)
    assert replica.verify() == []
