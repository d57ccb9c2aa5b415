"""From raw rows to model inputs, and from predictions to metrics: one object a task."""
