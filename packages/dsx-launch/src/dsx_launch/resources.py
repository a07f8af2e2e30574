"""The hosts of a job and their slots: hostfile, filters, and the encoded form that is sent to the hosts.

These are pure functions over plain data: ``{host: (slot, ...)}``, in the order of the hostfile, which is the order of
ranks. A slot is the index of an accelerator on its host, as a string, because device names may be UUIDs. Nothing here
depends on the machine it runs on.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import ResourceError

Slots = tuple[str, ...]
Pool = dict[str, Slots]

MOST_SLOTS = 65_536
"""The most slots of one host. A larger number is a typing error, and a list of so many slots could fill the memory."""

PLAIN_BYTES = 8_192
"""The longest description of a job's hosts that is sent as it is (about 300 hosts with short names)."""

_COMPRESSED = b"x"  # the first byte of zlib's format, with which no JSON begins
_MOST_TEXT = 1 << 26
_LINE = re.compile(r"^(?P<host>[A-Za-z0-9_][A-Za-z0-9_.:-]*)(?:\s+slots\s*=\s*(?P<slots>\S+))?$")


def parse_hostfile(lines: Sequence[str], *, name: str = "hostfile") -> Pool:
    """Parse one ``host slots=N`` per line; ``#`` starts a comment; blank lines are skipped.

    A host without ``slots=`` has one slot. Raises `ResourceError` with the line number for anything else, for a host
    that is listed twice, and for a file without hosts.
    """
    pool: Pool = {}
    first_line: dict[str, int] = {}
    for number, raw in enumerate(lines, start=1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        match = _LINE.match(line)
        if match is None:
            raise ResourceError(f"{name}, line {number}: got {line!r}, expected 'host slots=N'")
        host, slots = match["host"], match["slots"] or "1"
        count = slot_count(slots, option=f"{name}, line {number}: slots of host {host!r}")
        if host in pool:
            raise ResourceError(
                f"{name}, line {number}: host {host!r} is already on line {first_line[host]}; list it once"
            )
        pool[host] = tuple(str(slot) for slot in range(count))
        first_line[host] = number
    if not pool:
        raise ResourceError(f"{name} lists no host; expected at least one line 'host slots=N'")
    return pool


def slot_count(given: str | int, *, option: str) -> int:
    """A number of slots or processes of one host. It is checked before a list of that length is made. Raises
    `ResourceError`.
    """
    text = str(given) if isinstance(given, str) or abs(given) <= MOST_SLOTS else "a larger number"
    # The length is checked first, because Python refuses to read numbers with thousands of digits.
    if not text.isdecimal() or len(text) > len(str(MOST_SLOTS)) or not 1 <= int(text) <= MOST_SLOTS:
        shown = text if len(text) <= 20 else f"{text[:17]}..."
        raise ResourceError(f"{option}: got {shown}, expected a whole number from 1 to {MOST_SLOTS}")
    return int(text)


def read_hostfile(path: str | Path) -> Pool:
    """The hosts in the file at ``path``. Raises `ResourceError` if it cannot be read or parsed."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResourceError(
            f"hostfile {path} cannot be read: {error}; pass an existing file with --hostfile"
        ) from error
    return parse_hostfile(text.splitlines(), name=f"hostfile {path}")


def parse_filter(text: str, *, option: str) -> dict[str, Slots | None]:
    """Parse ``host@host:slot,slot``; returns slots by host, where None means every slot of the host."""
    chosen: dict[str, Slots | None] = {}
    for part in text.split("@"):
        host, colon, listed = part.strip().partition(":")
        if not host:
            raise ResourceError(f"{option} {text!r}: an entry has no host name; expected 'host@host:slot,slot'")
        if host in chosen:
            raise ResourceError(f"{option} {text!r}: host {host!r} is there twice; join its slots as '{host}:0,1'")
        if not colon:
            chosen[host] = None
            continue
        slots = tuple(slot.strip() for slot in listed.split(","))
        if not all(slots):
            raise ResourceError(f"{option} {text!r}: host {host!r} has an empty slot; expected '{host}:0,1'")
        chosen[host] = tuple(dict.fromkeys(slots))  # a slot that is listed twice counts once
    return chosen


def apply_filters(pool: Mapping[str, Slots], *, include: str = "", exclude: str = "") -> Pool:
    """The part of ``pool`` that ``include`` names, or that ``exclude`` leaves. The order stays that of ``pool``.

    Raises `ResourceError` when both are given, when a host or slot is not in the pool, or when nothing is left.
    """
    if include and exclude:
        raise ResourceError("--include and --exclude exclude each other; got both, pass one")
    if not include and not exclude:
        return dict(pool)
    option, text = ("--include", include) if include else ("--exclude", exclude)
    named = parse_filter(text, option=option)
    for host, slots in named.items():
        if host not in pool:
            raise ResourceError(f"{option} names host {host!r}; the hosts are {', '.join(pool)}")
        unknown = [slot for slot in slots or () if slot not in pool[host]]
        if unknown:
            raise ResourceError(f"{option} names slot {unknown[0]} of host {host!r}; it has {','.join(pool[host])}")
    if include:
        kept = {host: _named(slots, named[host]) for host, slots in pool.items() if host in named}
    else:
        kept = {host: _others(slots, named.get(host, ())) for host, slots in pool.items()}
    left = {host: slots for host, slots in kept.items() if slots}
    if not left:
        raise ResourceError(f"{option} {text!r} leaves no slot to run on")
    return left


def _named(slots: Slots, wanted: Slots | None) -> Slots:
    return slots if wanted is None else tuple(slot for slot in slots if slot in wanted)


def _others(slots: Slots, unwanted: Slots | None) -> Slots:
    return () if unwanted is None else tuple(slot for slot in slots if slot not in unwanted)


def limit(pool: Mapping[str, Slots], *, nodes: int | None = None, per_host: int | None = None) -> Pool:
    """The first ``nodes`` hosts and the first ``per_host`` slots of each. Raises `ResourceError` if there are fewer."""
    if nodes is not None and not 1 <= nodes <= len(pool):
        raise ResourceError(
            f"--num_nodes {nodes}: expected between 1 and {len(pool)}, the number of hosts ({', '.join(pool)})"
        )
    hosts = list(pool)[:nodes]
    for host in hosts:
        if per_host is not None and not 1 <= per_host <= len(pool[host]):
            raise ResourceError(
                f"--num_gpus {per_host}: expected between 1 and {len(pool[host])}, the slots of host {host!r}"
            )
    return {host: pool[host][:per_host] for host in hosts}


def with_procs(pool: Mapping[str, Slots], procs: int) -> Pool:
    """``procs`` numbered slots on every host, whatever the hostfile says (processes that own no device)."""
    count = slot_count(procs, option="--num_procs")
    return {host: tuple(str(slot) for slot in range(count)) for host in pool}


def encode_world(pool: Mapping[str, Slots]) -> str:
    """URL-safe base64 of the JSON object ``{host: [slot, ...]}``; numbers stay numbers, device names stay strings. A
    text of more than `PLAIN_BYTES` is compressed before, because Linux allows 131,072 bytes in one argument.
    """
    plain = {host: [int(slot) if slot.isdecimal() else slot for slot in slots] for host, slots in pool.items()}
    text = json.dumps(plain).encode()
    return base64.urlsafe_b64encode(text if len(text) <= PLAIN_BYTES else zlib.compress(text, 9)).decode()


def decode_world(text: str) -> Pool:
    """The inverse of `encode_world`. Raises `ResourceError` for anything that is not such a text."""
    try:
        data = base64.b64decode(text.encode(), altchars=b"-_", validate=True)
        plain = json.loads(_expanded(data) if data.startswith(_COMPRESSED) else data)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ResourceError(f"--world_info is not base64 JSON, compressed or not: {error}") from error
    shaped = isinstance(plain, dict) and all(isinstance(slots, list) and slots for slots in plain.values())
    if not shaped or not plain:
        raise ResourceError(f"--world_info: got {plain!r}, expected an object of host to a list of slots")
    return {host: tuple(str(slot) for slot in slots) for host, slots in plain.items()}


def _expanded(data: bytes) -> bytes:
    reader = zlib.decompressobj()
    text = reader.decompress(data, _MOST_TEXT)
    if not reader.eof:
        raise ValueError(f"the compressed text is cut off, or is longer than {_MOST_TEXT} bytes")
    return text
