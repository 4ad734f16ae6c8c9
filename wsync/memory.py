"""Slots: blocks of shared memory that hold one version each, and the checks before reserving one.

A slot is one memfd (or one unlinked file in a declared directory):

    data    [0, nbytes)                 the packed lane
    tail    one header, then per chunk: a ready byte, and the xxh3-64 digest of its data

The tail makes a slot self-describing: whoever has its descriptor knows which version it holds, which
chunks are there and what they must hash to. So a holder that restarts can adopt slots that
living members hand back, and a one-sided reader in another process can follow the ready bytes.

A slot has one writer at a time. Ready bytes are set after the data they speak of is in place. Each version may come in
chunks of another size: the tail has room for small ones, and reserving a slot anew would cost its page faults.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterable

from wsync.errors import ArenaError

_MAGIC = b"wsyncSL3"
_HEADER = struct.Struct("<8s7Q")  # magic, nbytes, least chunk, chunk_nbytes, version, uid, is_sealed, channel's key
_LEAST_CHUNK_NBYTES = 256 << 10
_PAGE = mmap.PAGESIZE
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_PREFAULT_NBYTES = 16 << 20


class Slot:
    """A mapped slot. Its owner creates it (`reserve`), members and restarted holders map it (`attach`).

    `data` is a memoryview of `nbytes` bytes; `ready` one byte per chunk; `digests` one uint64 per chunk.
    The last chunk may be short. A slot of zero bytes has no chunks and is complete at once.
    """

    def __init__(self, fd: int, *, is_writable: bool) -> None:
        self.fd = fd
        total = os.fstat(fd).st_size
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        mapping = mmap.mmap(fd, total, mmap.MAP_SHARED, access)
        self._map: mmap.mmap | None = mapping
        magic, nbytes, least, chunk_nbytes, _, _, _, _ = _HEADER.unpack_from(mapping, total - _PAGE)
        if magic != _MAGIC or not 0 < least <= chunk_nbytes <= 1 << 40 or _total_nbytes(nbytes, least) != total:
            mapping.close()
            raise ArenaError("a descriptor that was handed over is not a wsync slot")
        self.nbytes: int = nbytes
        self.least_chunk_nbytes: int = least
        self._view = memoryview(mapping)
        self.data = self._view[:nbytes]
        self._header_at = total - _PAGE
        self._changed = threading.Condition()
        self._cut(chunk_nbytes)

    def _cut(self, chunk_nbytes: int) -> None:
        self.chunk_nbytes: int = chunk_nbytes
        self.num_chunks = -(-self.nbytes // chunk_nbytes)
        digests_at, ready_at = _tail_offsets(self.nbytes, self.least_chunk_nbytes)
        self.digests = self._view[digests_at : digests_at + 8 * self.num_chunks].cast("Q")
        self.ready = self._view[ready_at : ready_at + self.num_chunks]

    @classmethod
    def reserve(cls, nbytes: int, chunk_nbytes: int, *, arena: str = "memory") -> Slot:
        """A new zeroed slot whose pages are all there. Raises `ArenaError` naming what is lacking."""
        least = min(chunk_nbytes, _LEAST_CHUNK_NBYTES)
        total = _total_nbytes(nbytes, least)
        if arena == "memory":
            _check_memory(total)
            fd = os.memfd_create("wsync", os.MFD_CLOEXEC)
        else:
            fd = _unlinked_file(arena)
        try:
            os.posix_fallocate(fd, 0, total)  # a full disk or tmpfs is an error here, never a SIGBUS later
            os.pwrite(fd, _HEADER.pack(_MAGIC, nbytes, least, chunk_nbytes, 0, 0, 0, 0), total - _PAGE)
            slot = cls(fd, is_writable=True)
            slot.prefault()
            return slot
        except OSError as exc:
            os.close(fd)
            if exc.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
                where = "memory" if arena == "memory" else f"the arena directory '{arena}'"
                raise ArenaError(
                    f"{where} has no room for a slot of {total} bytes ({exc.strerror})",
                    hint="free some, use fewer slots, or choose another arena",
                ) from exc
            raise

    @classmethod
    def attach(cls, fd: int, *, is_writable: bool) -> Slot:
        """Map a slot by a descriptor that came over a socket. The slot owns `fd` from here on."""
        try:
            slot = cls(fd, is_writable=is_writable)
        except (OSError, ValueError, struct.error, ArenaError) as exc:
            os.close(fd)
            if isinstance(exc, ArenaError):
                raise
            raise ArenaError(f"a slot that was handed over cannot be mapped: {exc}") from exc
        return slot

    def prefault(self) -> None:
        """Map all pages now, so that no later copy pays for a page fault (measured: 9 times slower).

        Piece by piece: `madvise` keeps the interpreter's lock, and a large slot would stop every thread for seconds.
        """
        mapping = self._map
        if mapping is None:
            return
        for advice in (_MADV_POPULATE_WRITE, _MADV_POPULATE_READ):
            try:
                for start in range(0, len(mapping), _PREFAULT_NBYTES):
                    mapping.madvise(advice, start, min(_PREFAULT_NBYTES, len(mapping) - start))
                return
            except (OSError, ValueError):  # an older kernel, or a read-only mapping
                continue

    def reader_fd(self) -> int:
        """A new read-only descriptor of this slot, to hand to a reader. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    # --- which version it holds
    def _header(self) -> tuple[bytes, int, int, int, int, int, int, int]:
        mapping = self._map  # another thread may close the slot
        return _HEADER.unpack_from(mapping, self._header_at) if mapping is not None else (b"", 0, 0, 0, 0, 0, 0, 0)

    @property
    def version(self) -> int:
        """The version that the slot holds or receives; 0 when it is free."""
        return self._header()[4]

    @property
    def uid(self) -> int:
        """Tells the version from another of the same number."""
        return self._header()[5]

    @property
    def is_sealed(self) -> bool:
        """All chunks are there and agree with the digests of their source."""
        return bool(self._header()[6])

    @property
    def channel_key(self) -> int:
        """xxh3-64 of the channel's name and manifest, so that a slot is adopted only where it belongs."""
        return self._header()[7]

    def fits(self, nbytes: int, chunk_nbytes: int) -> bool:
        """Whether it can hold a version of `nbytes` in chunks of that size."""
        return self.nbytes == nbytes and self.least_chunk_nbytes <= chunk_nbytes

    def begin(self, version: int, channel_key: int, *, uid: int = 0, chunk_nbytes: int = 0) -> None:
        """Give the slot to a version: no chunk is ready any more. The caller has made sure that nobody reads it.

        `chunk_nbytes` must fit; 0 leaves it as it is.
        """
        if chunk_nbytes and not self.fits(self.nbytes, chunk_nbytes):
            raise ArenaError(f"a slot for chunks of {self.least_chunk_nbytes} bytes cannot have ones of {chunk_nbytes}")
        with self._changed:
            self._cut(chunk_nbytes or self.chunk_nbytes)
            self._write_header(0, 0, is_sealed=False, channel_key=channel_key)
            self.ready[:] = bytes(self.num_chunks)
            self._write_header(version, uid, is_sealed=False, channel_key=channel_key)
            self._changed.notify_all()

    def seal(self) -> None:
        """Declare the slot whole. The caller has compared every digest."""
        self._write_header(self.version, self.uid, is_sealed=True, channel_key=self.channel_key)

    def _write_header(self, version: int, uid: int, *, is_sealed: bool, channel_key: int) -> None:
        if self._map is None:
            raise ArenaError("a slot that was closed cannot be written")
        sizes = self.nbytes, self.least_chunk_nbytes, self.chunk_nbytes
        _HEADER.pack_into(self._map, self._header_at, _MAGIC, *sizes, version, uid, is_sealed, channel_key)

    def refresh(self) -> None:
        """For a reader of another process: the version that is in the slot now may have chunks of another size."""
        chunk_nbytes = self._header()[3]
        if self.least_chunk_nbytes <= chunk_nbytes != self.chunk_nbytes:
            self._cut(chunk_nbytes)

    # --- chunks
    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """`(offset, nbytes)` of a chunk in `data`."""
        offset = chunk * self.chunk_nbytes
        return offset, min(self.chunk_nbytes, self.nbytes - offset)

    def chunk_data(self, chunk: int) -> memoryview:
        offset, nbytes = self.chunk_range(chunk)
        return self.data[offset : offset + nbytes]

    def mark_ready(self, chunks: Iterable[int]) -> None:
        """The data of these chunks is in place: readers that wait for them go on."""
        with self._changed:
            for chunk in chunks:
                self.ready[chunk] = 1
            self._changed.notify_all()

    def unmark_ready(self, chunk: int) -> None:
        """The data of this chunk turned out wrong and is fetched again."""
        self.ready[chunk] = 0

    def missing(self) -> list[int]:
        """Chunks that are not there yet, ascending."""
        return [chunk for chunk, is_ready in enumerate(self.ready) if not is_ready]

    def is_ready(self, offset: int, nbytes: int) -> bool:
        """Whether every chunk that overlaps `[offset, offset + nbytes)` is there."""
        if nbytes <= 0:
            return True
        first, last = offset // self.chunk_nbytes, (offset + nbytes - 1) // self.chunk_nbytes
        return all(self.ready[first : last + 1])

    def wait_ready(self, offset: int, nbytes: int, version: int, timeout_s: float) -> bool:
        """Block until the range is there. False at the deadline, or when the slot has gone to another version."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self.version == version:
                if self.is_ready(offset, nbytes):
                    return True
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return self.version == version and self.is_ready(offset, nbytes)
        return False

    def close(self) -> None:
        """Give the slot up: it has no version then. Its memory is unmapped when its last view (a copy) is dropped."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self._map = None  # not closed: that could pull the memory from under a copy
        self.data = self.ready = self._view = memoryview(b"")
        self.digests = memoryview(b"").cast("Q")


