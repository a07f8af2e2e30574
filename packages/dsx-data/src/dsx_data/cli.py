"""`dsx-data`: analyse datasets for curricula and token budgets. It also draws difficulties, shows and converts index
files and prints schedules.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dsx_core import CommandParser, run_program
from dsx_core.progress import Progress

from . import sources
from ._version import __version__
from .analysis import DataAnalyzer, SequenceLength, VocabularyCounts, VocabularyRarity, difficulty_picture
from .curriculum import CurriculumScheduler
from .errors import DataArgumentError, DataError
from .index import IndexFile, IndexWriter, MMapIndexedDatasetBuilder, open_index
from .sources import open_dataset

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None, *, prog: str = "dsx-data") -> int:
    """Run the command. Returns its exit status: 0, or 2 after an error, whose text is on standard error."""
    return run_program(lambda: _run_command(arguments, prog))


def _run_command(arguments: Sequence[str] | None, prog: str) -> int:
    options = _parser(prog).parse_args(arguments)
    try:
        options.run(options)
    except (DataError, OSError) as error:
        sys.stderr.write(f"{prog} {options.command}: {error}\n")
        return 2
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=prog,
        description="Analyses datasets for curricula and token budgets.",
        version=f"dsx-data {__version__}",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_analyze(commands)
    picture = commands.add_parser("picture", help="draw the difficulties of a metric as SVG")
    picture.add_argument("index", help="index METRIC_sample_to_metric of an analysis")
    picture.add_argument("-o", "--output", required=True, help="SVG file to write")
    picture.add_argument("--bins", type=int, default=60, help="bars of the histogram")
    picture.add_argument("--json", action="store_true", help="print JSON: the file that was written")
    picture.set_defaults(run=_picture)
    info = commands.add_parser("info", help="print what an index holds")
    info.add_argument("index", help="index file, or prefix of an indexed dataset")
    info.add_argument("--verify", action="store_true", help="read everything and compare the checksums")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.set_defaults(run=_info)
    convert = commands.add_parser("convert", help="write an index in the other format")
    convert.add_argument("source", help="index file, or prefix of an indexed dataset")
    convert.add_argument("target", help="FILE.dsxi to write, or a prefix: then PREFIX.idx and PREFIX.bin")
    convert.add_argument("--json", action="store_true", help="print JSON: the files that were written")
    convert.set_defaults(run=_convert)
    schedule = commands.add_parser("schedule", help="print a difficulty schedule")
    schedule.add_argument("type", choices=("fixed_linear", "fixed_root"))
    schedule.add_argument("--min", type=int, required=True, help="difficulty at the start")
    schedule.add_argument("--max", type=int, required=True, help="difficulty at the end")
    schedule.add_argument("--steps", type=int, required=True, help="steps from one to the other")
    schedule.add_argument("--difficulty-step", type=int, default=8, help="difficulty is a multiple of this")
    schedule.add_argument("--root-degree", type=int, default=2, help="degree of the root (fixed_root)")
    schedule.add_argument("--json", action="store_true", help="print JSON")
    schedule.set_defaults(run=_schedule)
    return parser


def _add_analyze(commands: Any) -> None:
    analyze = commands.add_parser(
        "analyze", help="compute metrics of every sample; after an interruption it continues where it stopped",
        description=sources.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    analyze.add_argument("dataset", help="dataset; see above")
    analyze.add_argument("-o", "--output", required=True, help="folder of the results")
    analyze.add_argument("--metrics", default="seqlen", help="seqlen, vocabularyrarity, or both with a comma")
    analyze.add_argument("--vocabulary-size", type=int, help="number of different tokens (vocabularyrarity)")
    analyze.add_argument("--pad-token-id", type=int, help="a token that does not count")
    analyze.add_argument("--processes", type=int, default=1, help="processes on this machine")
    analyze.add_argument("--workers", type=int, default=1, help="machines that share the work")
    analyze.add_argument("--worker-id", type=int, default=0, help="number of this machine")
    analyze.add_argument("--batch-size", type=int, default=1024, help="samples per call of a metric")
    analyze.add_argument("--format", choices=("dsx", "megatron"), default="dsx", help="format of the results")
    analyze.add_argument("--no-picture", action="store_true", help="draw nothing")
    analyze.add_argument("--quiet", action="store_true", help="no progress bar")
    analyze.add_argument("--json", action="store_true", help="print the summary of each metric as JSON, a line each")
    analyze.set_defaults(run=_analyze)


def _analyze(options: argparse.Namespace) -> None:
    wanted = [name.strip() for name in options.metrics.split(",") if name.strip()]
    unknown = set(wanted) - {"seqlen", "vocabularyrarity"}
    if unknown or not wanted:
        raise DataArgumentError(f"--metrics: got {options.metrics!r}, expected seqlen, vocabularyrarity or both")
    dataset = open_dataset(options.dataset)
    if "seqlen" in wanted:
        _run(options, dataset, "seqlen", SequenceLength(options.pad_token_id), "single_value_per_sample")
    if "vocabularyrarity" in wanted:
        if options.vocabulary_size is None:
            raise DataArgumentError("--vocabulary-size: got nothing, expected the number of different tokens")
        counts = VocabularyCounts(options.vocabulary_size, options.pad_token_id)
        _run(options, dataset, "vocabulary", counts, "accumulate_value_over_samples")
        if options.workers > 1 and not _has_results(options, "vocabulary"):
            sys.stdout.write("counted the vocabulary; run this again when every worker has\n")
            return
        total = open_index(Path(options.output) / "vocabulary" / "vocabulary_metric_value")[0]
        rarity = VocabularyRarity(total, options.pad_token_id)
        _run(options, dataset, "vocabularyrarity", rarity, "single_value_per_sample")
    for name in wanted:
        if _has_results(options, name):
            _report(options, name)


def _run(options: argparse.Namespace, dataset: Any, name: str, function: Any, kind: str) -> None:
    mark = f"{options.dataset} {options.pad_token_id} {options.vocabulary_size} "
    analyzer = DataAnalyzer(
        dataset, num_workers=options.workers, worker_id=options.worker_id, num_threads=options.processes,
        batch_size=options.batch_size, metric_names=[name], metric_functions=[function], metric_types=[kind],
        metric_dtypes=["int64"], save_path=options.output, collate_fn=list, index_format=options.format,
        progress=not options.quiet, fingerprint=mark,
    )  # fmt: skip
    analyzer.run_map()
    missing = [c for c in range(len(analyzer.chunks)) if not analyzer.metrics[0].part(analyzer.save_path, c).is_file()]
    if missing and options.workers > 1:
        sys.stdout.write(f"{name}: {len(missing)} parts of other workers are missing; the last worker merges\n")
        return
    analyzer.run_reduce()


def _has_results(options: argparse.Namespace, name: str) -> bool:
    what = "metric_value" if name == "vocabulary" else "sample_to_metric"
    return any(Path(options.output, name).glob(f"{name}_{what}.*"))


def _report(options: argparse.Namespace, name: str) -> None:
    path = Path(options.output, name, f"{name}_sample_to_metric")
    values = np.asarray(open_index(path).values)
    low, median, high = np.percentile(values, [0, 50, 100])
    text = f"{name}: {values.size} samples, from {low:g} to {high:g}, median {median:g}; {path.parent}"
    if options.json:
        numbers = {"samples": int(values.size), "least": float(low), "median": float(median), "most": float(high)}
        text = json.dumps({"metric": name, **numbers, "folder": str(path.parent)})
    sys.stdout.write(f"{text}\n")
    if not options.no_picture:
        path.with_name(f"{name}.svg").write_text(difficulty_picture(values, title=name))


def _picture(options: argparse.Namespace) -> None:
    values = np.asarray(open_index(options.index).values)
    name = Path(options.index).stem.removesuffix("_sample_to_metric")
    Path(options.output).write_text(difficulty_picture(values, title=name, bins=options.bins))
    _say_written(options, options.output)


def _say_written(options: argparse.Namespace, *files: str) -> None:
    if options.json:
        sys.stdout.write(json.dumps({"written": list(files)}) + "\n")


def _info(options: argparse.Namespace) -> None:
    index = open_index(options.index)
    sizes = index.sizes
    longest = int(sizes.max()) if len(index) else 0
    kind = "index file" if isinstance(index, IndexFile) else "indexed dataset (Megatron)"
    facts = dict(index.facts) if isinstance(index, IndexFile) else {}
    if not options.json:
        values = f"{int(sizes.sum())} values, longest row {longest}"
        sys.stdout.write(f"{kind}: {len(index)} rows of {index.dtype}, {values}\n")
        sys.stdout.write(f"facts: {facts}\n" if facts else "")
    if options.verify:
        if not isinstance(index, IndexFile):
            raise DataArgumentError("--verify: an indexed dataset of Megatron has no checksums; its sizes were checked")
        index.verify()
        sys.stdout.write("" if options.json else "checksums fit\n")
    if options.json:
        found = {"kind": kind, "rows": len(index), "dtype": str(index.dtype), "values": int(sizes.sum())}
        found |= {"longest_row": longest, "facts": facts, "verified": bool(options.verify)}
        sys.stdout.write(json.dumps(found, default=str) + "\n")


def _convert(options: argparse.Namespace) -> None:
    source, own = open_index(options.source), options.target.endswith(".dsxi")
    if own:
        writer: Any = IndexWriter(options.target, source.dtype)
    else:
        writer = MMapIndexedDatasetBuilder(f"{options.target}.bin", source.dtype)
    sizes, step = source.sizes, 65536
    with Progress(len(source), "converting", unit="rows") as bar:
        for first in range(0, len(source), step):
            last = min(len(source), first + step)
            writer.add_rows(source.values[source.start(first) : source.start(last)], sizes[first:last])
            bar.add(last - first)
    if own:
        writer.finish()
        _say_written(options, options.target)
        return
    for document in getattr(source, "doc_idx", np.arange(len(source) + 1))[1:]:
        writer.add_document_end(int(document))
    writer.finalize(f"{options.target}.idx")
    _say_written(options, f"{options.target}.idx", f"{options.target}.bin")


def _schedule(options: argparse.Namespace) -> None:
    numbers = {
        "total_curriculum_step": options.steps,
        "difficulty_step": options.difficulty_step,
        "root_degree": options.root_degree,
    }
    config = {
        "min_difficulty": options.min, "max_difficulty": options.max, "schedule_type": options.type,
        "schedule_config": numbers,
    }  # fmt: skip
    scheduler = CurriculumScheduler(config, name="schedule")
    before, changes = None, {}
    for step in range(1, options.steps + 1):
        now = scheduler.update_difficulty(step)
        if now != before:
            changes[step] = now
        before = now
    lines = "".join(f"step {step}: {now}\n" for step, now in changes.items())
    sys.stdout.write(json.dumps(changes) + "\n" if options.json else lines)
