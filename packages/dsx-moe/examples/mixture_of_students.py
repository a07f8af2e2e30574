"""Mixture-of-Students: a shallower mixture of experts learns from a deeper one, which stops teaching before the end.

    pip install ./packages/dsx-core ./packages/dsx-compress        # in a checkout of dsx
    python mixture_of_students.py --mos --kd-stop-step 200 [flags of gpt_moe.py]

The student of a PR-MoE has fewer layers and as many experts. Distillation to the end of training makes it worse than no
distillation, because a small student has no capacity for both losses late in training. So the distillation is staged:
it stops at `--kd-stop-step`, and from then on only the loss of the task counts (arXiv 2201.05596, section 4.2).
`--load-teacher` reads the teacher from a file; if there is no such file, the teacher is trained and written there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import dsx_comm
import dsx_moe
import gpt_moe
import torch
from dsx_compress import DistillationLoss


def parser() -> argparse.ArgumentParser:
    """The flags of gpt_moe.py, which describe the student; flags of the teacher end in -teacher."""
    made = gpt_moe.parser()
    made.set_defaults(num_layers=2)
    made.add_argument("--mos", action="store_true", help="distil; without it the student learns alone")
    made.add_argument("--num-layers-teacher", type=int, default=4)
    made.add_argument("--hidden-size-teacher", type=int, default=128)
    made.add_argument("--num-experts-teacher", type=int, nargs="+", default=[8])
    made.add_argument("--load-teacher", type=Path, help="file of the teacher's weights; written if there is none")
    made.add_argument("--kd-stop-step", type=int, help="step after which only the task counts; default: never")
    made.add_argument("--kd-alpha", type=float, default=0.5, help="weight of the teacher's logits")
    made.add_argument("--kd-temperature", type=float, default=1.0)
    return made


def trained_teacher(args: argparse.Namespace) -> torch.nn.Module:
    """The teacher, read from the file or trained now. The file holds all experts, whatever the number of ranks."""
    of_teacher = argparse.Namespace(
        **{
            **vars(args),
            "num_layers": args.num_layers_teacher,
            "hidden_size": args.hidden_size_teacher,
            "num_experts": args.num_experts_teacher,
        }
    )
    teacher = gpt_moe.build(of_teacher)
    if args.load_teacher is not None and args.load_teacher.exists():
        teacher.load_state_dict(torch.load(args.load_teacher, weights_only=True))
    else:
        gpt_moe.train(teacher, of_teacher)
        if args.load_teacher is not None:
            whole = dsx_moe.full_state_dict(teacher)
            if dsx_comm.get_rank() == 0:
                torch.save(whole, args.load_teacher)
    return teacher.eval().requires_grad_(False)


def main() -> None:
    """Train the teacher, then the student."""
    args = parser().parse_args()
    dsx_comm.init_distributed()
    teacher = trained_teacher(args) if args.mos else None
    student = gpt_moe.build(args)

    if teacher is None:
        curve = gpt_moe.train(student, args)
    else:
        distillation = DistillationLoss(
            student, teacher, alpha=args.kd_alpha, temperature=args.kd_temperature, stop_step=args.kd_stop_step
        )

        def loss_of(step: int, logits: torch.Tensor, targets: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
            loss = distillation(logits, gpt_moe.bits(logits, targets), (inputs,))
            distillation.step()
            return loss

        curve = gpt_moe.train(student, args, loss_of=loss_of)
    if dsx_comm.get_rank() == 0:
        size = sum(p.numel() for p in student.parameters())
        print(f"student: {size:,} parameters on a rank, {curve[-1]:.3f} bits per byte held out")


if __name__ == "__main__":
    main()
