"""Writes checkpoints in DeepSpeed's layouts, from an engine of dsx that has trained, for the tests of imports."""

import dataclasses
from collections import OrderedDict

import torch

RANKS = 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)
        self.frozen = torch.nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.tied = torch.nn.Linear(7, 5, bias=False)
        self.tied.weight = self.a.weight
        self.register_buffer("table", torch.arange(4))

    def forward(self, x):
        return self.frozen(self.b(torch.tanh(self.a(x) + self.tied(x))))


def build(seed=0, **changes):
    import dsx

    torch.manual_seed(seed)
    model = Model()
    config = {
        "train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.02}}, "steps_per_print": None,
        **changes,
    }  # fmt: skip
    trained = [p for p in model.parameters() if p.requires_grad]
    return dsx.initialize(model=model, model_parameters=trained, config=config)[0]


def train(engine, first, steps):
    losses = []
    dtype = next(engine.module.parameters()).dtype
    for step in range(first, first + steps):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# - DeepSpeed's layout


@dataclasses.dataclass
class fragment_address:  # as it is called there
    numel: int
    start: int


class LossScaler:
    def __init__(self, **state):
        vars(self).update(state)


class ZeroStageEnum(int):
    """Pickled as its class and value, as an enumeration is."""

    def __reduce__(self):
        return ZeroStageEnum, (int(self),)


