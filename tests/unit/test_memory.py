"""Slots: what is ready and sealed, who may map them, and the room that is checked before one is reserved."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wsync.memory
from wsync.errors import ArenaError
from wsync.memory import Slot, available_memory, cgroup_headroom

CHUNK = 4096


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@settings(max_examples=25)
@given(st.integers(0, 5 * CHUNK), st.sampled_from([CHUNK, 2 * CHUNK]))
def test_a_slot_has_all_its_bytes_and_a_short_last_chunk(nbytes: int, chunk_nbytes: int) -> None:
    slot = Slot.reserve(nbytes, chunk_nbytes)
    try:
        assert len(slot.data) == nbytes
        assert slot.num_chunks == -(-nbytes // chunk_nbytes) == len(slot.ready) == len(slot.digests)
        ranges = [slot.chunk_range(chunk) for chunk in range(slot.num_chunks)]
        assert sum(size for _, size in ranges) == nbytes
        assert all(size > 0 for _, size in ranges)
        slot.begin(3, 7)
        slot.data[:] = b"\xff" * nbytes
        assert (slot.version, slot.channel_key, slot.is_sealed) == (3, 7, False), "data does not reach into the tail"
        assert slot.missing() == list(range(slot.num_chunks))
        slot.mark_ready(range(slot.num_chunks))
        slot.digests[:] = slot.digests
        slot.seal()
        assert bytes(slot.data) == b"\xff" * nbytes, "the tail does not reach into the data"
        assert slot.is_ready(0, nbytes)
        assert slot.is_sealed
        slot.begin(4, 7)
        assert not slot.is_sealed
        assert slot.missing() == list(range(slot.num_chunks))
    finally:
        slot.close()


def test_ready_means_every_chunk_of_the_range() -> None:
    slot = Slot.reserve(3 * CHUNK, CHUNK)
    slot.begin(1, 1)
    slot.mark_ready([0, 2])
    assert slot.is_ready(0, CHUNK)
    assert not slot.is_ready(0, CHUNK + 1)
    assert slot.is_ready(2 * CHUNK, CHUNK)
    assert slot.is_ready(CHUNK, 0)
    slot.unmark_ready(2)
    assert slot.missing() == [1, 2]
    slot.close()


def test_waiting_ends_with_the_bytes_the_version_or_the_deadline() -> None:
    slot = Slot.reserve(2 * CHUNK, CHUNK)
    slot.begin(1, 1)
    assert slot.wait_ready(0, 1, 1, 0.01) is False
    assert slot.wait_ready(0, 1, 2, 60.0) is False
    for act, right in ((lambda: slot.mark_ready([0]), True), (lambda: slot.begin(2, 1), False)):
        outcome: list[bool] = []
        where = 0 if right else CHUNK
        waiter = threading.Thread(target=lambda where=where, to=outcome: to.append(slot.wait_ready(where, 1, 1, 60.0)))
        waiter.start()
        act()
        waiter.join(60.0)
        assert outcome == [right]
    slot.close()


def test_another_mapping_sees_the_same_slot_and_a_reader_cannot_write() -> None:
    slot = Slot.reserve(CHUNK + 5, CHUNK)
    slot.begin(9, 11)
    slot.data[:] = b"x" * len(slot.data)
    slot.mark_ready([0, 1])
    slot.seal()
    reader = Slot.attach(slot.reader_fd(), is_writable=False)
    assert (reader.version, reader.channel_key, reader.is_sealed) == (9, 11, True)
    assert bytes(reader.data) == bytes(slot.data)
    with pytest.raises(TypeError):
        reader.data[0] = 0
    with pytest.raises(ArenaError, match="cannot be mapped"):
        Slot.attach(slot.reader_fd(), is_writable=True)
    kept = reader.data
    slot.close()
    reader.close()
    reader.close()
    assert bytes(kept[:3]) == b"xxx", "memory stays for as long as somebody looks at it"


def test_foreign_descriptors_are_refused_and_closed(tmp_path: Path) -> None:
    slot = Slot.reserve(CHUNK, CHUNK)
    whole = os.pread(slot.fd, 1 << 20, 0)
    header_at = len(whole) - 4096
    slot.close()
    lying_size = whole[: header_at + 8] + (1 << 40).to_bytes(8, "little") + whole[header_at + 16 :]
    lying_chunk = whole[: header_at + 16] + (0).to_bytes(8, "little") + whole[header_at + 24 :]
    gc.collect()
    before = num_fds()
    for text in (b"", b"x", b"x" * 4096, bytes(8192), whole[4096:], whole + bytes(4096), lying_size, lying_chunk):
        path = tmp_path / "file"
        path.write_bytes(text)
        with pytest.raises(ArenaError):
            Slot.attach(os.open(path, os.O_RDWR), is_writable=True)
    reading, writing = os.pipe()
    for fd in (reading, writing):
        with pytest.raises(ArenaError):
            Slot.attach(fd, is_writable=False)
    gc.collect()
    assert num_fds() == before


def test_a_slot_without_room_is_named_and_reserves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_fds()
    with pytest.raises(ArenaError, match=r"do(es)? not fit into \d+ bytes of available memory"):
        Slot.reserve(1 << 50, 1 << 30)
    monkeypatch.setattr(wsync.memory, "available_memory", lambda: 100_000)
    with pytest.raises(ArenaError, match="not fit into 100000 bytes of available memory"):
        Slot.reserve(100_000, CHUNK)
    Slot.reserve(10_000, CHUNK).close()
    monkeypatch.setattr(wsync.memory, "cgroup_headroom", lambda: [("the cgroup limit /x/memory.max", 5000)])
    with pytest.raises(ArenaError, match=r"5000 bytes of the cgroup limit /x/memory\.max"):
        Slot.reserve(10_000, CHUNK)
    gc.collect()
    assert num_fds() == before


def write_tree(root: Path, files: dict[str, object]) -> None:
    for name, value in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(value))


def test_headroom_of_cgroup_v2_counts_every_ancestor(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "membership": "0::/pod/container\n",
            "fs/pod/container/memory.max": "max\n",
            "fs/pod/container/memory.current": 10,
            "fs/pod/memory.max": 1000,
            "fs/pod/memory.current": 900,
            "fs/pod/memory.stat": "anon 700\ninactive_file 150\n",
            "fs/memory.max": 100,
            "fs/memory.current": 500,
        },
    )
    found = cgroup_headroom(str(tmp_path / "fs"), str(tmp_path / "membership"))
    assert [room for _, room in found] == [250, 0]
    assert found[0][0].endswith("fs/pod/memory.max")


def test_headroom_of_cgroup_v1_and_of_a_namespace(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            "membership": "12:cpu:/x\n5:memory,hugetlb:/../docker/abc\n1:name=systemd:/\n",
            "fs/memory/docker/abc/memory.limit_in_bytes": 2000,
            "fs/memory/docker/abc/memory.usage_in_bytes": 500,
            "fs/memory/docker/abc/memory.stat": "total_inactive_file 100\n",
            "fs/memory/memory.limit_in_bytes": 9223372036854771712,
            "fs/memory/memory.usage_in_bytes": 1,
        },
    )
    found = cgroup_headroom(str(tmp_path / "fs"), str(tmp_path / "membership"))
    assert [room for _, room in found] == [1600, 9223372036854771711]
    assert cgroup_headroom(str(tmp_path), str(tmp_path / "absent")) == []


def test_available_memory_reads_what_the_kernel_says(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 10 kB\nMemAvailable:   3 kB\n")
    assert available_memory(str(meminfo)) == 3072
    meminfo.write_text("MemTotal: 10 kB\n")
    with pytest.raises(ArenaError, match="does not say MemAvailable"):
        available_memory(str(meminfo))
    assert available_memory() > 0


def test_file_backed_slots_leave_no_name(tmp_path: Path) -> None:
    slot = Slot.reserve(CHUNK, CHUNK, arena=str(tmp_path))
    slot.data[:3] = b"abc"
    assert list(tmp_path.iterdir()) == []
    assert bytes(Slot.attach(slot.reader_fd(), is_writable=False).data[:3]) == b"abc"
    slot.close()
    with pytest.raises(ArenaError, match="cannot be used"):
        Slot.reserve(CHUNK, CHUNK, arena=str(tmp_path / "absent"))


class _Mapping:
    """Notes what it is advised."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.pieces: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self.nbytes

    def madvise(self, advice: int, start: int, nbytes: int) -> None:
        self.pieces.append((start, nbytes))


