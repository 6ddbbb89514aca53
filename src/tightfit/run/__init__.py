"""Takes a loaded pipeline and a request, returns pictures on disk and a Report; never decides how to fit."""
