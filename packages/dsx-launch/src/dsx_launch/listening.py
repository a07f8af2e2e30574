"""The sockets on which a job listens: bound to the one address that the other ranks use, not to all of this machine's.

torch binds every store to all interfaces. Here the socket is made first and given to torch. A job on one machine is
then not reached from the network at all. Which port is reached from where: `docs/ports.md`.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["ADDRESS_VARIABLE", "listen_at", "store_at"]

ADDRESS_VARIABLE = "DSX_LISTEN_ADDRESS"
"""The address to listen at instead; for a first host that others reach by another address than itself."""
_ANY = ("", "0.0.0.0", "::")


def store_at(address: str, port: int, timeout: timedelta) -> TCPStore:
    """A store that this process serves to those who connect to `address`; empty: to all. `port` 0: any free one.

    Raises:
        OSError: see `listen_at`.
    """
    listening = listen_at(address, port, os.environ)
    port = int(listening.getsockname()[1])
    return TCPStore(
        address or "localhost", port, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True,
        master_listen_fd=listening.detach(),  # the store closes it
    )  # fmt: skip


def listen_at(address: str, port: int, environ: Mapping[str, str]) -> socket.socket:
    """A socket that listens at the interface that has `address`, or at the address that `ADDRESS_VARIABLE` names.

    A name that is an address of none of this machine's interfaces (behind a translation of addresses), or one that only
    this machine takes for itself (Debian gives the host's name 127.0.1.1), or one that has no address yet, does not say
    where the others come in: then it listens at all interfaces.

    Raises:
        OSError: the port is taken, or the variable names an address of another machine.
    """
    chosen = environ.get(ADDRESS_VARIABLE, "")
    if chosen:
        return _bound(chosen, port)
    with contextlib.suppress(socket.gaierror):
        if address not in _ANY and not _is_only_for_itself(address, port):
            try:
                return _bound(address, port)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    return _bound("", port)


def _is_only_for_itself(name: str, port: int) -> bool:
    if name == "localhost" or _is_number(name):
        return False
    return all(ipaddress.ip_address(where[0]).is_loopback for *_, where in _addresses(name, port))


def _is_number(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def _addresses(name: str, port: int) -> list[tuple[int, tuple[str, int]]]:
    """(family, address) of a name, those of IPv4 first: clients try both families."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    told = [(int(family), (str(where[0]), int(where[1]))) for family, _, _, _, where in found]
    return sorted(told, key=lambda one: one[0] != socket.AF_INET)


def _bound(name: str, port: int) -> socket.socket:
    if name in _ANY:
        both = not name and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or name == "::" else socket.AF_INET
        return socket.create_server((name, port), family=family, backlog=1024, dualstack_ipv6=both)
    family, where = _addresses(name, port)[0]
    return socket.create_server(where, family=socket.AddressFamily(family), backlog=1024)
