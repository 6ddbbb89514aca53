"""Takes a model or a loaded pipeline and a request, returns images, plans and reports; never decides how to fit."""
