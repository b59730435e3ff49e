"""Images with questions and answers."""
