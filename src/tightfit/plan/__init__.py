"""Takes a Footprint and what the user wants, a budget for one, returns a Plan; never sees torch, a file or a clock."""
