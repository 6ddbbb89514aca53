"""Random input for the command line: each in a child of a process that has everything loaded."""
