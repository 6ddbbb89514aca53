"""Exported networks: as a value, in a file, at work, compiled. What a file says is never run as code."""
