"""The basics that every package uses: errors, files, records, tables, progress, devices, processes."""

__version__ = "0.1.0"
