"""Context parallelism: takes a network's program and a process group, returns the same numbers; never splits a row."""
