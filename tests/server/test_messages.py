"""Messages: what is written is read, and whatever else the bytes are is a PayloadError."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import PayloadError
from thinwire.server import messages, quantiser
from thinwire.server.messages import HEADER_BYTES, Kind, Message


def packed(message: Message) -> np.ndarray:
    buffer = np.zeros(messages.capacity(100), np.uint8)
    assert messages.pack_into(message, buffer) == message.length
    return buffer


def test_a_message_is_read_as_it_was_written():
    coded = quantiser.difference(np.random.default_rng(0).normal(size=100), 5, 3)
    for one_way in (False, True):
        sent = Message(Kind.UPDATE, 7, 2**31, coded, one_way)
        got = messages.unpack(packed(sent), "a test")
        assert (got.kind, got.epoch, got.version, got.one_way) == (Kind.UPDATE, 7, 2**31, one_way)
        assert (got.coded.form, got.coded.entries, got.coded.scale) == (5, 100, coded.scale)
        assert np.array_equal(got.coded.payload, coded.payload)


def test_what_was_in_the_buffer_before_does_not_matter():
    buffer = np.full(messages.capacity(100), 255, np.uint8)
    messages.pack_into(Message(Kind.ASK, 3), buffer)
    assert messages.unpack(buffer, "a test").epoch == 3


def test_a_message_of_more_than_was_agreed_is_not_sent():
    with pytest.raises(PayloadError, match="exceeds"):
        messages.pack_into(Message(Kind.ASK, coded=quantiser.raw(np.zeros(10))), np.zeros(60, np.uint8))


@given(st.integers(0, HEADER_BYTES + 39), st.integers(1, 255))
def test_one_changed_byte_is_noticed(position, change):
    bytes_ = packed(Message(Kind.SNAPSHOT, 1, 2, quantiser.raw(np.arange(10.0))))
    bytes_[position] ^= change
    with pytest.raises(PayloadError):
        messages.unpack(bytes_, "a test")


@given(st.binary(max_size=80))
def test_noise_is_refused(noise):
    with pytest.raises(PayloadError):
        messages.unpack(np.frombuffer(noise, np.uint8), "a test")


def test_partial_gradients_are_checked():
    good = messages.partial(0, 1, 2.5, np.arange(4.0), one_way=False)
    loss, gradient = messages.open_partial(good, 4)
    assert loss == 2.5
    assert gradient.tolist() == [0, 1, 2, 3]
    with pytest.raises(PayloadError, match="expected"):
        messages.open_partial(good, 5)
    with pytest.raises(PayloadError, match="finite"):
        messages.open_partial(messages.partial(0, 1, 0.0, np.array([np.nan]), one_way=False), 1)
