"""The shipped recipes (TOML files), and the typed records that every recipe is read into."""
