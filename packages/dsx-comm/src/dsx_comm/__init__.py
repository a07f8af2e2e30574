"""Collectives, topology and traffic accounting for PyTorch.

    import dsx_comm as dist

    dist.init_distributed()                       # torchrun, Slurm, MPI, or just this one process
    dist.all_reduce(gradients, op=dist.ReduceOp.AVG)

The functions have the names and arguments of torch.distributed and work on its process groups.
"""

from . import parallel_groups
from ._version import __version__
from .agreement import check_first_calls
from .arena import SymmetricArena
from .calls import observe
from .coalesced import (
    all_gather_coalesced,
    all_reduce_coalesced,
    has_all_gather_into_tensor,
    has_all_reduce_coalesced,
    has_coalescing_manager,
    has_reduce_scatter_tensor,
)
from .collectives import (
    ReduceOp,
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    allgather_fn,
    inference_all_reduce,
    reduce_scatter,
    reduce_scatter_fn,
    reduce_scatter_tensor,
)
from .compressed import (
    ErrorFeedback,
    Hierarchy,
    QuantizationFeedback,
    compressed_all_reduce,
    compressed_allreduce,
    make_hierarchy,
    quantized_all_gather,
    quantized_reduce_scatter,
)
from .errors import CommError, SymmetricMemoryError
from .exchange import all_to_all, all_to_all_single, barrier, monitored_barrier
from .groups import (
    backend_for,
    destroy_process_group,
    get_all_ranks_from_group,
    get_backend,
    get_global_rank,
    get_group_rank,
    get_local_rank,
    get_rank,
    get_world_group,
    get_world_size,
    initialize_mesh_device,
    is_available,
    is_initialized,
    new_group,
)
from .hang import explain_hangs, unit
from .hybrid import hierarchical_all_gather, hybrid_reduce_scatter
from .init import init_distributed, join_launched_ranks
from .log import (
    configure,
    get_comm_operation_count,
    get_logged_comm_ops,
    has_comm_data,
    reset_log,
)
from .mpu import Mpu, read_mpu
from .objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    merge_objects,
    scatter_object_list,
    together,
)
from .on_demand import host_backend
from .on_demand import register as register_on_demand
from .onebit import OneBitAdam, OneBitLamb, ZeroOneAdam
from .p2p import P2POp, batch_isend_irecv, irecv, isend, recv, send
from .prepared import PreparedCollective, prepare_all_gather, prepare_reduce_scatter
from .rank_set import ParameterMarks, RankSet, RankSets
from .registry import GroupRegistry
from .rehearsal import RehearsalObserver, rehearse
from .rooted import broadcast, gather, reduce, scatter
from .rounds import all_gather_in_rounds, can_gather_in_rounds
from .shm.native import native_status
from .shm.register import register
from .shm.segment import ShmOptions
from .sparse import sparse_allreduce
from .step_lane import StepLane
from .summary import log_summary
from .symmetric import empty, is_symmetric
from .topology import ProcessTopology
from .traffic import count_traffic

register()
register_on_demand()

__all__ = [
    "native_status",
    "ShmOptions",
    "SymmetricMemoryError",
    "CommError",
    "ErrorFeedback",
    "GroupRegistry",
    "Hierarchy",
    "Mpu",
    "OneBitAdam",
    "OneBitLamb",
    "P2POp",
    "ParameterMarks",
    "QuantizationFeedback",
    "ProcessTopology",
    "RankSet",
    "RankSets",
    "ReduceOp",
    "RehearsalObserver",
    "StepLane",
    "SymmetricArena",
    "ZeroOneAdam",
    "__version__",
    "PreparedCollective",
    "all_gather",
    "prepare_all_gather",
    "prepare_reduce_scatter",
    "all_gather_coalesced",
    "all_gather_in_rounds",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "backend_for",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "can_gather_in_rounds",
    "compressed_all_reduce",
    "compressed_allreduce",
    "check_first_calls",
    "configure",
    "count_traffic",
    "destroy_process_group",
    "empty",
    "explain_hangs",
    "gather",
    "gather_object",
    "get_all_ranks_from_group",
    "get_backend",
    "get_comm_operation_count",
    "get_global_rank",
    "get_group_rank",
    "get_local_rank",
    "get_logged_comm_ops",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_comm_data",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "host_backend",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "hierarchical_all_gather",
    "hybrid_reduce_scatter",
    "is_symmetric",
    "isend",
    "join_launched_ranks",
    "log_summary",
    "make_hierarchy",
    "merge_objects",
    "monitored_barrier",
    "new_group",
    "observe",
    "parallel_groups",
    "quantized_all_gather",
    "quantized_reduce_scatter",
    "read_mpu",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "rehearse",
    "reset_log",
    "scatter",
    "scatter_object_list",
    "send",
    "sparse_allreduce",
    "unit",
    "together",
]