def test_pages_are_mapped_in_pieces_because_madvise_keeps_the_interpreter_lock() -> None:
    slot = Slot.reserve(1 << 20, 1 << 18)
    try:
        mapping = _Mapping((70 << 20) + 4096)
        slot._map = mapping  # type: ignore[assignment]
        slot.prefault()
        starts = [start for start, _ in mapping.pieces]
        assert starts == [piece * (16 << 20) for piece in range(5)]
        assert sum(nbytes for _, nbytes in mapping.pieces) == mapping.nbytes
        assert max(nbytes for _, nbytes in mapping.pieces) == 16 << 20
    finally:
        slot.close()


def test_each_version_may_come_in_chunks_of_another_size() -> None:
    slot = Slot.reserve(10 << 20, 8 << 20)
    assert (slot.num_chunks, slot.fits(10 << 20, 1 << 20), slot.fits(10 << 20, 4096)) == (2, True, False)
    reader = Slot.attach(slot.reader_fd(), is_writable=False)
    for version, size in ((1, 1 << 20), (2, 256 << 10), (3, 8 << 20), (4, 3 << 20)):
        slot.begin(version, 7, chunk_nbytes=size)
        num = -(-(10 << 20) // size)
        assert (slot.num_chunks, len(slot.ready), len(slot.digests)) == (num, num, num)
        assert slot.missing() == list(range(num)), "nothing of the version before is there"
        slot.digests[num - 1] = 2**64 - version
        slot.mark_ready([num - 1])
        reader.refresh()
        assert (reader.num_chunks, reader.version) == (num, version)
        assert bytes(reader.ready) == bytes(slot.ready)
        assert reader.digests[num - 1] == 2**64 - version
        assert reader.chunk_range(num - 1) == slot.chunk_range(num - 1)
    with pytest.raises(ArenaError, match="262144"):
        slot.begin(5, 7, chunk_nbytes=4096)
    assert slot.version == 4, "a size that does not fit changes nothing"
    later = Slot.attach(slot.reader_fd(), is_writable=False)
    assert (later.num_chunks, later.digests[3]) == (4, 2**64 - 4), "whoever maps it later sees the present size"
    for each in (slot, reader, later):
        each.close()
