"""Step caches: denoisers reuse in some steps what they computed in earlier ones (`tightfit.schema.step_cache`)."""
