"""Where a session plugs in."""

from thinwire.hosts.ddp import attach

__all__ = ["attach"]
