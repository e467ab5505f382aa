"""Every error thinwire raises on purpose. Each message says what is wrong, where, and what to do."""


class ThinwireError(RuntimeError):
    """Base of the errors that concern a running session."""


class ConfigError(ValueError):
    """A method string, option or argument that cannot be used."""


class LabError(ThinwireError):
    """A command of the system that sets up a lab's network failed; the text has its own words."""


class DisagreementError(ThinwireError):
    """The ranks were set up differently, or are at different steps; raised on every rank."""


class PeerError(ThinwireError):
    """A collective failed because a peer died, stalled or left; names the operation and the suspects."""


class PayloadError(ValueError):
    """Bytes from the wire that are not what this rank expects; nothing of them has been used."""


class StateError(ValueError):
    """A checkpoint that does not fit this session; nothing of it has been loaded."""
