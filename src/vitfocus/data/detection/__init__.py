"""Images with boxes and instance masks."""
