"""Takes a Footprint and a budget or preset, returns a Plan; never imports torch, reads a file or measures time."""
