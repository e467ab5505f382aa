"""The shared secret: proofs hold for what they were made for alone, messages cannot be replayed."""

import logging
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from thinwire.errors import ConfigError, DisagreementError, PayloadError
from thinwire.net import secret as module
from thinwire.net.secret import Handshake, Secret, prove_to_all

TEXT = "correct horse battery staple"
ONE, OTHER = Secret(TEXT), Secret(TEXT + "!")


def joined(server: Secret = ONE, worker: Secret = ONE, contexts=("run", "run")):
    """The two ends after they have exchanged nonces."""
    ends = Handshake(server, 0, contexts[0]), Handshake(worker, 1, contexts[1])
    ends[0].meet(ends[1].nonce)
    ends[1].meet(ends[0].nonce)
    return ends


def test_who_knows_the_secret_can_prove_it():
    server, worker = joined(worker=Secret(TEXT))
    assert server.check(worker.proof())
    assert worker.check(server.proof())


@pytest.mark.parametrize("case", [{"worker": OTHER}, {"contexts": ("run", "another")}], ids=["secret", "run"])
def test_another_secret_or_another_run_proves_nothing(case):
    server, worker = joined(**case)
    assert not server.check(worker.proof())
    assert not worker.check(server.proof())


def test_a_proof_holds_once_and_not_for_its_own_side():
    server, worker = joined()
    assert not worker.check(worker.proof()), "a proof sent back to who made it"
    again, _ = joined()
    assert not again.check(worker.proof()), "a proof of an earlier connection"
    with pytest.raises(PayloadError, match="nonce"):
        server.meet(server.nonce)
    with pytest.raises(PayloadError, match="nonce"):
        server.meet(b"short")


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=5))
def test_sealed_messages_are_accepted_in_their_order(messages):
    (out, back), (answer, into) = (end.seals() for end in joined())
    for message in messages:
        into.check(message, out.tag(message), "a test")
        back.check(message, answer.tag(message), "a test")


def test_changed_repeated_reordered_and_reflected_messages_are_refused():
    def refused(act):
        (out, back), (_, into) = (end.seals() for end in joined())
        with pytest.raises(PayloadError, match="not authentic"):
            act(out, back, into)

    def repeat(out, _, into):
        tag = out.tag(b"first")
        into.check(b"first", tag, "a test")
        into.check(b"first", tag, "a test")

    def skip(out, _, into):
        out.tag(b"first")
        into.check(b"second", out.tag(b"second"), "a test")

    refused(lambda out, _, into: into.check(b"other", out.tag(b"first"), "a test"))
    refused(repeat)
    refused(skip)
    refused(lambda out, back, _: back.check(b"first", out.tag(b"first"), "a test"))
    refused(lambda out, _, into: into.check(b"first", out.tag(b"first")[:-1], "a test"))


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_proofs_of_different_parts_differ(first, second):
    assert (first == second) == ONE.proves(ONE.proof("a", *first), "a", *second)
    assert not ONE.proves(ONE.proof("a", *first), "b", *first)


def test_comparisons_take_equally_long_for_any_answer(monkeypatch):
    asked = []
    compare = module.hmac.compare_digest
    monkeypatch.setattr(module.hmac, "compare_digest", lambda *sides: asked.append(1) or compare(*sides))
    server, worker = joined()
    server.check(worker.proof())
    (out, _), (_, into) = server.seals(), worker.seals()
    into.check(b"m", out.tag(b"m"), "a test")
    assert len(asked) == 2


# --- where the secret comes from ---------------------------------------------------------------------------


def test_the_secret_comes_from_the_argument_then_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv(module.VARIABLE, raising=False)
    monkeypatch.delenv(module.FILE_VARIABLE, raising=False)
    assert Secret.find() is None
    file = tmp_path / "key"
    file.write_text(f"  {TEXT}\n")
    file.chmod(0o600)
    same = lambda found: ONE.proves(found.proof("a"), "a")  # noqa: E731
    assert same(Secret.find(TEXT))
    assert same(Secret.find(file))
    monkeypatch.setenv(module.FILE_VARIABLE, str(file))
    assert same(Secret.find())
    monkeypatch.setenv(module.VARIABLE, TEXT + "!")
    assert not same(Secret.find())
    assert same(Secret.find(TEXT))


def test_a_secret_is_long_and_its_file_readable(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="at least 16 characters"):
        Secret("hunter2")
    monkeypatch.setenv(module.VARIABLE, "")
    with pytest.raises(ConfigError, match="at least 16 characters"):
        Secret.find()
    with pytest.raises(ConfigError, match="cannot be read"):
        Secret.find(tmp_path / "nothing")


def test_a_file_that_others_can_open_is_a_warning(tmp_path, caplog):
    file = tmp_path / "key"
    file.write_text(TEXT)
    file.chmod(0o644)
    with caplog.at_level(logging.WARNING, "thinwire"):
        Secret.of_file(file)
    assert "chmod 600" in caplog.text
    caplog.clear()
    file.chmod(0o600)
    Secret.of_file(file)
    assert not caplog.text


def test_a_secret_does_not_show():
    assert TEXT not in repr(ONE) + str(ONE)
    assert repr(ONE._key) not in repr(ONE)


# --- a group -----------------------------------------------------------------------------------------------


def gathered(members):
    """What each member's `prove_to_all` raised, all meeting in one store."""
    store, size = HashStore(), len(members)
    errors: list[Exception | None] = [None] * size

    def act(rank, secret, content):
        rounds = iter(range(2))

        def gather(own):
            number = next(rounds)
            store.set(f"{number}/{rank}", own)
            return [bytes(store.get(f"{number}/{other}")) for other in range(size)]

        try:
            prove_to_all(secret, rank, content, gather)
        except DisagreementError as error:
            errors[rank] = error

    threads = [threading.Thread(target=act, args=(rank, *member)) for rank, member in enumerate(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return errors


def test_a_group_with_one_secret_agrees():
    assert gathered([(ONE, b"content")] * 3) == [None] * 3


@pytest.mark.parametrize("odd", [(OTHER, b"content"), (ONE, b"another")], ids=["secret", "content"])
def test_a_rank_with_another_secret_or_content_is_found_by_all(odd):
    errors = gathered([(ONE, b"content"), odd, (ONE, b"content")])
    assert "rank 1 could not prove" in str(errors[0])
    assert "rank 1 could not prove" in str(errors[2])
    assert "rank 0, 2 could not prove" in str(errors[1])
    assert all("the secret differs" in str(error) for error in errors)
