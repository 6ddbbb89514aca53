"""Takes a Plan and live modules, makes the modules follow the plan, returns how to undo that; never decides."""
