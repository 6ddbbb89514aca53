"""Takes a pipeline or a running call, returns a Footprint or a Trace; never changes anything."""
