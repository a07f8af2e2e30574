"""Native code tells a watcher of host memory what it touches; nothing happens where there is none."""

import subprocess
import sys
import types

from dsx_core.host_memory import tell_read, tell_write


def test_a_watcher_hears_of_accesses(monkeypatch):
    heard = []
    watcher = types.ModuleType("dsx_simcuda")
    watcher.host_reads = lambda memory, by: heard.append(("read", memory, by))
    watcher.host_writes = lambda memory, by: heard.append(("write", memory, by))
    monkeypatch.setitem(sys.modules, "dsx_simcuda", watcher)
    memory = object()
    tell_read(memory, "writer")
    tell_write(memory, "reader")
    assert heard == [("read", memory, "writer"), ("write", memory, "reader")]


def test_without_a_watcher_nothing_happens_and_nothing_is_imported():
    code = (
        "import sys; from dsx_core.host_memory import tell_read, tell_write\n"
        "tell_read(object(), 'writer'); tell_write(object(), 'reader')\n"
        "print('dsx_simcuda' in sys.modules, 'torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]
