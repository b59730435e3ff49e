"""From the study's results to its page and its README; in `sections/`, one question of the reader a file."""
