"""Before a worker says HELLO: both sides prove that they know the secret, if there is one."""

from __future__ import annotations

from thinwire.errors import DisagreementError, PayloadError
from thinwire.net.secret import DIFFERS, VARIABLE, Handshake, Secret
from thinwire.net.transport import SERVER, WORKER
from thinwire.server.messages import Kind, Message, MessageConnection, with_bytes, with_text

NEEDED = f"the server has a secret: give it to the worker, too (secret= or {VARIABLE})"
NEEDLESS = f"the worker has a secret and the server has none: give both the same (secret= or {VARIABLE})"


class RefusedError(Exception):
    """A worker that may not join, and has been told why."""


def context(name: str, shard: int, shards: int) -> str:
    """What a proof is for: it holds for no other run and no other shard."""
    return f"thinwire parameter server, run {name!r}, shard {shard} of {shards}"


async def admit(connection: MessageConnection, secret: Secret | None, about: str) -> Message:
    """The server's side: the first message of a worker that knows the secret; else `RefusedError`."""
    first = await connection.receive()
    if secret is None:
        if first.kind == Kind.NONCE:
            raise _refuse(connection, NEEDLESS)
        return first
    if first.kind != Kind.NONCE:
        raise _refuse(connection, NEEDED)
    handshake = Handshake(secret, SERVER, about)
    handshake.meet(first.coded.payload.data)
    connection.send(with_bytes(Kind.NONCE, handshake.nonce))
    answer = await connection.receive()
    if answer.kind != Kind.PROOF or not handshake.check(answer.coded.payload.data):
        raise _refuse(connection, f"{DIFFERS} from the server's")
    connection.send(with_bytes(Kind.PROOF, handshake.proof()))
    connection.seal(*handshake.seals())
    return await connection.receive()


async def introduce(connection: MessageConnection, secret: Secret | None, about: str) -> None:
    """The worker's side. `DisagreementError` if the two do not have one secret."""
    if secret is None:
        return
    handshake = Handshake(secret, WORKER, about)
    connection.send(with_bytes(Kind.NONCE, handshake.nonce))
    handshake.meet((await _expect(connection, Kind.NONCE)).coded.payload.data)
    connection.send(with_bytes(Kind.PROOF, handshake.proof()))
    if not handshake.check((await _expect(connection, Kind.PROOF)).coded.payload.data):
        raise DisagreementError(f"may not join: {DIFFERS} from the server's")
    connection.seal(*handshake.seals())


def _refuse(connection: MessageConnection, reason: str) -> RefusedError:
    connection.send(with_text(Kind.REFUSED, reason))
    return RefusedError(reason)


async def _expect(connection: MessageConnection, kind: Kind) -> Message:
    answer = await connection.receive()
    if answer.kind == Kind.REFUSED:
        raise DisagreementError(f"may not join: {answer.text}")
    if answer.kind != kind:
        raise PayloadError(f"the server sent {answer.kind.name} where {kind.name} is due")
    return answer
