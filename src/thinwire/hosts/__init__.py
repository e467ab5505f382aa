"""Where a session plugs in."""

from thinwire.hosts.attach import attach

__all__ = ["attach"]
