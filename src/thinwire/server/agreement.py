"""What server and workers must have in common, compared when a worker joins."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

from thinwire.core import checks
from thinwire.errors import ConfigError
from thinwire.server.options import AsyLPG


@dataclass(frozen=True)
class Agreement:
    """Options, sizes, and how parameters are cut into shards and rows into chunks."""

    options: AsyLPG
    parameters: int
    rows: int
    shards: int
    chunks: int

    def __post_init__(self) -> None:
        checks.whole("asylpg", "shards", self.shards, 1)
        checks.whole("asylpg", "workers", self.chunks, 1)
        if self.shards > self.parameters:
            raise ConfigError(f"asylpg: {self.shards} shards for {self.parameters} parameters are too many")

    def part(self, shard: int) -> tuple[int, int]:
        """The range of parameters that a shard keeps."""
        return self.parameters * shard // self.shards, self.parameters * (shard + 1) // self.shards

    def chunk(self, number: int) -> tuple[int, int]:
        """The range of rows of a chunk."""
        return self.rows * number // self.chunks, self.rows * (number + 1) // self.chunks

    def to_json(self) -> str:
        sizes = {name: getattr(self, name) for name in ("parameters", "rows", "shards", "chunks")}
        return json.dumps(self.options.agreement() | sizes)

    def difference(self, theirs: str) -> str:
        """What is different in a worker's agreement, in words; empty if nothing is."""
        try:
            found = json.loads(theirs)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            return "the worker's greeting cannot be read"
        told, own = cast("dict[str, Any]", found), json.loads(self.to_json())
        for name in sorted(set(told) | set(own)):
            if told.get(name) != own.get(name):
                return (
                    f"the worker has {name}={told.get(name)!r}, the server {own.get(name)!r}: set them alike"
                )
        return ""
