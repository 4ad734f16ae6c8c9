"""The conformance kit, run against each transport. Names of known cases are part of the test's id."""

from __future__ import annotations

import contextlib

import pytest

from wsync.auth import new_token
from wsync.transports.base import Read
from wsync.transports.shm import ShmTransport
from wsync.transports.testing import TransportKit
from wsync.transports.testing_child import filled_slot, seeded
from wsync.transports.testing_parts import CHUNK, NBYTES, PATIENT_S, Target, handles

FACTORIES = {name: f"wsync.transports.testing:make_{name}" for name in ("inproc", "shm", "tcp")}
CHECKS = [
    pytest.param(name, marks=pytest.mark.process if hasattr(getattr(TransportKit, name), "needs_process") else ())
    for name in TransportKit.names()
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("transport", FACTORIES)
def test_conformance(transport: str, check: str) -> None:
    kit = TransportKit(FACTORIES[transport])
    if not kit.applies(check):
        pytest.skip("needs a peer in another process")
    getattr(kit, check)()


def test_shm_maps_are_reused_and_few_stay_idle() -> None:
    with contextlib.ExitStack() as stack:
        token = new_token()
        holder, reader = ShmTransport(token, host="here"), ShmTransport(token, host="here")
        stack.callback(holder.close)
        stack.callback(reader.close)
        peer = reader.connect(holder.export(), peer="holder", timeout_s=5.0)
        slots = [filled_slot(NBYTES, CHUNK, seed) for seed in range(10)]
        for slot in slots:
            stack.callback(slot.close)
            slot.mark_ready(range(slot.num_chunks))
        num_own = handles()[1]
        for turn in range(3):
            for seed, slot in enumerate(slots):
                key, target = f"{turn}/{seed}", Target(seeded(NBYTES, seed))
                holder.offer(key, slot, 1)
                reader.post_read(peer, [Read(key, 0, target.view)], timeout_s=PATIENT_S).wait(PATIENT_S)
                target.check_right()
                assert holder.num_leases == 1
                holder.withdraw(key, PATIENT_S)
                assert holder.num_leases == 0
                assert handles()[1] <= num_own + 5
        reader.forget(peer)
        assert handles()[1] == num_own
