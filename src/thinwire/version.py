"""The version, stated once: the build reads it from here."""

__version__ = "0.2.0.dev0"