def _tail_offsets(nbytes: int, least_chunk_nbytes: int) -> tuple[int, int]:
    num_chunks = -(-nbytes // least_chunk_nbytes)
    digests_at = -(-nbytes // _PAGE) * _PAGE
    return digests_at, digests_at + 8 * num_chunks


def _total_nbytes(nbytes: int, least_chunk_nbytes: int) -> int:
    """Data and tail, each from a page boundary; the header has the last page."""
    num_chunks = -(-nbytes // least_chunk_nbytes)
    _, ready_at = _tail_offsets(nbytes, least_chunk_nbytes)
    return -(-(ready_at + num_chunks) // _PAGE) * _PAGE + _PAGE


def _unlinked_file(directory: str) -> int:
    """A file without a name: nothing is left behind by a crash."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise ArenaError(f"the arena directory '{directory}' cannot be used: {exc.strerror}") from exc
    fd, path = tempfile.mkstemp(dir=directory, prefix="wsync-")
    os.unlink(path)
    return fd


def check_room(nbytes: int, chunk_nbytes: int, *, num_slots: int, arena: str = "memory") -> None:
    """Raise `ArenaError` naming the limit that `num_slots` more slots would break; nothing is reserved."""
    total = num_slots * _total_nbytes(nbytes, min(chunk_nbytes, _LEAST_CHUNK_NBYTES))
    if arena == "memory":
        _check_memory(total)
        return
    try:
        found = os.statvfs(arena)
    except OSError as exc:
        raise ArenaError(f"the arena directory '{arena}' cannot be used: {exc.strerror}") from exc
    _refuse_beyond(total, found.f_bavail * found.f_frsize, f"the arena directory '{arena}'")


def _check_memory(nbytes: int) -> None:
    """Refuse by name before the kernel kills somebody: available memory, and every cgroup limit above this process."""
    for name, room in [("available memory (/proc/meminfo)", available_memory()), *cgroup_headroom()]:
        _refuse_beyond(nbytes, room, name)


def _refuse_beyond(nbytes: int, room: int, name: str) -> None:
    if nbytes > room:
        raise ArenaError(
            f"slots of {nbytes} bytes do not fit into {room} bytes of {name}",
            hint="raise the limit, use fewer slots, or set arena to another directory",
        )


def available_memory(meminfo: str = "/proc/meminfo") -> int:
    """Bytes that the kernel says can be had without swapping."""
    with open(meminfo) as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise ArenaError(f"{meminfo} does not say MemAvailable")


def cgroup_headroom(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> list[tuple[str, int]]:
    """`(name, free bytes)` of each cgroup limit that applies to this process; v1 and v2, every ancestor."""
    found: list[tuple[str, int]] = []
    try:
        with open(membership) as lines:
            entries = [line.strip().split(":", 2) for line in lines]
    except OSError:
        return found
    for _, controllers, path in entries:
        if controllers == "":
            base, limit_name, usage_name = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_name, usage_name = f"{root}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            folder = "/".join([base, *parts[:depth]])
            limit, usage = _read_int(f"{folder}/{limit_name}"), _read_int(f"{folder}/{usage_name}")
            if limit is not None and usage is not None:
                cache = _cgroup_cache(f"{folder}/memory.stat")
                found.append((f"the cgroup limit {folder}/{limit_name}", max(0, limit - usage + cache)))
    return found


def _read_int(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _cgroup_cache(path: str) -> int:
    """Page cache that the kernel drops under pressure (clean file pages)."""
    try:
        with open(path) as lines:
            stat = dict(line.split() for line in lines)
    except (OSError, ValueError):
        return 0
    return int(stat.get("inactive_file", stat.get("total_inactive_file", "0")))
