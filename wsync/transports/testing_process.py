"""The part of the conformance kit whose peers are processes that get killed, stopped and restarted."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable

from wsync.auth import new_token
from wsync.errors import AuthError, ConnectError, RemoteFault, TransferTimeout
from wsync.transports.base import Read, Transport
from wsync.transports.testing_child import ChildHolder, load, seeded
from wsync.transports.testing_parts import (
    CHUNK,
    NBYTES,
    PATIENT_S,
    PROMPT_S,
    Pair,
    Target,
    eventually,
    expect,
    raises,
)


def needs_process(check: Callable[[ProcessChecks], None]) -> Callable[[ProcessChecks], None]:
    """The check has its peer in another process, or needs a token, which a transport within a process has not."""
    check.needs_process = True  # type: ignore[attr-defined]
    return check


class ProcessChecks:
    """Opens transports of one kind, here and in children, and lets the children come to grief."""

    def __init__(self, factory: str) -> None:
        self.factory = factory
        self._make = load(factory)
        probe = self._make(new_token())
        self.capabilities = probe.capabilities
        probe.close()

    def open(self, stack: contextlib.ExitStack, token: str) -> Transport:
        transport = self._make(token)
        stack.callback(transport.close)
        return transport

    def child(self, stack: contextlib.ExitStack, token: str, *, nbytes: int = NBYTES) -> ChildHolder:
        return stack.enter_context(ChildHolder(self.factory, token, nbytes, CHUNK, seed=1))

    @needs_process
    def check_peer_killed(self) -> None:
        with contextlib.ExitStack() as stack:
            token = new_token()
            reader, child = self.open(stack, token), self.child(stack, token)
            child.ask("offer k")
            child.ask("ready 0 8")
            peer = reader.connect(child.endpoint, peer="child", timeout_s=5.0)
            ops = [
                reader.post_read(peer, [Read("k", 0, memoryview(bytearray(NBYTES)))], timeout_s=60) for _ in range(4)
            ]
            target = Target(seeded(NBYTES, 1)[:CHUNK])
            reader.post_read(peer, [Read("k", 0, target.view)], timeout_s=PATIENT_S).wait(PATIENT_S)
            target.check_right()
            child.signal(signal.SIGKILL)
            for op in ops:
                expect(ConnectError, op, "child", within_s=PROMPT_S)

    @needs_process
    def check_peer_restarts(self) -> None:
        with contextlib.ExitStack() as stack:
            token = new_token()
            reader, old = self.open(stack, token), self.child(stack, token)
            old.ask("offer k")
            old.ask("ready 0 16")
            old_peer = reader.connect(old.endpoint, peer="old", timeout_s=5.0)
            old.close()
            new = self.child(stack, token)
            new.ask("offer k")
            new.ask("ready 0 16")
            new_peer = reader.connect(new.endpoint, peer="new", timeout_s=5.0)
            target = Target(seeded(NBYTES, 1))
            reader.post_read(new_peer, [Read("k", 0, target.view)], timeout_s=PATIENT_S).wait(PATIENT_S)
            target.check_right()
            op = reader.post_read(old_peer, [Read("k", 0, memoryview(bytearray(9)))], timeout_s=PATIENT_S)
            expect(ConnectError, op, "old", within_s=PROMPT_S)
            with raises(ConnectError, "old"):
                reader.connect(old.endpoint, peer="old", timeout_s=5.0)

    @needs_process
    def check_peer_hangs(self) -> None:
        with contextlib.ExitStack() as stack:
            token = new_token()
            reader, child = self.open(stack, token), self.child(stack, token)
            child.ask("offer k")
            child.ask("ready 0 1")
            peer = reader.connect(child.endpoint, peer="child", timeout_s=5.0)
            target = Target(seeded(NBYTES, 1))
            child.stop()
            for _ in range(2):  # the second one finds the connections gone
                reads = [Read("k", 0, target.view)]
                ops = [reader.post_read(peer, reads, timeout_s=0.3) for _ in range(3)]
                for op in ops:
                    expect(TransferTimeout, op, "child", within_s=0.3 + PROMPT_S)
            child.signal(signal.SIGCONT)
            child.ask("ready 0 16")
            target.reset()
            reader.post_read(peer, [Read("k", 0, target.view)], timeout_s=PATIENT_S).wait(PATIENT_S)
            target.check_right()

    @needs_process
    def check_next_version_in_the_same_slot(self) -> None:
        with contextlib.ExitStack() as stack:
            token = new_token()
            reader, child = self.open(stack, token), self.child(stack, token)
            child.ask("offer v1")
            child.ask("ready 0 16")
            peer = reader.connect(child.endpoint, peer="child", timeout_s=5.0)
            for version in range(1, 6):
                target = Target(seeded(NBYTES, version))
                reader.post_read(peer, [Read(f"v{version}", 0, target.view)], timeout_s=PATIENT_S).wait(PATIENT_S)
                target.check_right()
                child.ask(f"replace v{version} {version + 1} v{version + 1}")
                op = reader.post_read(peer, [Read(f"v{version}", 0, target.view)], timeout_s=PATIENT_S)
                expect(RemoteFault, op, "child", within_s=PROMPT_S)

    @needs_process
    def check_withdraw_waits_for_readers(self) -> None:
        """A reader that is stopped while it reads is waited for, named or cut off; then nobody reads any more."""
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack, num_ready=1, nbytes=16 << 20)
            child = self.child(stack, pair.token)
            child.ask(f"read {pair.holder.export().hex()} k {16 << 20} 60")
            pair.check_usable()
            child.stop()
            pair.slot.mark_ready(range(pair.slot.num_chunks))
            complaint = str(child.pid)
            try:
                pair.holder.withdraw("k", 0.3)
                assert not self.capabilities.is_one_sided, "a one-sided reader cannot be cut off while it is stopped"
            except TransferTimeout as exc:
                complaint = str(exc)
            assert str(child.pid) in complaint, f"{complaint!r} does not name pid {child.pid}"
            child.signal(signal.SIGCONT)
            pair.holder.withdraw("k", PATIENT_S)
            pair.slot.begin(2, channel_key=1)
            pair.slot.data[:] = bytes(16 << 20)
            assert child.ask("outcome 1") != "wrong"

    @needs_process
    def check_wrong_token(self) -> None:
        with contextlib.ExitStack() as stack:
            pair = Pair(self._make, stack)
            stranger = self.open(stack, new_token())
            for _ in range(3):
                with raises(AuthError, "holder"):
                    stranger.connect(pair.holder.export(), peer="holder", timeout_s=5.0)
            eventually(lambda: getattr(pair.holder, "refused", 3) == 3, "refusals are counted")
            pair.check_usable()
