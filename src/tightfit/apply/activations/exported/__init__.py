"""Exported networks: takes a network or a file, returns a graph, a file or a forward; never runs code from the file."""
