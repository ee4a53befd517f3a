"""Other libraries' interfaces, computed by rowmax. Each module is imported by name."""
