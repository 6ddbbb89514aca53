"""Takes a Plan and live modules, changes the modules so that they follow it, returns how to undo; never decides."""
