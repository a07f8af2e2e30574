"""One module per backend. A writer imports its third-party package only when it is built.

A writer has `write(events)`, `flush()` and `close()`, is used by one thread, and may raise any exception: the queue in
front of it (`dsx_monitor.background`) turns a failure into one warning and goes on without that writer.
"""
