"""The search: look at the model once, keep what will fit, try what promises most, write down what was found.

1. The first experiment runs the configuration as it is (where it leaves something open: the highest stage, the smallest
   micro-batch). It is measured as the others are, writes facts about the model, and asks the planner about all others.
2. Candidates that cannot fit are left out. Of each group with the same other settings the largest micro-batches stay.
3. A tuner proposes, an experiment answers, until the tuner stops.

Everything is written as it happens, so a search that is killed goes on with the same command.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from dsx_monitor.secrets import command_without_secrets, without_secrets

from ..engine import EngineToPlan, engine_to_plan
from .arguments import config_position, mapped_numbers, with_config, with_mappings
from .documents import leaves, without
from .errors import AutotuningError
from .experiments import Job, Outcome, run_experiment, stopping_cleanly
from .files import CANDIDATES, FACTS, METRICS, PLANS, write_whole
from .journal import ATTEMPTS, Journal, only_tuner
from .plot import svg
from .predictions import Facts, Prediction, fitting, largest_micro_batches, predict, score_of
from .results import UNITS, Result, Row, metric_text, shown_metric
from .space import TRAIN, Candidate, Space, read_space, without_twins
from .tuners import Limits, Measured, Stop, make_tuner

__all__ = ["Autotuner"]

FIRST_TIMEOUT_S = 1800.0
PLANNING_S = 180.0
LEAST_TIMEOUT_S = 120.0


class Autotuner:
    """Searches for the best configuration of a program.

    Args:
        args: the program's arguments.
        job_for: gives the job on the first so many hosts and the first so many devices of each; None: on all.
        engine: whose configurations are searched; None: the installed one (`dsx_plan.engine`).

    Raises:
        AutotuningError: the program names no configuration, or leaves nothing to try.
        DsxConfigError: the configuration is wrong.
    """

    def __init__(
        self,
        args: Sequence[str],
        job_for: Callable[[int | None, int | None], Job],
        engine: EngineToPlan | None = None,
    ) -> None:
        if isinstance(args, str) or not isinstance(args, Sequence):
            raise AutotuningError(
                f"Autotuner(args): got {type(args).__name__}, expected the program's arguments as words; a search is"
                " started by `dsx launch --autotuning tune SCRIPT ...` or `deepspeed --autotuning tune SCRIPT ...`"
            )
        self._engine = engine_to_plan(engine)
        document = self._engine.read(config_position(args)[1])
        self._section = _section_of(document, self._engine)
        job = self._job = job_for(self._section.num_nodes, self._section.num_gpus)
        self._mappings: dict[str, str] = self._section.arg_mappings or {}
        self._ranks = _data_parallel(job.world_size, self._section.mp_size)
        self._results = Path(self._section.results_dir or "autotuning_results").absolute()
        self._experiments = Path(self._section.exps_dir or "autotuning_exps").absolute()
        self._training = without(document, "autotuning")
        given = mapped_numbers(job.args, self._mappings)
        self._space = read_space(
            self._training, self._section, self._engine.value_type, data_parallel=self._ranks, from_arguments=given
        )
        self._candidates, self._refused = self._valid(self._space)
        self.result: Result | None = None

    # - The search

    def tune(self) -> Result:
        """Search, or go on with a search that was ended; the result is also in the results folder.

        Raises:
            AutotuningError: no experiment worked, or the folders belong to something else.
        """
        with ExitStack() as held:
            for folder in dict.fromkeys((self._results, self._experiments)):
                held.enter_context(only_tuner(folder))
            held.enter_context(stopping_cleanly())
            journal = Journal.open(self._results, self._about(), overwrite=self._section.overwrite)
            first, facts, planned = self._first(journal)
            try:
                return self._search(journal, first, facts, planned)
            finally:  # also of a search that is ended from outside
                self.write_optimal_config()

    def describe(self) -> str:
        """The experiments that a search would run, in lines."""
        lines = [
            f"{len(self._candidates)} configurations on {self._job.world_size} ranks, before those that do not fit",
            f"first experiment: {self._space.start.name}",
            *self._refused,
            *(one.name for one in self._candidates),
        ]
        return "".join(f"{line}\n" for line in lines)

    def _search(
        self, journal: Journal, first: Row, facts: Facts, planned: Mapping[Candidate, tuple[int, float]]
    ) -> Result:
        metric = shown_metric(self._section.metric)
        if metric == "FLOPS" and facts.flops_per_sample is None:
            raise AutotuningError(
                "autotuning.metric: got FLOPS, and the operations of this program could not be counted (pipelines); use"
                " throughput or latency"
            )
        predictions = predict(dict.fromkeys((first.candidate, *self._candidates)), first.candidate, facts, planned)
        chosen, left_out = self._promising(predictions, facts)
        predicted = {
            one: score_of(one, prediction.step_seconds, self._ranks, metric) for one, prediction in predictions.items()
        }
        limits = Limits(self._section.tuner_num_trials, self._section.tuner_early_stopping)
        tuner = make_tuner(self._section.tuner_type, chosen, predicted, limits)
        rows = [first]
        self.result = result = Result(metric, tuple(rows), facts, left_out=(*self._refused, *left_out))
        self._job.say(f"{len(chosen)} configurations to choose from; {' '.join(result.left_out)}".rstrip("; "))
        while not isinstance(proposal := tuner.propose([_measured(result, row) for row in rows]), Stop):
            row = self._try(journal, proposal, predictions[proposal], facts)
            rows.append(row)
            self.result = result = Result(metric, tuple(rows), facts, left_out=result.left_out)
            self._report(result, row)
        self.result = result = Result(metric, tuple(rows), facts, proposal.reason, result.left_out)
        self._write(result)
        return result

    def _first(self, journal: Journal) -> tuple[Row, Facts, dict[Candidate, tuple[int, float]]]:
        """The first experiment, with the facts and plans it has left."""
        reasons: list[str] = []
        initialized = False
        for candidate in dict.fromkeys((self._space.start, self._space.safest())):
            name = f"first_{candidate.name}"
            folder = self._experiments / name
            entry = journal.ended(f"first {candidate.key}")
            if entry is None or entry["metrics"] is None:
                self._job.say(f"first experiment, {candidate.name}: looking at the model")
                write_whole(folder / CANDIDATES, json.dumps(without_secrets(self._questions(candidate))))
                for left in (FACTS, PLANS):
                    (folder / left).unlink(missing_ok=True)
                outcome = self._run(journal, f"first {candidate.key}", candidate, name, self._first_timeout())
                found = {one: _read(folder / one) for one in (FACTS, PLANS)}
                journal.add({"event": "ended", "key": f"first {candidate.key}", **outcome.to_json(), **found})
                entry = journal.entries[-1]
            outcome = Outcome.from_json(entry)
            if outcome.metrics is not None and entry[FACTS]:
                facts = Facts.from_json(entry[FACTS])
                self._tell_facts(facts, entry[PLANS] or {})
                plans = (entry[PLANS] or {}).get("plans", {})
                planned = {one: tuple(plans[one.key]) for one in (candidate, *self._candidates) if one.key in plans}
                return Row(name, candidate, outcome, None, first=True), facts, planned
            reasons.append(f"{name}: {outcome.reason}; its output is in {folder}")
            initialized = outcome.initialized
            if not initialized:
                break
        raise AutotuningError(_no_first(reasons, initialized))

    def _try(self, journal: Journal, candidate: Candidate, prediction: Prediction, facts: Facts) -> Row:
        """One experiment, or what the journal says of it."""
        name, entry = candidate.name, journal.ended(candidate.key)
        if entry is None or not (entry["metrics"] or entry["out_of_memory"]):
            timeout = self._section.trial_timeout or _timeout(prediction, facts, self._section.end_profile_step)
            outcome = self._run(journal, candidate.key, candidate, name, timeout, limit=facts.memory_bytes)
            journal.add({"event": "ended", "key": candidate.key, **outcome.to_json()})
        else:
            outcome = Outcome.from_json(entry)
        return Row(name, candidate, outcome, prediction)

    def _run(
        self, journal: Journal, key: str, candidate: Candidate, name: str, timeout: float, limit: int | None = None
    ) -> Outcome:
        if journal.unfinished(key) >= ATTEMPTS:
            return Outcome(None, f"it has ended the tuner itself {ATTEMPTS} times", initialized=True)
        journal.add({"event": "begun", "key": key, "name": name})
        folder = self._experiments / name
        section: dict[str, Any] = {
            "enabled": True,
            "metric": self._section.metric,
            "start_profile_step": self._section.start_profile_step,
            "end_profile_step": self._section.end_profile_step,
            "metric_path": str(folder / METRICS),
            "max_memory_per_gpu": limit or self._section.max_memory_per_gpu,
        }
        if limit is None:
            section |= {"model_info": {"profile": True}, "model_info_path": str(folder / FACTS)}
        document = {**candidate.applied_to(self._training), "autotuning": section}
        try:
            return run_experiment(self._job, folder, document, self._mappings, timeout)
        except (KeyboardInterrupt, SystemExit):
            journal.add({"event": "stopped", "key": key})
            raise

    # - What is asked and what is left out

    def _valid(self, space: Space) -> tuple[tuple[Candidate, ...], tuple[str, ...]]:
        """The candidates whose configuration is right, and sentences about the others.

        Raises:
            DsxConfigError: that of the first experiment is wrong.
        """
        load = partial(self._engine.load, world_size=self._ranks, template=True)
        load(space.start.applied_to(self._training))
        verdicts: dict[Any, str] = {}
        for one in space.candidates():
            if one.group not in verdicts:
                try:
                    load(one.applied_to(self._training))
                    verdicts[one.group] = ""
                except self._engine.config_error as error:
                    verdicts[one.group] = _first_problem(error)
        wrong = {text: sum(text == other for other in verdicts.values()) for text in verdicts.values() if text}
        said = tuple(f"Left out: {count} combinations of settings ({text})." for text, count in wrong.items())
        return tuple(one for one in space.candidates() if not verdicts[one.group]), said

    def _questions(self, first: Candidate) -> list[dict[str, Any]]:
        """Questions for the planner: the first experiment, then each group by ascending micro-batch."""
        order = sorted(self._candidates, key=lambda one: (one.micro, one.steps))
        return [
            {
                "key": one.key,
                "config": one.applied_to(self._training),
                "micro": one.micro,
                "group": json.dumps(one.group),
            }
            for one in dict.fromkeys((first, *order))
        ]

    def _promising(
        self, predictions: Mapping[Candidate, Prediction], facts: Facts
    ) -> tuple[list[Candidate], tuple[str, ...]]:
        """The candidates that may be tried, and sentences about the others."""
        inside = {one: predictions[one] for one in self._candidates}
        fit = fitting(inside, facts)
        distinct = without_twins(fit, facts.num_params)
        kept = list(distinct)
        if not self._space.micro_listed:
            kept = largest_micro_batches(distinct, self._section.num_tuning_micro_batch_sizes)
        sentences = (
            (len(inside) - len(fit), f"would need more than {facts.memory_bytes / 2**20:.0f} MiB a rank"),
            (len(fit) - len(distinct), "differ in buckets larger than the model only"),
            (len(distinct) - len(kept), "have smaller micro-batches than num_tuning_micro_batch_sizes asks for"),
        )
        return kept, tuple(f"Left out: {count} that {why}." for count, why in sentences if count)

    def _about(self) -> dict[str, Any]:
        """The identity of a search, by which its journal is known; results of another search are not used."""
        index, section = config_position(self._job.args)[0], self._section
        return {
            "script": str(Path(self._job.script).absolute()),
            "arguments": command_without_secrets([*self._job.args[:index], *self._job.args[index + 1 :]]),
            "ranks": self._job.world_size,
            "updates": [section.start_profile_step, section.end_profile_step],
            "mp_size": section.mp_size,
            **{f"configuration {path}": value for path, value in leaves(without_secrets(self._training)) if path},
        }

    def _first_timeout(self) -> float:
        return (self._section.trial_timeout or FIRST_TIMEOUT_S) + PLANNING_S

    # - What is written

    def _tell_facts(self, facts: Facts, plans: Mapping[str, Any]) -> None:
        self._job.say(
            f"the model has {facts.num_params} parameters; a rank may use {facts.memory_bytes / 2**20:.0f} MiB, of"
            f" which the first experiment used {facts.peak_bytes / 2**20:.0f} MiB"
        )
        if plans.get("reason"):
            self._job.say(f"the planner: {plans['reason']}; a formula stands in where there is no plan")
        if self._section.model_info_path is not None:
            write_whole(Path(self._section.model_info_path), json.dumps(facts.to_json(), indent=2) + "\n")

    def _report(self, result: Result, row: Row) -> None:
        best, unit = result.best, UNITS[result.metric]
        found = row.outcome.reason or f"{metric_text(result.value(row))} {unit}"
        so_far = "" if best is None else f" (best so far: {best.name}, {metric_text(result.value(best))})"
        self._job.say(f"experiment {len(result.rows)}, {row.name}: {found}{so_far}")
        self._write(result)

    def _write(self, result: Result) -> None:
        write_whole(self._results / "summary.txt", result.text())
        write_whole(self._results / "results.json", json.dumps(result.to_json(), indent=2) + "\n")
        write_whole(self._results / "plot.svg", svg(result))

    def print_tuning_results(self) -> None:
        """Say what was found."""
        if self.result is not None:
            self._job.say(f"results in {self._results}\n{self.result.text()}")

    def write_optimal_config(self) -> None:
        """Write `ds_config_optimal.json`, `cmd_optimal.txt` and, where the section asks for it, the best metrics."""
        best = None if self.result is None else self.result.best
        if best is None or best.outcome.metrics is None:
            return
        document = best.candidate.applied_to(self._training)
        if isinstance(self._training.get(TRAIN), (int, list)):
            document[TRAIN] = best.candidate.micro * best.candidate.steps * self._ranks
        whole = json.dumps(document, indent=2) + "\n"  # with its secrets: it is what is trained with
        write_whole(self._results / "ds_config_optimal.json", whole, private=without_secrets(document) != document)
        write_whole(self._results / "cmd_optimal.txt", self._job.shown(self._best_arguments()) + "\n")
        if self._section.metric_path is not None:
            write_whole(Path(self._section.metric_path), json.dumps(dict(best.outcome.metrics), indent=2) + "\n")

    def _best_arguments(self) -> list[str]:
        path = self._results / "ds_config_optimal.json"
        document = json.loads(path.read_text(encoding="utf-8"))
        return with_config(with_mappings(self._job.args, self._mappings, document), str(path))

    def run_after_tuning(self) -> int:
        """Run the program with the best configuration; its exit code."""
        arguments = self._best_arguments()
        self._job.say(f"running the best configuration: {self._job.shown(arguments)}")
        return self._job.run(arguments)


def _section_of(document: Mapping[str, Any], engine: EngineToPlan) -> Any:
    """The validated section; what it does not say has its defaults.

    Raises:
        AutotuningError: it is switched off, or another section chooses the batch sizes.
        DsxConfigError: it is wrong.
    """
    given = document.get("autotuning") or {}
    if isinstance(given, Mapping):
        if given.get("enabled") is False:
            raise AutotuningError(
                "autotuning.enabled: got false, and --autotuning on the command line; set it to true, or leave the"
                " option out"
            )
        given = {**given, "enabled": True}
    elastic = document.get("elasticity")
    if isinstance(elastic, Mapping) and elastic.get("enabled"):
        raise AutotuningError(
            "elasticity.enabled: got true, and --autotuning on the command line: both choose the batch sizes; tune"
            " without the section, then add it with the micro-batch that was found"
        )
    config = engine.load({"train_micro_batch_size_per_gpu": 1, "autotuning": given}, world_size=1)
    return config.autotuning


def _first_problem(error: Any) -> str:
    problem = error.problems[0]
    return f"{problem.path}: {problem.message}"


def _data_parallel(world_size: int, model_parallel: int) -> int:
    if world_size % model_parallel:
        raise AutotuningError(
            f"autotuning.mp_size: got {model_parallel} for {world_size} ranks, expected a divisor of the ranks"
        )
    return world_size // model_parallel


def _measured(result: Result, row: Row) -> Measured:
    return Measured(row.candidate, result.score(row), row.outcome.out_of_memory)


def _timeout(prediction: Prediction, facts: Facts, updates: int) -> float:
    """Three times what it should take, and a minute."""
    return max(LEAST_TIMEOUT_S, 60.0 + 3 * (facts.startup_seconds + updates * prediction.step_seconds))


def _no_first(reasons: Sequence[str], initialized: bool) -> str:
    advice = (
        "Start the script by itself with the ds_config.json of that folder (without its autotuning section) to see what"
        " is wrong. If it is memory: allow smaller micro-batches, a higher ZeRO stage or offload"
    )
    if not initialized:
        advice = (
            "The script must pass the configuration file of its command line to dsx.initialize, or deepspeed's; its"
            " output says how far it came"
        )
    shown = "\n  ".join(reasons)
    return f"autotuning: the first experiment did not work, so nothing is known about the model:\n  {shown}\n{advice}"


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
