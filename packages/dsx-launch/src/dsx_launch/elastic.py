"""Elastic jobs on one host: ranks that are started again, with as many hosts as there are at that moment.

torch's elastic agent does the work, with its dynamic rendezvous: hosts register in a store; when enough are there for a
little while, a round begins and the agents start their ranks. When a rank fails, or a host arrives or leaves, the
agents end their ranks and a new round begins. The ranks go on from their newest state (`dsx.elasticity.resume`).

Added here: the times (torch's would take a minute to get over the loss of a host); a failure is counted only where no
new snapshot was made since the one before, so that a long run is not ended by its hundredth loss, but a program that
cannot run is; ranks that were asked to end and have saved (`RESUME_EXIT_CODE`) have not failed; what the ranks and
their agent tell each other (`dsx_launch.notes`); a host that is asked to leave does so at once; the log says where the
time from a loss to the next update went.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from .elastic_settings import JOIN_S, Elastic
from .errors import LaunchError
from .exit_codes import RESUME_EXIT_CODE
from .failures import first_cause, render, shell_code, signal_name
from .host import (
    HostJob,
    JobFolder,
    check_log_dir,
    check_program,
    ignore_signals,
    job_folder,
    quiet_elastic,
    remove_leftovers,
    worker_spec,
)
from .logs import import_torch_quietly
from .processes import adopt_orphans, kill_descendants

if TYPE_CHECKING:
    from .elastic_agent import ElasticHostAgent
    from .elastic_rendezvous import ElasticRendezvous

log = logging.getLogger("dsx.launcher")


def run_elastic_host(job: HostJob, elastic: Elastic) -> int:
    """Run the ranks of this host, round after round, until the job has ended. Returns the exit code: 0; that of the
    rank whose failure ended the job; `RESUME_EXIT_CODE` or 128 + n where this host was asked to leave.

    Raises:
        LaunchError: the hosts cannot meet.
    """
    check_program(job.program)
    check_log_dir(job.log_dir)
    adopt_orphans()
    remove_leftovers()
    with job_folder() as folder:
        import_torch_quietly()
        return _run(job, elastic, folder)


def _run(job: HostJob, elastic: Elastic, folder: JobFolder) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException  # lazy import: torch takes seconds
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousError,
        RendezvousStateError,
        RendezvousTimeoutError,
    )

    from .elastic_agent import ElasticHostAgent
    from .elastic_rendezvous import meet

    quiet_elastic()
    rendezvous = meet(job, elastic)
    spec = worker_spec(job, rendezvous, restarts=elastic.restarts)
    agent = ElasticHostAgent(spec, job, elastic.min_nodes, folder=folder)
    rendezvous.least_time = agent.least_time
    stopped_by: int | None = None
    failed, closes = True, True
    try:
        failed = agent.run_once()
    except SignalException as error:
        stopped_by, closes = int(error.sigval), False
    except KeyboardInterrupt:  # before the ranks were started
        stopped_by, closes = 2, False
    except RendezvousClosedError:
        log.error("%s: the job was ended by another host", job.host)
        return 1
    except RendezvousTimeoutError as error:
        raise LaunchError(
            f"rendezvous: fewer than {elastic.min_nodes} hosts came within {JOIN_S} s; start more, or lower"
            " --min_elastic_nodes; the job goes on from its newest state"
        ) from error
    except RendezvousStateError as error:
        raise LaunchError(f"rendezvous: {error}; see who may reach port {job.master_port} (docs/ports.md)") from error
    except RendezvousError as error:
        raise LaunchError(
            f"rendezvous: the store at {job.master_addr}:{job.master_port} does not answer ({error}); the host that"
            " holds it is lost; start the job again, it goes on from its newest state"
        ) from error
    finally:
        if failed:
            ignore_signals()
            kill_descendants()
        agent.output.close()
        _leave(rendezvous, closes=closes)
    return _conclude(job, agent, stopped_by, failed)


def _leave(rendezvous: ElasticRendezvous, *, closes: bool) -> None:
    """End the rendezvous for all hosts where the job is over, else only this host's part in it."""
    if closes:
        rendezvous.shutdown()
    else:
        rendezvous.leave()


def _conclude(job: HostJob, agent: ElasticHostAgent, stopped_by: int | None, failed: bool) -> int:
    if stopped_by is not None:
        log.info("%s: asked to leave by %s", job.host, signal_name(stopped_by))
        agent.free_memory()
        return RESUME_EXIT_CODE if agent.can_resume else 128 + stopped_by
    if not failed:
        return 0
    failures = agent.failures()
    cause = first_cause(failures)
    if cause is None:
        log.error("the ranks of %s could not be run", job.host)
        return 1
    sys.stdout.flush()
    sys.stderr.write(render(cause, [failure for failure in failures if failure.rank != cause.rank]))
    sys.stderr.flush()
    if agent.memory is not None:
        log.warning("%s: the state of update %s stays in memory, at %s", job.host, agent.progress or "?", agent.memory)
    return shell_code(cause.exitcode)
