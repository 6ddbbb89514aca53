"""Where weights live while a pipeline runs, and in what form. Masters are never written and never copied back."""
