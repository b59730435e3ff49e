"""The sections of a report, in the order in which they answer a reader's questions; one file a question."""
