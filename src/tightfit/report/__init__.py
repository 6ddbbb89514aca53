"""Takes a Plan and a Trace, a Prediction or a Chart, returns text, JSON and figures; never touches a model."""
