"""Memory that another user of the machine offers in the place of rank 0 is not taken."""

import os
import socket
import sys

import pytest
from dsx_comm.shm import segment

NOBODY = 65534
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="abstract Unix sockets are Linux'")


def offer(name_to, stop):
    """Offer memory to the first who asks, as rank 0 does, but to any user."""
    with segment._listening() as (server, name):
        os.write(name_to, name.encode())
        server.settimeout(20)
        peer, _ = server.accept()
        with peer:
            fd = os.memfd_create("stranger")
            try:
                socket.send_fds(peer, [segment._TOKEN], [fd])
            except OSError:  # the other side has gone away: it did not want it
                return
            os.read(stop, 1)


@pytest.mark.parametrize("user", [os.getuid(), NOBODY], ids=["own", "nobody"])
def test_memory_is_taken_from_the_own_user_only(user):
    if user != os.getuid() and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    told, name_to = os.pipe()
    stop, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        try:
            os.setuid(user)
            offer(name_to, stop)
        finally:
            os._exit(0)
    try:
        name = os.read(told, 200).decode()
        if user == os.getuid():
            os.close(segment.fetch(name, 20))
        else:
            with pytest.raises(segment.Unavailable, match=f"another user \\({user}\\)"):
                segment.fetch(name, 20)
    finally:
        for fd in (go, stop, told, name_to):
            os.close(fd)
        os.waitpid(child, 0)
