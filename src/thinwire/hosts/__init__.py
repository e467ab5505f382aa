"""Where a session plugs in."""

from thinwire.hosts.attach import Attached, attach

__all__ = ["Attached", "attach"]
