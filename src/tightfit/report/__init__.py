"""Takes a Plan and a Trace, returns text, JSON and pictures; never touches a model."""
