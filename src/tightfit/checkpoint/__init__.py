"""Model folders on disk: takes a path, returns what is in it or the loaded pipeline, never runs the folder's code."""
