"""Back ends of dsx for programs that others wrote. Each module imports its program and is imported by name only."""
