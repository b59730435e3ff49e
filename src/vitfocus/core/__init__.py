"""The basics that every room uses: errors, files, tables, progress, devices."""
