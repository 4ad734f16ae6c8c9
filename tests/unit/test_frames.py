"""Frames come out as they went in, however the stream is cut; what is no frame is a named error."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsync.engine import protocol
from wsync.engine.protocol import HEADER, MAX_DESCRIPTORS, FrameBuffer, decode_payload, encode_frame
from wsync.errors import ErrorRecord, PeerLost, WsyncError

MESSAGES: list[protocol.Message] = [
    protocol.Done(),
    protocol.PackedTo(3, 99),
    protocol.ReserveSlot(1, "skip", 2.5),
    protocol.RangeHashes((1, 2, (1 << 64) - 1)),
    protocol.Failure(ErrorRecord.of(PeerLost("gone"))),
    protocol.Have("policy", 2, 9, b"\0\1\1"),
]
SENT = st.lists(st.tuples(st.integers(0, 1 << 40), st.booleans(), st.sampled_from(MESSAGES)), max_size=8)


@given(SENT, st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_any_split_gives_the_same_frames(sent: list[tuple[int, bool, protocol.Message]], cuts: list[int]) -> None:
    stream = b"".join(encode_frame(number, message, is_reply=is_reply) for number, is_reply, message in sent)
    buffer, received, at = FrameBuffer(), [], 0
    while at < len(stream):
        nbytes = cuts[at % len(cuts)]
        buffer.feed(stream[at : at + nbytes], [])
        at += nbytes
        while (frame := buffer.take()) is not None:
            assert frame[1] == []
            received.append(decode_payload(frame[0]))
    assert received == sent
    assert buffer.take() is None


def test_descriptors_go_with_their_frame() -> None:
    buffer = FrameBuffer()
    first, second = (encode_frame(i, protocol.Done(), num_descriptors=i) for i in (1, 2))
    buffer.feed(first + second[:3], [7, 8])
    assert buffer.take()[1] == [7]  # type: ignore[index]
    assert buffer.take() is None
    buffer.feed(second[3:], [9, 10])
    assert buffer.take()[1] == [8, 9]  # type: ignore[index]
    assert buffer.drop_descriptors() == [10]
    assert buffer.drop_descriptors() == []


@pytest.mark.parametrize(("nbytes", "descriptors"), [(101, 0), ((1 << 32) - 1, 0), (1, MAX_DESCRIPTORS + 1)])
def test_oversized_frames_are_refused_before_they_are_received(nbytes: int, descriptors: int) -> None:
    buffer = FrameBuffer(max_nbytes=100)
    buffer.feed(HEADER.pack(nbytes, descriptors), [])
    with pytest.raises(WsyncError, match=f"a frame of {nbytes} bytes and {descriptors} descriptors is refused"):
        buffer.take()


def test_an_oversized_message_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_FRAME_NBYTES", 1000)
    with pytest.raises(WsyncError, match=r"a Have message of .* is larger than 1000"):
        encode_frame(1, protocol.Have("c", 1, 9, bytes(2000)))


@given(st.binary(max_size=200))
def test_garbage_is_a_named_error_or_a_message(garbage: bytes) -> None:
    try:
        decoded = decode_payload(garbage)
    except msgspec.DecodeError:
        return
    assert isinstance(decoded[2], protocol.Message)


@pytest.mark.parametrize(
    "body",
    [
        {"type": "NoSuchMessage"},
        {"type": "Beat", "more": 1},
        {"type": "PackedTo", "version": 1},
        {"type": "PackedTo", "version": "1", "nbytes": 1},
        {"type": "ReserveSlot", "step": 1, "on_busy": "maybe", "timeout_s": 1.0},
        {"version": 1},
        7,
        None,
    ],
)
def test_unknown_messages_fields_and_types_are_refused(body: object) -> None:
    payload = msgspec.msgpack.encode([1, False, body])
    with pytest.raises(msgspec.DecodeError):
        decode_payload(payload)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_payload(b"\x93\x01\xc2" + b"\x91" * 100_000)
