"""Programs as users of PyTorch write them, none of dsx: on the simulated device they must give no report.

`foreign_programs.py OUT [PROGRAM...]`, on one rank or under torchrun; writes {program: [reports]} to OUT + rank.
"""

import itertools
import json
import os
import sys
import tempfile

import dsx_simcuda
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

ONE, TWO = {}, {}
WIDTH = 32


def one(function):
    ONE[function.__name__] = function
    return function


def two(function):
    TWO[function.__name__] = function
    return function


def block():
    return nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), block(), block(), nn.Linear(WIDTH, 4)).cuda()


def batch():
    return torch.randn(4, 6, 8, pin_memory=True).to("cuda", non_blocking=True)


def train(net, optimizer=None, steps=3, scaler=None, clip=True):
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(steps):
        loss = net(batch()).float().square().mean()
        (scaler.scale(loss) if scaler else loss).backward()
        if clip and not scaler:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return loss.item()


# ---------------------------------------------------------------- one rank
@one
def plain_loop():
    train(model())


@one
def autocast_and_scaler():
    net = model()
    with torch.autocast("cuda", dtype=torch.float16):
        train(net, scaler=torch.amp.GradScaler("cuda"))


@one
def data_loader_that_pins():
    data = torch.utils.data.TensorDataset(torch.randn(24, 6, 8), torch.randn(24, 6, 4))
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for x, y in torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True):
        x, y = x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True)
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@one
def prefetcher_on_a_side_stream():
    side = torch.cuda.Stream()
    net = model()

    def load():
        host = torch.randn(4, 6, 8).pin_memory()
        with torch.cuda.stream(side):
            return host.to("cuda", non_blocking=True)

    ahead = load()
    for _ in range(4):
        torch.cuda.current_stream().wait_stream(side)
        now = ahead
        now.record_stream(torch.cuda.current_stream())
        ahead = load()
        net(now).sum().backward()


@one
def activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    net = model()
    x = batch()
    for layer in net:
        x = checkpoint(layer, x, use_reentrant=False)
    x.sum().backward()


@one
def saved_tensors_on_the_host():
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        out = model()(batch())
    out.sum().backward()


@one
def convolutions():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(3)
    )
    net = net.cuda()
    for _ in range(2):
        nn.functional.cross_entropy(
            net(torch.randn(4, 3, 8, 8, device="cuda")), torch.randint(3, (4,)).cuda()
        ).backward()


@one
def generation_with_a_cache():
    weights = torch.randn(WIDTH, WIDTH, device="cuda")
    cache = torch.zeros(16, WIDTH, device="cuda")
    token = torch.randn(WIDTH, device="cuda")
    for step in range(16):
        cache[step] = token @ weights
        token = nn.functional.scaled_dot_product_attention(
            token[None, None], cache[None, : step + 1], cache[None, : step + 1]
        )
        token = token[0, 0]
    token.argmax().item()


@one
def save_and_resume():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    train(net, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, folder + "/x.pt")
        state = torch.load(folder + "/x.pt", map_location="cuda")
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    train(net, optimizer)


@one
def compiled_with_aot_eager():
    net = model()
    train(torch.compile(net, backend="aot_eager"), steps=2)


@one
def two_devices_in_one_model():
    if torch.cuda.device_count() < 2:
        return
    first, second = nn.Linear(8, 8).to("cuda:0"), nn.Linear(8, 8).to("cuda:1")
    for _ in range(3):
        second(first(torch.randn(4, 8, device="cuda:0")).to("cuda:1")).sum().backward()
    first.weight.grad.sum().item()


@one
def data_parallel_over_two_devices():
    net = nn.DataParallel(model()) if torch.cuda.device_count() > 1 else model()
    train(net)


