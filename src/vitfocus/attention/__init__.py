"""Reading: what attention does in a model, without storing a map that nobody looks at."""
