"""Only what a process has itself counts as left by it."""

import mmap
import os
import socket
import sys
import tempfile

import pytest
from dsx_testkit.leftovers import segments_of, sockets_of, unix_inodes

pytestmark = pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs Linux' shared memory")


def in_memory(directory):
    return tempfile.NamedTemporaryFile(prefix="dsx-test-", dir=directory)


def test_segments_are_those_that_a_process_has_open_or_mapped():
    with in_memory("/dev/shm") as ours, in_memory("/dev/shm") as mapped:
        mapped.write(b"x" * 4096)
        mapped.flush()
        kept = mmap.mmap(mapped.fileno(), 4096)
        os.close(os.dup(mapped.fileno()))
        names = {str(path) for path in segments_of([os.getpid()])}
        assert {ours.name, mapped.name} <= names
        descriptor, name = tempfile.mkstemp(prefix=f"dsx-{os.getpid()}-", dir="/dev/shm")
        os.close(descriptor)  # as another program's: it has our prefix and a number of ours in its name
        assert name not in {str(path) for path in segments_of([os.getpid()])}
        os.unlink(name)
        kept.close()
    assert not {path for path in map(os.fspath, segments_of([os.getpid()])) if path in (ours.name, mapped.name)}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="abstract Unix sockets are Linux'")
def test_sockets_are_those_that_a_process_has_open():
    before = sockets_of([os.getpid()])
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("\0dsx-test-" + os.urandom(8).hex())
        (inode,) = sockets_of([os.getpid()]) - before
        assert inode in unix_inodes()
    assert inode not in unix_inodes()
