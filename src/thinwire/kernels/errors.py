"""What a kernel raises when bytes that came from another rank cannot be what they claim to be."""


class PayloadError(ValueError):
    """A received payload has a length, an index or a scale that its header does not allow."""