def pieces(rows, ranks):
    """A row cut into equal pieces, padded with zeros."""
    each = -(-rows.numel() // ranks)
    return list(torch.nn.functional.pad(rows, (0, each * ranks - rows.numel())).split(each))


def head_of(engine, stage, tag_extra):
    parts = {p.name: p for p in engine.optimizer.slices(held=True)}
    trained = OrderedDict((n, torch.Size(p.shape)) for n, p in parts.items() if p.trainable)
    frozen = OrderedDict((n, torch.Size(p.shape)) for n, p in parts.items() if not p.trainable)
    module = {n: v.clone() for n, v in engine.module.state_dict().items()}
    if stage == 3:
        module = {n: v if n == "table" else torch.empty(0, dtype=v.dtype) for n, v in module.items()}
    low = next(engine.module.parameters()).dtype
    return parts, {
        "module": OrderedDict(module), "buffer_names": ["table"], "optimizer": None,
        "param_shapes": [trained] if stage else None, "frozen_param_shapes": frozen,
        "frozen_param_fragments": None, "shared_params": {"tied.weight": "a.weight"}, "lr_scheduler": None,
        "skipped_steps": 0, "global_steps": engine.global_steps, "global_samples": engine.global_samples,
        "dp_world_size": RANKS, "mp_world_size": 1, "ds_version": "0.19.8",
        "ds_config": {"bf16": {"enabled": low == torch.bfloat16}, "gradient_accumulation_steps": 1},
        **tag_extra,
    }  # fmt: skip


def group_of(engine):
    return [{"lr": engine.get_lr()[0], "betas": (0.9, 0.999), "weight_decay": 0.0, "params": [0]}]


def write_stage12(engine, root, stage, mapping=True, extra=None):
    folder = root / "global_step3"
    folder.mkdir(parents=True)
    parts, head = head_of(engine, stage, extra or {})
    torch.save(head, folder / "mp_rank_00_model_states.pt")
    names = [n for n, p in parts.items() if p.trainable]
    rows = {key: torch.cat([value(parts[n]).reshape(-1) for n in names]) for key, value in VALUES.items()}
    cut = {key: pieces(row, RANKS) for key, row in rows.items()}
    where = [fragments(parts, names, cut["fp32"][0].numel(), rank) for rank in range(RANKS)]
    for rank in range(RANKS):
        state = {k: cut[k][rank].clone() for k in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(3.0)}
        saved = {
            "loss_scaler": LossScaler(cur_scale=1), "overflow": False, "clip_grad": 1.0,
            "base_optimizer_state": {"state": {0: state}, "param_groups": group_of(engine)},
            "single_partition_of_fp32_groups": [cut["fp32"][rank].clone()], "zero_stage": ZeroStageEnum(stage),
            "group_paddings": [0], "partition_count": [RANKS], "ds_version": "0.19.8",
        }  # fmt: skip
        if mapping:
            saved["param_slice_mappings"] = [where[rank]]
        torch.save({"optimizer_state_dict": saved}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (root / "latest").write_text("global_step3")
    return root


VALUES = {
    "fp32": lambda p: p.master, "exp_avg": lambda p: p.states["exp_avg"], "exp_avg_sq": lambda p: p.states["exp_avg_sq"]
}  # fmt: skip


def fragments(parts, names, each, rank):
    """Where the parameters lie in one rank's piece."""
    found, at = OrderedDict(), 0
    for name in names:
        numel = torch.Size(parts[name].shape).numel()
        first, last = max(at, rank * each), min(at + numel, (rank + 1) * each)
        if first < last:
            found[name] = fragment_address(last - first, first - rank * each)
        at += numel
    return found


def write_stage3(engine, root, groups=2):
    folder = root / "global_step3"
    folder.mkdir(parents=True)
    parts, head = head_of(engine, 3, {})
    names = [n for n, p in parts.items() if p.trainable]
    for rank in range(RANKS):
        mine = {n: pieces(parts[n].param.reshape(-1), RANKS)[rank].clone() for n, p in parts.items() if not p.trainable}
        torch.save({**head, "frozen_param_fragments": mine}, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        chunks = [names[: len(names) // groups], names[len(names) // groups :]]
        rows = [
            {k: torch.cat([pieces(v(parts[n]).reshape(-1), RANKS)[rank] for n in chunk]) for k, v in VALUES.items()}
            for chunk in chunks
        ]
        state = {
            i: {"exp_avg": row["exp_avg"], "exp_avg_sq": row["exp_avg_sq"], "step": torch.tensor(3.0)}
            for i, row in enumerate(rows)
        }
        saved = {
            "zero_stage": ZeroStageEnum(3), "loss_scaler": LossScaler(cur_scale=1), "partition_count": RANKS,
            "optimizer_state_dict": {"state": state, "param_groups": group_of(engine)},
            "fp32_flat_groups": [torch.nn.Parameter(row["fp32"]) for row in rows],
        }  # fmt: skip
        torch.save({"optimizer_state_dict": saved}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (root / "latest").write_text("global_step3")
    return root


def write_universal(engine, root):
    folder = root / "global_step3_universal"
    folder.mkdir(parents=True)
    parts, head = head_of(engine, 1, {})
    torch.save(head, folder / "mp_rank_00_model_states.pt")
    for name, part in parts.items():
        if part.trainable:
            (folder / "zero" / name).mkdir(parents=True)
            for key, value in VALUES.items():
                torch.save({"param": value(part).reshape(part.shape).clone()}, folder / "zero" / name / f"{key}.pt")
            torch.save(torch.tensor(3.0), folder / "zero" / name / "step.pt")
    torch.save({"param_groups": group_of(engine), "loss_scaler": LossScaler()}, folder / "zero" / "optimizer_state.pt")
    (root / "latest_universal").write_text("global_step3_universal")
    return root


def write_plain(engine, root, fused=False):
    """Stage 0: the state dict of torch's optimizer; in 16 bits with masters beside it, one by one or in one row."""
    folder = root / "global_step3"
    folder.mkdir(parents=True)
    parts, head = head_of(engine, 0, {})
    head |= {"module": engine.module.state_dict(), "shared_params": None}
    trained = [p for p in parts.values() if p.trainable]
    states = [
        {**{k: p.states[k].reshape(p.shape).clone() for k in ("exp_avg", "exp_avg_sq")}, "step": torch.tensor(3.0)}
        for p in trained
    ]
    group = {**group_of(engine)[0], "params": list(range(len(trained)))}
    head["optimizer"] = {"state": dict(enumerate(states)), "param_groups": [group]}
    if trained[0].param.dtype == torch.bfloat16:
        masters = [p.master.reshape(p.shape).clone() for p in trained]
        scale = {"dynamic_loss_scale": False, "cur_scale": 1, "cur_iter": 3}
        if fused:
            row = {k: torch.cat([s[k].reshape(-1) for s in states]) for k in ("exp_avg", "exp_avg_sq")} | {"step": 3}
            inner = {"state": {0: row}, "param_groups": [{**group, "params": [0]}]}
            flat = torch.cat([m.reshape(-1) for m in masters])
            head["optimizer"] = {**scale, "optimizer_state_dict": inner, "fp32_groups_flat": [flat], "clip_grad": 0.0}
        else:
            head["optimizer"] = {**scale, "optimizer_state_dict": head["optimizer"], "fp32_groups": [masters]}
    torch.save(head, folder / "mp_rank_00_model_states.pt")
    (root / "latest").write_text("global_step3")
    return root


# - Experts


class Experts(torch.nn.Module):
    """Names as DeepSpeed's; four experts."""

    def __init__(self):
        super().__init__()
        self.a, self.moe = torch.nn.Linear(3, 2), torch.nn.Module()
        self.moe.deepspeed_moe = torch.nn.Module()
        inner = self.moe.deepspeed_moe
        inner.gate, inner.experts = torch.nn.Linear(2, 4, bias=False), torch.nn.Module()
        inner.experts.deepspeed_experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4))
        self.b = torch.nn.Linear(2, 2)


def write_experts(root, stage, world, neighbours=False):
    """Files of `world` ranks, two of which share the experts out; every number in them is another one."""
    torch.manual_seed(0)
    net = Experts()
    low = {n: p.detach().bfloat16() for n, p in net.named_parameters()}
    masters = {n: v.float() for n, v in low.items()}
    moments = {n: torch.randn(v.shape) for n, v in low.items()}
    torch.save(
        {
            "module": {n: v for n, v in low.items() if "deepspeed_experts" not in n}, "buffer_names": [],
            "optimizer": None, "ds_version": "0.19.8", "param_shapes": None, "shared_params": {},
        },
        root / "mp_rank_00_model_states.pt",
    )  # fmt: skip
    for expert in range(4):
        mine = {n: v for n, v in low.items() if f"deepspeed_experts.{expert}." in n}
        torch.save(mine, root / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt")
    dense = [n for n in low if "deepspeed_experts" not in n]

    def local(number):
        """A rank's names of its experts -> the names in the whole model."""
        return {
            n: n.replace(f"experts.{e}.", f"experts.{e + 2 * number}.")
            for e in range(2)
            for n in low
            if f"deepspeed_experts.{e}." in n
        }

    if stage == 0:
        for number in range(2):
            named = {**{n: n for n in dense}, **local(number)}
            states = {i: {"exp_avg": moments[n], "step": torch.tensor(2.0)} for i, n in enumerate(named.values())}
            groups = [list(range(len(dense))), list(range(len(dense), len(named)))]
            inner = {"state": states, "param_groups": [{"params": g, "moe": bool(i)} for i, g in enumerate(groups)]}
            rows = [[masters[n] for n in dense], [masters[n] for n in local(number).values()]]
            saved = {"optimizer": {"optimizer_state_dict": inner, "fp32_groups": rows, "dynamic_loss_scale": False}}
            torch.save(saved, root / f"expp_rank_{number}_mp_rank_00_optim_states.pt")
        return low, moments
    number_of = (lambda rank: rank // (world // 2)) if neighbours else (lambda rank: rank % 2)
    for rank in range(world):
        number = number_of(rank)
        same = [other for other in range(world) if number_of(other) == number]
        fp32, states, mappings = [], {}, []
        for group, (names, sharing, me) in enumerate(
            (({n: n for n in dense}, world, rank), (local(number), len(same), same.index(rank)))
        ):
            rows = [torch.cat([source[n].reshape(-1) for n in names.values()]) for source in (masters, moments)]
            each = -(-rows[0].numel() // sharing)
            cut = [pieces(row, sharing)[me].clone() for row in rows]
            at, where = 0, OrderedDict()
            for name, whole in names.items():
                first, last = max(at, me * each), min(at + low[whole].numel(), (me + 1) * each)
                if first < last:
                    where[name] = fragment_address(last - first, first - me * each)
                at += low[whole].numel()
            fp32.append(cut[0])
            states[group] = {"exp_avg": cut[1], "step": torch.tensor(2.0)}
            mappings.append(where)
        saved = {
            "base_optimizer_state": {"state": states, "param_groups": [{"params": [0]}, {"params": [1]}]},
            "single_partition_of_fp32_groups": fp32, "zero_stage": ZeroStageEnum(stage),
            "param_slice_mappings": mappings,
        }  # fmt: skip
        torch.save({"optimizer_state_dict": saved}, root / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return low, moments
