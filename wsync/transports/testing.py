"""The conformance kit: what every transport has to do, as checks that need no test framework.

    kit = TransportKit("my_package.my_module:make")     # make(token) -> Transport
    for check in kit.checks():
        check()                                         # raises AssertionError, or the error that should not be

`make` is given by name because some checks run a holder in a process of its own, which they kill, stop or restart.
Checks wait with deadlines and never for a fixed time. Each closes all that it opened, also when it fails.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from wsync.auth import new_token
from wsync.errors import ConnectError, RemoteFault, TransferTimeout, TransportError
from wsync.transports.base import Op, Read, Transport
from wsync.transports.inproc import InprocTransport
from wsync.transports.shm import ShmTransport
from wsync.transports.tcp import TcpTransport
from wsync.transports.testing_child import filled_slot, seeded, serve
from wsync.transports.testing_parts import (
    CHUNK,
    NBYTES,
    PATIENT_S,
    PROMPT_S,
    Pair,
    Target,
    eventually,
    expect,
    handles,
    raises,
)
from wsync.transports.testing_process import ProcessChecks

Check = Callable[[], None]


def make_inproc(token: str) -> Transport:
    return InprocTransport()


def make_shm(token: str) -> Transport:
    return ShmTransport(token, host="the-host-of-the-conformance-kit")


def make_tcp(token: str) -> Transport:
    return TcpTransport(token)


class TransportKit(ProcessChecks):
    """All checks, for the transports that `factory` makes."""

    @classmethod
    def names(cls) -> list[str]:
        """The names of all checks; those of known cases begin with `case_`."""
        own = [*vars(cls), *vars(ProcessChecks)]
        return [name for name in own if name.startswith(("check_", "case_"))]

    def applies(self, name: str) -> bool:
        """Whether this transport's capabilities call for the check."""
        return self.capabilities.reach != "process" or not hasattr(getattr(self, name), "needs_process")

    def checks(self) -> Iterator[Check]:
        return (getattr(self, name) for name in self.names() if self.applies(name))

    # --- bytes
    def check_ranges(self) -> None:
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack)
            ranges = [(0, NBYTES), (0, 1), (NBYTES - 1, 1), (CHUNK - 3, 7), (1, CHUNK), (3 * CHUNK, 5 * CHUNK), (77, 0)]
            for offset, nbytes in ranges:
                target = Target(pair.source[offset : offset + nbytes])
                pair.post(target, offset=offset).wait(PATIENT_S)
                target.check_right()

    def check_several_ranges_in_one_read(self) -> None:
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack)
            ranges = [(5 * CHUNK + 11, 3 * CHUNK), (0, 13), (9, 0), (NBYTES - 5, 5), (CHUNK, CHUNK)]
            targets = [Target(pair.source[offset : offset + nbytes]) for offset, nbytes in ranges]
            reads = [Read("k", offset, target.view) for (offset, _), target in zip(ranges, targets, strict=True)]
            pair.reader.post_read(pair.peer, reads, timeout_s=PATIENT_S).wait(PATIENT_S)
            for target in targets:
                target.check_right()
            pair.reader.post_read(pair.peer, [], timeout_s=PATIENT_S).wait(PATIENT_S)

    def check_large_read(self) -> None:
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack, nbytes=(40 << 20) + 12345)
            target = pair.whole()
            pair.post(target).wait(PATIENT_S)
            target.check_right()

    def check_many_reads_at_once(self) -> None:
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack)
            offsets = [chunk * CHUNK for chunk in range(15)] * 8
            targets = [Target(pair.source[offset : offset + CHUNK]) for offset in offsets]
            ops = [pair.post(target, offset=offset) for offset, target in zip(offsets, targets, strict=True)]
            for op, target in zip(ops, targets, strict=True):
                op.wait(PATIENT_S)
                target.check_right()

    # --- waiting
    def check_cut_through(self) -> None:
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack, num_ready=1)
            target = pair.whole()
            op = pair.post(target)
            pair.check_usable()
            assert not op.is_done
            for chunk in reversed(range(1, pair.slot.num_chunks)):
                pair.slot.mark_ready([chunk])
            op.wait(PATIENT_S)
            target.check_right()

    def check_next_version_in_other_chunks(self) -> None:
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack)
            pair.post(pair.whole()).wait(PATIENT_S)
            pair.holder.withdraw("k", PATIENT_S)
            for version, factor in ((2, 3), (3, 1)):
                size, key, source = factor * CHUNK, f"k{version}", seeded(NBYTES, version)
                pair.slot.begin(version, 1, chunk_nbytes=size)
                pair.slot.data[:] = source
                pair.slot.mark_ready([1])
                pair.holder.offer(key, pair.slot, version)
                first, second = Target(source[size - 5 : size]), Target(source[size : 2 * size])
                waiting = pair.post(first, key=key, offset=size - 5)
                pair.post(second, key=key, offset=size).wait(PATIENT_S)
                second.check_right()
                assert not waiting.is_done, "what it reads is in a chunk that is not ready"
                pair.slot.mark_ready(range(pair.slot.num_chunks))
                waiting.wait(PATIENT_S)
                first.check_right()
                pair.holder.withdraw(key, PATIENT_S)

    def check_key_offered_later(self) -> None:
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack)
            target = pair.whole()
            op = pair.post(target, key="later")
            pair.check_usable()
            assert not op.is_done
            pair.holder.offer("later", pair.slot, 1)
            op.wait(PATIENT_S)
            target.check_right()

    def check_stalled_reads_do_not_hold_up_others(self) -> None:
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack, num_ready=1)
            stalled = [(Target(pair.source[-9:]), NBYTES - 9) for _ in range(12)]
            ops = [pair.post(target, offset=offset) for target, offset in stalled]
            pair.check_usable()
            assert not any(op.is_done for op in ops)
            pair.slot.mark_ready(range(pair.slot.num_chunks))
            for op, (target, _) in zip(ops, stalled, strict=True):
                op.wait(PATIENT_S)
                target.check_right()

    def check_deadlines(self) -> None:
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack, num_ready=1)
            later = pair.post(pair.whole())
            for key in ("unknown", "k"):
                op = pair.post(pair.whole(), key=key, timeout_s=0.2)
                expect(TransferTimeout, op, "holder", within_s=0.2 + PROMPT_S)
            pair.slot.mark_ready(range(pair.slot.num_chunks))
            later.wait(PATIENT_S)

    # --- refusals
    def check_withdrawn_key(self) -> None:
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack, num_ready=1)
            pair.check_usable()
            waiting = pair.post(pair.whole())
            pair.holder.withdraw("k", PATIENT_S)
            expect(RemoteFault, waiting, "holder", within_s=PROMPT_S)
            expect(RemoteFault, pair.post(pair.whole()), "holder", within_s=PROMPT_S)
            pair.holder.withdraw("k", PATIENT_S)
            pair.holder.offer("k2", pair.slot, 1)
            target = Target(pair.source[:CHUNK])
            pair.post(target, key="k2").wait(PATIENT_S)
            target.check_right()

    def check_slot_goes_to_another_version(self) -> None:
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack)
            pair.check_usable()
            pair.slot.begin(2, channel_key=1)
            expect(RemoteFault, pair.post(pair.whole()), "holder", within_s=PROMPT_S)

    def check_out_of_bounds(self) -> None:
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack)
            for offset, nbytes in ((NBYTES - 1, 2), (NBYTES, 1), (1 << 62, 8), (0, NBYTES + 1)):
                target = Target(bytes(nbytes))
                expect(RemoteFault, pair.post(target, offset=offset), "holder", within_s=PROMPT_S)
                target.check_untouched()
                pair.check_usable()

    # --- ending early
    def check_cancel_while_waiting(self) -> None:
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack, num_ready=1)
            target = Target(pair.source[CHUNK:])
            op = pair.post(target, offset=CHUNK)
            pair.check_usable()
            pair.reader.cancel(op)
            assert op.is_done
            expect(TransportError, op, "holder", within_s=PROMPT_S)
            target.reset()
            pair.slot.mark_ready(range(pair.slot.num_chunks))
            for _ in range(20):  # long enough for bytes that were asked for before
                pair.check_usable()
            target.check_untouched()
            pair.reader.cancel(op)

    def check_cancel_while_receiving(self) -> None:
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack, nbytes=16 << 20)
            for _ in range(20):
                target = pair.whole()
                op = pair.post(target)
                pair.reader.cancel(op)
                assert op.is_done
                target.reset()
                pair.check_usable()
                target.check_untouched()

    def check_forget(self) -> None:
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack, num_ready=1)
            pair.check_usable()
            op = pair.post(pair.whole())
            pair.reader.forget(pair.peer)
            assert op.is_done
            expect(ConnectError, op, "holder", within_s=PROMPT_S)
            expect(ConnectError, pair.post(pair.whole()), "holder", within_s=PROMPT_S)
            pair.reader.forget(pair.peer)
            pair.peer = pair.connect()
            pair.check_usable()

    def check_holder_closes(self) -> None:
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack, num_ready=1)
            pair.check_usable()
            op = pair.post(pair.whole())
            endpoint = pair.holder.export()
            pair.holder.close()
            expect(TransportError, op, "holder", within_s=PROMPT_S)
            pair.holder.close()
            with raises(ConnectError, "holder"):
                pair.reader.connect(endpoint, peer="holder", timeout_s=5.0)
            pair.reader.close()
            expect(ConnectError, pair.post(pair.whole()), "holder", within_s=PROMPT_S)

    def case_B06_opposite_transfers(self) -> None:
        """Two holders read from each other, in opposite orders, at the same time."""
        with contextlib.ExitStack() as stack:
            token = new_token()
            holders = [self.open(stack, token) for _ in range(2)]
            sources = [seeded(NBYTES, seed) for seed in (1, 2)]
            for holder, seed in zip(holders, (1, 2), strict=True):
                for key in ("first", "second"):
                    slot = filled_slot(NBYTES, CHUNK, seed)
                    stack.callback(slot.close)
                    slot.mark_ready(range(slot.num_chunks))
                    holder.offer(key, slot, 1)
            for _ in range(10):
                targets: list[Target] = []
                ops: list[Op] = []
                for reader, other, keys in ((0, 1, ("first", "second")), (1, 0, ("second", "first"))):
                    peer = holders[reader].connect(holders[other].export(), peer=f"holder {other}", timeout_s=5.0)
                    for key in keys:
                        targets.append(Target(sources[other]))
                        ops.append(
                            holders[reader].post_read(peer, [Read(key, 0, targets[-1].view)], timeout_s=PATIENT_S)
                        )
                for op, target in zip(ops, targets, strict=True):
                    op.wait(PATIENT_S)
                    target.check_right()

    def case_C01_handles_return_to_start(self) -> None:
        """One slot, opened by two readers and let go, 50 times: no descriptor, mapping or thread stays behind."""
        at_start = handles()
        with contextlib.ExitStack() as stack:
            token, source = new_token(), seeded(NBYTES, 1)
            slot = filled_slot(NBYTES, CHUNK, seed=1)
            stack.callback(slot.close)
            slot.mark_ready(range(slot.num_chunks))
            holder, *readers = (self.open(stack, token) for _ in range(3))
            holder.offer("k", slot, 1)
            before = handles()
            for _ in range(50):
                for reader in readers:
                    peer = reader.connect(holder.export(), peer="holder", timeout_s=5.0)
                    stack.callback(reader.forget, peer)
                    target = Target(source)
                    reader.post_read(peer, [Read("k", 0, target.view)], timeout_s=PATIENT_S).wait(PATIENT_S)
                    target.check_right()
                    reader.forget(peer)
                eventually(lambda: handles() == before, lambda: f"{handles()} return to {before}")
        eventually(lambda: handles() == at_start, lambda: f"{handles()} return to {at_start}")


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["serve"]:
        return serve(arguments[1:])
    print("usage: python -m wsync.transports.testing serve FACTORY NBYTES CHUNK_NBYTES SEED", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
