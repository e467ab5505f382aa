"""`serve`, `work`, and `asylpg`, which does both."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch.distributed as dist

from thinwire import kernels, log
from thinwire.core import checks
from thinwire.errors import ConfigError, DisagreementError, PeerError, ThinwireError
from thinwire.net.meter import Meter
from thinwire.net.secret import DIFFERS, PROOF_BYTES, Secret
from thinwire.net.store import default_store, own_connection
from thinwire.net.transport import run
from thinwire.server import checkpoint as checkpoints
from thinwire.server.connections import ServerConnections, connect_to_servers
from thinwire.server.options import Agreement, AsyLPG
from thinwire.server.problems import Problem, as_problem
from thinwire.server.record import EpochRecord, ProgressLine, RunResult, trace
from thinwire.server.server import Server
from thinwire.server.worker import Worker

NAME = "asylpg"
REJECT_ABOVE = 100.0


def serve(
    problem: Problem,
    options: AsyLPG,
    *,
    workers: int,
    min_workers: int = 1,
    shard: int = 0,
    shards: int = 1,
    store: Any = None,
    name: str = NAME,
    timeout: float = 60.0,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    trace_every: int | None = None,
    secret: str | Path | None = None,
    reject_above: float | None = REJECT_ABOVE,
    progress: bool | None = None,
    on_epoch: Callable[[EpochRecord], None] | None = None,
) -> RunResult:
    """Keep (a shard of) the parameters until all epochs are done.

    Args:
        problem: what is minimised; the server uses its sizes and its initial parameters.
        options: equal on all servers and workers.
        workers: the expected number of workers. The run begins when they have joined, or with at least
            `min_workers` of them after `timeout` seconds; the others may come at any time.
        min_workers: with fewer for `timeout` seconds the run ends, on all sides, with a `PeerError`.
        shard, shards: which part of the parameters this server keeps.
        store: of `torch.distributed`; that of the default group by default.
        name: tells several runs over one store apart.
        timeout: the server gives up a worker that does not answer for so many seconds. A full gradient over
            a worker's part of the rows must take less.
        checkpoint: file for the state, written at every epoch, and every `checkpoint_every` updates.
        resume: continue from that file; `epochs` may be more than before.
        trace_every: the result has a trace, with the bits and the objective every so many updates. The server
            keeps a copy of the parameters for each point, and computes the objectives when the run is over.
        secret: a text that all sides share, or the path of a file that holds it; THINWIRE_SECRET or
            THINWIRE_SECRET_FILE by default. Who does not know it cannot join, and every message is
            authenticated. Nothing is encrypted.
        reject_above: an update is not applied if its norm is more than so many times the running median;
            None: all are applied.
        progress: a line on the terminal; by default on shard 0, if there is a terminal.
        on_epoch: called with the record of every snapshot.
    """
    checks.positive("asylpg", "timeout", timeout)
    if checkpoint_every is not None:
        checks.whole("asylpg", "checkpoint_every", checkpoint_every, 1)
    if reject_above is not None and not reject_above > 1:
        raise ConfigError(f"asylpg: reject_above must be above 1, or None, not {reject_above!r}")
    found = Secret.find(secret)
    if trace_every is not None:
        checks.whole("asylpg", "trace_every", trace_every, 1)
        if shards > 1:
            raise ConfigError("asylpg: trace_every needs shards=1: the objective is one of all parameters")
    if checkpoint is None and (resume or checkpoint_every is not None):
        raise ConfigError("asylpg: resume and checkpoint_every need checkpoint=FILE")
    if checkpoint is not None:
        checkpoints.require()
    agreement = Agreement(options, problem.size, problem.rows, shards, workers)
    if not 0 <= shard < shards:
        raise ConfigError(f"asylpg: shard must be from 0 to {shards - 1}, not {shard}")
    begin, end = agreement.part(shard)
    file = None if checkpoint is None else checkpoints.path_of(checkpoint, shard, shards)
    kernels.prepare(None, problem.kernels)
    server = Server(
        agreement,
        shard,
        problem.start()[begin:end],
        workers=workers,
        min_workers=min_workers,
        on_epoch=on_epoch,
        on_save=None if file is None else (lambda server: checkpoints.save(server, file)),
        save_every=checkpoint_every,
        trace_every=trace_every,
        reject_above=math.inf if reject_above is None else reject_above,
    )
    if resume and file is not None:
        checkpoints.load(server, file)
        log.info("shard %d continues at epoch %d, update %d", shard, server.state.epoch, server.state.version)
    shown = (shard == 0 and sys.stderr.isatty()) if progress is None else progress
    line = ProgressLine(server) if shown else None
    try:
        connections = ServerConnections(server, _store(store), name, timeout, found)
        result = connections.run(line.tick if line else None)
    finally:
        if line is not None:
            line.close()
    if trace_every is not None:
        result.trace = trace(server.points, result.history, lambda x: _objective(problem, options, x))
    return result


def work(
    problem: Problem,
    options: AsyLPG,
    *,
    index: int,
    workers: int,
    shards: int = 1,
    store: Any = None,
    name: str = NAME,
    timeout: float = 60.0,
    secret: str | Path | None = None,
) -> RunResult:
    """Compute gradient differences for the servers until the run ends; may join late, or again.

    Args:
        index: this worker's number, from 0 to workers - 1; one that comes back takes its old number.
        workers: how many are expected, as for `serve`.

    The others are those of `serve`. Returns the final parameters, which the problem takes over, too.
    """
    checks.positive("asylpg", "timeout", timeout)
    checks.whole("asylpg", "index", index, 0)
    agreement = Agreement(options, problem.size, problem.rows, shards, workers)
    if index >= workers:
        raise ConfigError(
            f"asylpg: index must be from 0 to {workers - 1} with {workers} workers, not {index}"
        )
    found = Secret.find(secret)
    kernels.prepare(None, problem.kernels)
    given = _store(store)
    life = int(own_connection(given).add(f"thinwire/{name}/lives/{index}", 1))
    worker, meter = Worker(problem, agreement, index, life), Meter()
    try:
        servers = connect_to_servers(agreement, given, name, timeout, meter, found)
        parameters = run(worker.run(servers))
    except PeerError as error:
        raise PeerError(
            f"worker {index} {error}. If a server ended, start it again from its checkpoint, then the workers"
        ) from error
    except DisagreementError as error:
        raise DisagreementError(f"worker {index} {error}") from error
    problem.finish(parameters)
    return RunResult(parameters, updates=worker.updates, meter=meter)


def asylpg(
    model: object,
    loss: Callable[..., Any] | None = None,
    dataset: Any = None,
    *,
    shards: int = 1,
    min_workers: int = 1,
    store: Any = None,
    name: str = NAME,
    timeout: float = 60.0,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    trace_every: int | None = None,
    secret: str | Path | None = None,
    reject_above: float | None = REJECT_ABOVE,
    progress: bool | None = None,
    on_epoch: Callable[[EpochRecord], None] | None = None,
    **options: Any,
) -> RunResult:
    """Train by asynchronous double quantisation: called on every rank of an initialised process group.

    The first `shards` ranks serve, the others work. At the end every rank's model has the final parameters.

    Args:
        model: an `nn.Module`, or a `LinearProblem`.
        loss: for a module: a function of (module, batch) that gives the batch's mean loss.
        dataset: for a module: its rows, the same on every rank; see `ModuleProblem`.
        shards: how many ranks serve, each a part of the parameters.
        options: those of `AsyLPG`; the rest are those of `serve`.

    Example (torchrun --nproc-per-node 5 train.py):

        def loss(model, batch):
            return cross_entropy(model(batch[0]), batch[1])

        asylpg(model, loss, (images, labels), mode="centered", lr=0.1, epoch_length=500)
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ThinwireError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group first "
            "(torchrun sets the environment it needs), or use thinwire.server.serve and work with a store"
        )
    try:
        asked = AsyLPG(**options)
    except TypeError as error:
        raise ConfigError(f"asylpg: {error}") from None
    rank, workers = dist.get_rank(), dist.get_world_size() - shards
    if shards < 1 or workers < 1:
        raise ConfigError(
            f"asylpg: {dist.get_world_size()} ranks are too few for {shards} shards and one worker at least"
        )
    if checkpoint is not None:
        checkpoints.require()
    problem = as_problem(model, loss, dataset)
    common = {"workers": workers, "shards": shards, "store": store, "name": name, "timeout": timeout}
    common |= {"secret": secret}
    if rank >= shards:
        return work(problem, asked, index=rank - shards, **cast(Any, common))
    result = serve(
        problem,
        asked,
        shard=rank,
        min_workers=min_workers,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        resume=resume,
        trace_every=trace_every,
        reject_above=reject_above,
        progress=progress,
        on_epoch=on_epoch,
        **cast(Any, common),
    )
    if shards > 1:
        result.parameters = _join_shards(
            _store(store), name, result.parameters, rank, shards, timeout, Secret.find(secret)
        )
    problem.finish(result.parameters)
    return result


