"""What the parts of a holder share: its settings, its voice, its threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import xxhash

from wsync.config import Config
from wsync.engine.protocol import Message
from wsync.memory import Slot

NUM_THREADS = 2


@dataclass(eq=False)
class HolderServices:
    """`tell` sends a notice to the coordinator. Tasks that are spawned end with the holder."""

    config: Config
    tell: Callable[[Message], None]
    digest_threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="wsync-digest")
    )
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def in_thread(self, call: Callable[..., Any], *args: object) -> Any:
        """Run hashing beside the event loop; xxhash releases the GIL."""
        return await asyncio.get_running_loop().run_in_executor(self.digest_threads, call, *args)

    async def digest_and_serve(self, slot: Slot, chunks: range) -> None:
        """Write the xxh3-64 of these chunks into the slot's tail and mark each ready, with all threads."""
        parts = [chunks[number::NUM_THREADS] for number in range(NUM_THREADS)]
        await asyncio.gather(*(self.in_thread(digest_chunks, slot, part) for part in parts))


def digest_chunks(slot: Slot, chunks: range) -> None:
    """Digest these chunks, and mark each ready as soon as it is done."""
    for chunk in chunks:
        slot.digests[chunk] = xxhash.xxh3_64_intdigest(slot.chunk_data(chunk))
        slot.mark_ready([chunk])


def digests_agree(slot: Slot) -> bool:
    """Whether every chunk still has the digest in the slot's tail."""
    return all(
        slot.digests[chunk] == xxhash.xxh3_64_intdigest(slot.chunk_data(chunk)) for chunk in range(slot.num_chunks)
    )


def hash_ranges(slot: Slot, ranges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """xxh3-64 of each ``(offset, nbytes)``."""
    return tuple(xxhash.xxh3_64_intdigest(slot.data[offset : offset + nbytes]) for offset, nbytes in ranges)
