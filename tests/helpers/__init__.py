"""What several test files share: small models, small data sets, and child processes."""
