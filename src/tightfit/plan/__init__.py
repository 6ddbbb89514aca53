"""Takes a Footprint and what the user wants, returns a Plan; never sees torch, a file or a clock."""