@one
def language_model_of_lstms():
    words = torch.randint(50, (24, 4))
    parts = nn.Embedding(50, WIDTH), nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2), nn.Linear(WIDTH, 50)
    embedding, recurrent, head = (part.cuda() for part in parts)
    parameters = [p for part in parts for p in part.parameters()]
    optimizer, state = torch.optim.SGD(parameters, lr=0.5), None
    for start in range(0, 18, 6):
        inputs, targets = (words[start + i : start + i + 6].cuda(non_blocking=True) for i in (0, 1))
        out, state = recurrent(embedding(inputs), state and tuple(s.detach() for s in state))
        nn.functional.cross_entropy(head(out).flatten(0, 1), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(parameters, 0.25)
        optimizer.step()
        optimizer.zero_grad()


@one
def sequence_prediction_by_cells():
    cells = [nn.LSTMCell(1, 16).cuda(), nn.GRUCell(16, 16).cuda()]
    head, series = nn.Linear(16, 1).cuda(), torch.linspace(0, 6, 12, device="cuda").sin().repeat(3, 1)
    optimizer = torch.optim.LBFGS([p for part in (*cells, head) for p in part.parameters()], lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        first, cell, second = (torch.zeros(3, 16, device="cuda") for _ in range(3))
        losses = []
        for now, following in itertools.pairwise(series.split(1, dim=1)):
            first, cell = cells[0](now, (first, cell))
            second = cells[1](first, second)
            losses.append((head(second) - following).square().mean())
        loss = torch.stack(losses).mean()
        loss.backward()
        return loss

    optimizer.step(closure)


@one
def transformers_trainer():
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    net = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    data = [{"input_ids": torch.randint(64, (16,)), "labels": torch.randint(64, (16,))} for _ in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, max_steps=4, per_device_train_batch_size=2, report_to=[], save_steps=2)
        Trainer(net, arguments, train_dataset=data).train()
        arguments = TrainingArguments(folder, max_steps=4, per_device_train_batch_size=2, report_to=[], bf16=True)
        Trainer(net, arguments, train_dataset=data).train()


@one
def transformers_generate():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    net = LlamaForCausalLM(config).cuda()
    net.generate(torch.randint(64, (2, 4), device="cuda"), max_new_tokens=6, do_sample=True)


@one
def accelerate_loop():
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    data = torch.utils.data.TensorDataset(torch.randn(16, 6, 8))
    net = model()
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
    for (x,) in loader:
        with accelerator.accumulate(net):
            accelerator.backward(net(x).float().square().mean())
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


# ---------------------------------------------------------------- two ranks
def sharded(**options):
    net = model()
    for layer in net:
        fully_shard(layer, **options)
    return fully_shard(net, **options)


@two
def ddp():
    train(DistributedDataParallel(model(), device_ids=[torch.cuda.current_device()]))


@two
def ddp_accumulates_without_sync():
    net = DistributedDataParallel(model(), device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True)
    for step in range(4):
        with net.no_sync() if step % 2 == 0 else torch.enable_grad():
            net(batch()).sum().backward()


@two
def ddp_with_a_bf16_hook_and_static_graph():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    net = DistributedDataParallel(model(), device_ids=[torch.cuda.current_device()], static_graph=True, bucket_cap_mb=1)
    net.register_comm_hook(None, default_hooks.bf16_compress_hook)
    train(net)


@two
def ddp_with_a_sharded_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = DistributedDataParallel(model(), device_ids=[torch.cuda.current_device()])
    train(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-3), clip=False)


@two
def fsdp2():
    train(sharded())


@two
def fsdp2_mixed_precision_keeps_parameters():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train(sharded(mp_policy=policy, reshard_after_forward=False))


@two
def fsdp2_prefetches():
    net = sharded()
    layers = list(net)
    for now, following in itertools.pairwise(layers):
        now.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([now])
    train(net)


@two
def fsdp2_offloads_to_the_host():
    net = sharded(offload_policy=CPUOffloadPolicy(pin_memory=True))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(3):
        net(batch()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@two
def fsdp1():
    train(FullyShardedDataParallel(model(), use_orig_params=True), clip=False)


@two
def tensor_parallel():
    mesh = init_device_mesh("cuda", (2,))
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).cuda()
    net = parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for _ in range(3):
        net(torch.ones(4, 8, device="cuda")).sum().backward()


@two
def sequence_parallel():
    mesh = init_device_mesh("cuda", (2,))
    net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).cuda()
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }
    net = parallelize_module(net, mesh, plan)
    for _ in range(3):
        net(torch.ones(2, 4, 8, device="cuda")).sum().backward()


@two
def fsdp2_recomputes_blocks():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net = model()
    for name, layer in list(net.named_children()):
        net.register_module(name, fully_shard(checkpoint_wrapper(layer)))
    train(fully_shard(net))


@two
def ring_of_sends():
    rank, values = dist.get_rank(), torch.ones(100, device="cuda")
    for _ in range(4):
        received = torch.empty_like(values)
        ops = [dist.P2POp(dist.isend, values, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        values = values + received
    assert values[0].item() == 16


@two
def pipeline_of_torch():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    stage = PipelineStage(nn.Linear(8, 8).cuda(), rank, 2, torch.device("cuda", torch.cuda.current_device()))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    x = torch.randn(8, 8, device="cuda")
    for _ in range(2):
        schedule.step(x) if rank == 0 else schedule.step(target=x, losses=[])


@two
def distributed_checkpoint():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    net = sharded()
    train(net)
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folder)
    dcp.save(get_model_state_dict(net), checkpoint_id=folder[0])
    state = get_model_state_dict(net)
    dcp.load(state, checkpoint_id=folder[0])
    future = dcp.async_save(state, checkpoint_id=folder[0] + "/later")
    train(net)
    future.result()


def main():
    out, chosen = sys.argv[1], sys.argv[2:]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    programs = TWO if ranks > 1 else ONE
    found = {}
    for name in chosen or programs:
        with dsx_simcuda.watch() as seen:
            try:
                programs[name]()
                failed = ""
            except ImportError as error:
                failed = f"skipped: {error}"
            except Exception as error:  # one failure must not hide the others
                failed = f"{type(error).__name__}: {error}"
            torch.cuda.synchronize()
        found[name] = {"failed": failed, "reports": [str(report) for report in seen.reports]}
        with open(out + os.environ.get("RANK", ""), "w") as file:
            json.dump(found, file)
    if ranks > 1:
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
