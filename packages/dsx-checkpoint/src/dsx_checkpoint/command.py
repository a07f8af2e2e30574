"""`dsx checkpoint`: inspect, verify, compare, import and export checkpoints, without training.

dsx checkpoint inspect ckpt                          what it is; --tensors PATTERN lists tensors, --json for programs
dsx checkpoint verify ckpt                           every byte of the latest checkpoint, or of a node's part
dsx checkpoint diff ckpt other --tag1 a --tag2 b     in what two differ
dsx checkpoint export ckpt weights --dtype bf16      safetensors, one file of torch, or torch.distributed.checkpoint
dsx checkpoint import deepspeed_run ckpt             DeepSpeed, torch.distributed.checkpoint, FSDP, state dicts
dsx checkpoint convert ckpt newer                    an older format version in today's
dsx checkpoint join node0/ckpt node1/ckpt ckpt       one checkpoint from the folders of several nodes
dsx checkpoint prune ckpt --keep-last 3              remove older checkpoints

A folder may be the one that `save_checkpoint` was given, or that of one tag. Exit codes: 0; 1 if a checkpoint is
damaged or missing, or if two differ; 2 for a mistake in the command. `inspect`, `verify`, `diff`, `join` and `prune` do
not load torch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dsx_core import CommandParser, run_program
from dsx_core.progress import Progress

from ._version import __version__
from .errors import CheckpointError

_MAX_LISTED = 50  # differences, unless all are asked for


def main(argv: Sequence[str] | None = None, *, prog: str = "dsx-checkpoint") -> int:
    """Run `dsx checkpoint`. Returns the exit code."""
    return run_program(lambda: _run(argv, prog))


def _run(argv: Sequence[str] | None, prog: str) -> int:
    given = _parser(prog).parse_args(argv)
    try:
        return given.run(given)
    except (CheckpointError, OSError) as error:
        sys.stderr.write(f"{prog} {given.command}: {error}\n")
        return 1


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=prog, description="look at checkpoints, and convert them", version=f"dsx-checkpoint {__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Callable[[Any], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        made.add_argument("folder", help="the folder that save_checkpoint was given")
        made.add_argument("--json", action="store_true", help="print JSON")
        return made

    inspect = command("inspect", _inspect, "say what a checkpoint holds, from its index alone")
    inspect.add_argument("--tensors", nargs="?", const="", metavar="PATTERN", help="list tensors (regular expression)")
    verify = command("verify", _verify, "read every byte of a checkpoint and compare it with what was saved")
    diff = command("diff", _diff, "say in what two checkpoints differ, from their indexes alone")
    diff.add_argument("other", nargs="?", help="the other folder; without it the same one, with --tag2")
    diff.add_argument("--tag1", dest="tag", help="checkpoint in the first folder")
    diff.add_argument("--tag2", help="checkpoint in the second folder")
    diff.add_argument("--all", action="store_true", help=f"show more than {_MAX_LISTED} differences")
    export = command("export", _export, "write the weights for other programs")
    export.add_argument("target", help="a folder that is made; with --to torch a file")
    export.add_argument("--to", choices=("safetensors", "torch", "dcp"), default="safetensors")
    export.add_argument("--dtype", choices=("fp32", "bf16", "fp16", "as-saved"), default="fp32")
    export.add_argument("--only", action="append", default=[], metavar="PATTERN", help="leave out what does not match")
    export.add_argument("--max-shard-size", default="5GB", help="size at which safetensors are split")
    export.add_argument("--optimizer-states", action="store_true", help="with --to dcp: the optimizer states too")
    imports = command("import", _import, "read another program's checkpoint and write one of dsx")
    convert = command("convert", _import, "write a checkpoint of an older format version in today's")
    for made in (imports, convert):
        made.add_argument("target", help="the folder that will hold the new checkpoint")
        made.add_argument("--new-tag", default=None, help="its tag; without it that of the source, or 'imported'")
    join = command("join", _join, "make one checkpoint from the folders of several nodes")
    join.add_argument(
        "others", nargs="+", help="the folders of the other nodes, and last the folder of the new checkpoint"
    )
    prune = command("prune", _prune, "remove older checkpoints; those saved with save_latest=False stay")
    prune.add_argument("--keep-last", type=int, required=True, metavar="N", help="the newest ones that stay")
    prune.add_argument("--keep-every", type=int, metavar="N", help="also those of every so many updates")
    prune.add_argument("--dry-run", action="store_true", help="say what would be removed")
    for made in (inspect, verify, export, imports, convert, join):
        made.add_argument("--tag", help="which checkpoint; without it the one that 'latest' names")
    return parser


def _inspect(given: Any) -> int:
    from .looking import open_index, summary, tags_of, tensor_lines

    root = Path(given.folder)
    folder, index = open_index(root, given.tag)
    if given.tensors is not None:
        lines = list(tensor_lines(index, given.tensors))
        return _answer(given, "".join(f"{line}\n" for line in lines), {"tensors": lines})
    found = summary(folder, index)
    if given.json:
        return _answer(given, "", found)
    sys.stdout.write(_text_of(found))
    if folder.parent == root:
        sys.stdout.write("checkpoints in this folder, the youngest first:\n")
        sys.stdout.writelines(f"  {line}\n" for line in tags_of(root))
    return 0


def _text_of(found: dict[str, Any]) -> str:
    lines = [
        f"{found['checkpoint']}: format version {found['version']}, written by {found['writer'] or 'an early dsx'}",
        f"  {found['parameters']:,} parameters, {found['bytes'] / 1e9:,.3f} GB in {found['files']} files",
    ]
    for family, sizes in found["families"].items():
        if sizes["tensors"]:
            dtypes = ", ".join(f"{name} {size / 1e9:,.3f} GB" for name, size in sizes["dtypes"].items())
            lines.append(f"  {family}: {sizes['tensors']} tensors: {dtypes}")
    if found["optimizer_states"]:
        lines.append(f"  optimizer states: {', '.join(found['optimizer_states'])}")
    for key in ("counters", "layout", "precision", "versions"):
        if key in found:
            lines.append(f"  {key}: " + ", ".join(f"{name} {value}" for name, value in found[key].items()))
    for key, text in (
        ("tied", "tied names"),
        ("excluded", "parameters left out"),
        ("ranks", "ranks with random states"),
    ):
        if found[key]:
            lines.append(f"  {text}: {found[key]}")
    if found["client"]:
        lines.append(f"  client state: {', '.join(found['client'])}")
    return "\n".join(lines) + "\n"


def _verify(given: Any) -> int:
    from .looking import open_index
    from .node_part import read_part
    from .verifying import verify_all, verify_part

    folder, index = open_index(Path(given.folder), given.tag)
    part = read_part(folder)
    if part is not None and not part.covers(index):
        with _bar("verify") as bar:
            done = verify_part(folder, index, part.spans, bar.reach)
        text = (
            f"{folder}: ok, as far as one node can say: {done / 1e6:,.1f} MB of the {part.spans.nbytes / 1e6:,.1f} MB"
            f" that node {part.node} of {part.nodes} has; the rest shares chunks with other nodes\n"
        )
        return _answer(given, text, {"checkpoint": str(folder), "ok": True, "bytes": done, "node": part.node})
    with _bar("verify") as bar:
        verified = verify_all(folder, index, bar.reach)
    size = f"{verified.nbytes / 1e6:,.1f} MB"
    text = f"{verified.folder}: ok, {verified.tensors} tensors in {verified.files} files, {size}\n"
    if verified.foreign:
        text += f"not written by dsx and not looked at: {', '.join(verified.foreign)}\n"
    facts = {"tensors": verified.tensors, "files": verified.files, "bytes": verified.nbytes}
    found = {"checkpoint": str(verified.folder), "ok": True, **facts, "foreign": list(verified.foreign)}
    return _answer(given, text, found)


def _diff(given: Any) -> int:
    from .looking import differences, open_index

    if given.other is None and given.tag2 is None:
        raise CheckpointError("got one checkpoint; pass another folder, or --tag2")
    _, first = open_index(Path(given.folder), given.tag)
    _, second = open_index(Path(given.other or given.folder), given.tag2)
    found = differences(first, second)
    if given.json:
        every = [str(difference) for difference in found]
        _answer(given, "", {"differences": every})
        return 1 if every else 0
    shown = list(found if given.all else itertools.islice(found, _MAX_LISTED))
    sys.stdout.writelines(f"{difference}\n" for difference in shown)
    left = sum(1 for _ in found)
    if left:
        sys.stdout.write(f"and {left} more; --all shows them\n")
    if not shown:
        sys.stdout.write("no difference\n")
    return 1 if shown else 0


def _export(given: Any) -> int:
    from .exporting import export
    from .foreign.recognising import source_of

    with _bar("export") as bar:
        written = export(
            source_of(*_root_and_tag(given)), given.target, to=given.to, dtype=given.dtype, only=given.only,
            max_shard_size=given.max_shard_size, optimizer=given.optimizer_states, progress=bar.reach,
        )  # fmt: skip
    return _answer(given, f"{written}: written\n", {"written": str(written)})


def _import(given: Any) -> int:
    from .foreign.recognising import read_foreign, source_of
    from .foreign.source import write_source

    root, tag = _root_and_tag(given)
    if given.command == "convert":
        from .looking import open_index

        source, tag = source_of(root, tag), open_index(root, tag)[0].name
    else:
        source = read_foreign(root, tag)
    with _bar(given.command) as bar:
        written = write_source(source, given.target, given.new_tag or tag or "imported", progress=bar.reach)
    states = "with optimizer states" if source.states else "weights alone"
    text = f"{written}: {source.kind}, {len(source.parameters)} parameters, {states}\n"
    if source.engine is None:
        text += "it has no training state: load it with load_module_only=True\n"
    facts = {"parameters": len(source.parameters), "optimizer_states": bool(source.states)}
    found = {"written": str(written), "kind": source.kind, **facts, "training_state": source.engine is not None}
    return _answer(given, text, found)


def _join(given: Any) -> int:
    from .nodes.joining import join

    *folders, target = map(Path, (given.folder, *given.others))
    with _bar("join") as bar:
        written = join(folders, target, given.tag, bar.reach)
    return _answer(given, f"{written}: written and verified\n", {"written": str(written), "ok": True})


def _prune(given: Any) -> int:
    from .folder import resolve_tag
    from .keeping import Keeping, removable
    from .saving_lock import saving

    root, keeping = Path(given.folder), Keeping(given.keep_last, given.keep_every)
    newest = resolve_tag(root, None)
    if newest is None:
        raise CheckpointError(f"{root}: has no checkpoints")
    if given.dry_run:
        found = removable(root, keeping, newest)
    else:
        with saving(root, "prune"):
            found = keeping.remove_others(root / newest)
            keeping.wait()
    what = "would be removed" if given.dry_run else "removed"
    text = f"{what}: {', '.join(found) or 'none'}\n"
    return _answer(given, text, {"removed": list(found), "dry_run": bool(given.dry_run)})


def _answer(given: Any, text: str, facts: dict[str, Any]) -> int:
    """Print the text, or with --json the facts. Returns 0."""
    sys.stdout.write(json.dumps(facts, indent=1) + "\n" if given.json else text)
    return 0


def _root_and_tag(given: Any) -> tuple[Path, str | None]:
    """The folder of checkpoints, and the tag if the folder of a tag was given."""
    path = Path(given.folder)
    if given.tag is None and (path / "dsx.json").is_file():
        return path.parent, path.name
    return path, given.tag


def _bar(doing: str) -> Progress:
    """Progress in bytes, if standard error is a terminal."""
    return Progress(0, doing, unit="bytes", shown=sys.stderr.isatty())