def _objective(problem: Problem, options: AsyLPG, x: Any) -> float:
    return problem.total(x, 0, problem.rows)[0] / problem.rows + options.penalty(x)


def _join_shards(
    store: Any, name: str, part: Any, shard: int, shards: int, timeout: float, secret: Secret | None
) -> Any:
    """All servers' parts, through the store: once a run, and no group of theirs is needed."""
    number = store.add(f"thinwire/{name}/{shard}/ends", 1)
    keys = [f"thinwire/{name}/{other}/end/{number}" for other in range(shards)]
    own = part.astype(np.float32).tobytes()
    store.set(keys[shard], (secret.proof(keys[shard], own) if secret is not None else b"") + own)
    store.wait(keys, timedelta(seconds=timeout))
    parts: list[Any] = []
    for key in keys:
        data = bytes(store.get(key))
        if secret is not None:
            proof, data = data[:PROOF_BYTES], data[PROOF_BYTES:]
            if not secret.proves(proof, key, data):
                raise DisagreementError(f"the final parameters at {key} are not authentic: {DIFFERS}")
        parts.append(np.frombuffer(data, np.float32))
    return np.concatenate(parts).astype(part.dtype)


def _store(store: Any) -> Any:
    if store is not None:
        return store
    if not dist.is_available() or not dist.is_initialized():
        raise ThinwireError("give a store, or call torch.distributed.init_process_group first")
    return default_store()
