"""A shared secret: who does not know it can neither join nor change what the others send.

`Secret` makes and checks proofs. `Handshake` is mutual challenge and response on one connection; it ends with
two `Seal`s, which authenticate every later message. `prove_to_all` is the same for a whole group. Nothing is
encrypted: messages can still be read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from thinwire import log
from thinwire.errors import ConfigError, DisagreementError, PayloadError

VARIABLE, FILE_VARIABLE = "THINWIRE_SECRET", "THINWIRE_SECRET_FILE"
SHORTEST = 16
NONCE_BYTES = 32
PROOF_BYTES = 32
TAG_BYTES = 16
DIFFERS = "the secret differs"

# Guessing a weak secret from a recorded proof must be slow: about 50 ms and 16 MiB for each guess.
_SALT, _COST, _BLOCK = b"thinwire shared secret 1", 2**14, 8
_LENGTH = struct.Struct("<Q")


class Data(Protocol):
    """Bytes, or an array of them."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class Secret:
    """A key made of the text that all sides share. It is never sent, logged or saved."""

    def __init__(self, text: str | bytes) -> None:
        given = text.encode() if isinstance(text, str) else text
        if len(given) < SHORTEST:
            raise ConfigError(
                f"a secret has at least {SHORTEST} characters, this one has {len(given)}; make one with "
                f"python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        self._key = hashlib.scrypt(given, salt=_SALT, n=_COST, r=_BLOCK, p=1, dklen=32)

    @classmethod
    def of_file(cls, path: str | Path) -> Secret:
        """The secret in a file, without the white space around it."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(2**16).strip()
        except OSError as error:
            raise ConfigError(f"the file of the secret cannot be read: {error}") from None
        if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
            log.warning("other users can open the file of the secret: chmod 600 %s", path)
        return cls(text)

    @classmethod
    def find(cls, given: str | Path | None = None) -> Secret | None:
        """The secret that was given (a `Path` is a file that holds it), or that of the environment, or None.

        The environment has it in THINWIRE_SECRET, or the path of a file in THINWIRE_SECRET_FILE.
        """
        if isinstance(given, Path):
            return cls.of_file(given)
        text = given if given is not None else os.environ.get(VARIABLE)
        if text is not None:
            return cls(text)
        path = os.environ.get(FILE_VARIABLE)
        return None if path is None else cls.of_file(path)

    def proof(self, purpose: str, *parts: Data) -> bytes:
        """Who knows the secret says these parts, in this order, for this purpose."""
        mac = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in (purpose.encode(), *parts):
            view = memoryview(part).cast("B")
            mac.update(_LENGTH.pack(view.nbytes))
            mac.update(view)
        return mac.digest()

    def proves(self, proof: Data, purpose: str, *parts: Data) -> bool:
        """Whether `proof` was made of this secret, purpose and parts; takes equally long for any answer."""
        return hmac.compare_digest(bytes(proof), self.proof(purpose, *parts))


def nonce() -> bytes:
    """Random bytes that are used once."""
    return os.urandom(NONCE_BYTES)


class Seal:
    """Authenticates the messages of one direction of a connection.

    Each message is counted, on both sides, and its count is part of what is authenticated: one that is
    changed, left out, repeated, out of order or sent back to its sender is refused.
    """

    def __init__(self, key: bytes) -> None:
        # Of the two in hashlib, SHA-256 is faster than keyed BLAKE2 on processors with instructions for it.
        self._begin, self._count = hmac.new(key, digestmod=hashlib.sha256), 0

    def tag(self, message: Data) -> bytes:
        """The tag of the next message."""
        mac = self._begin.copy()
        mac.update(_LENGTH.pack(self._count))
        mac.update(message)
        self._count += 1
        return mac.digest()[:TAG_BYTES]

    def check(self, message: Data, tag: Data, source: str) -> None:
        """PayloadError unless `tag` is that of the next message; nothing of it may be used before this."""
        if not hmac.compare_digest(bytes(tag), self.tag(message)):
            raise PayloadError(
                f"a message from {source} is not authentic: it was changed, repeated or sent by a stranger"
            )


class Handshake:
    """Both ends of a connection prove to each other that they know the secret.

    They exchange `nonce`s, then `proof`s: first the side that asks to join, then the other, so a stranger who
    connects gets no proof. Proofs hold for this connection, side and context alone.

    Args:
        side: 0 or 1, one for each end.
        context: what the connection is for, equal on both ends.
    """

    def __init__(self, secret: Secret, side: int, context: str) -> None:
        self._secret, self._side, self._context = secret, side, context.encode()
        self.nonce = nonce()
        self._nonces: tuple[bytes, bytes] | None = None

    def meet(self, theirs: Data) -> None:
        """Take the other end's nonce."""
        other = bytes(theirs)
        if len(other) != NONCE_BYTES or other == self.nonce:
            raise PayloadError("the other end's nonce cannot be used")
        self._nonces = (other, self.nonce) if self._side else (self.nonce, other)

    def proof(self) -> bytes:
        """That this end knows the secret."""
        return self._secret.proof(f"side {self._side}", self._context, *self._both())

    def check(self, proof: Data) -> bool:
        """Whether the other end knows the secret."""
        return self._secret.proves(proof, f"side {1 - self._side}", self._context, *self._both())

    def seals(self) -> tuple[Seal, Seal]:
        """For what this end sends, and for what it receives; after both proofs."""
        keys = [self._secret.proof(f"key of side {side}", self._context, *self._both()) for side in (0, 1)]
        return Seal(keys[self._side]), Seal(keys[1 - self._side])

    def _both(self) -> tuple[bytes, bytes]:
        if self._nonces is None:
            raise AssertionError("nonces come before proofs")
        return self._nonces


Gather = Callable[[bytes], Sequence[bytes]]


def prove_to_all(
    secret: Secret,
    rank: int,
    content: bytes,
    gather: Gather,
    context: str = "session",
    names: Sequence[int] | None = None,
) -> None:
    """Every rank proves to all others that it knows the secret and has the same content.

    Args:
        rank: this rank's place in what `gather` returns.
        content: what the ranks agree on, equal on all.
        gather: gives every rank's bytes, in the order of the ranks; all ranks pass equally many. It is called
            twice, on every rank, whatever comes.
        names: what to call the ranks in an error, if the group has only some of a world's.

    Raises `DisagreementError` naming the ranks whose proof does not hold. A rank with a wrong secret finds
    that no other rank's proof holds; the others find that its proof does not.
    """
    nonces = list(gather(nonce()))
    parts = (context.encode(), content, *nonces)
    proofs = gather(secret.proof(f"rank {rank} of {len(nonces)}", *parts))
    wrong = [
        other
        for other, proof in enumerate(proofs)
        if not secret.proves(proof, f"rank {other} of {len(nonces)}", *parts)
    ]
    if len(proofs) != len(nonces) or wrong:
        called = names or range(len(nonces))
        who = ", ".join(str(called[other]) for other in wrong)
        raise DisagreementError(
            f"{DIFFERS}: rank {who} could not prove to know the secret of rank {called[rank]}; give all "
            f"ranks the same secret ({VARIABLE} or {FILE_VARIABLE})"
        )
