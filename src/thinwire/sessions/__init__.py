"""Sessions: facades over an engine that users hold."""
