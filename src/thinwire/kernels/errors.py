"""What a kernel raises when bytes that came from another rank cannot be what they claim to be."""

from thinwire.errors import PayloadError

__all__ = ["PayloadError"]
