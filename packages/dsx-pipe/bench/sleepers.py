"""Stages that sleep in place of computing: many ranks can share few cores, and only the schedule decides the time."""

import time

import torch
from torch import nn


class _SleepingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, seconds):
        ctx.seconds = seconds
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    """A stage whose forward, input backward and weight backward take given seconds per micro-batch."""

    def __init__(self, forward, of_input, of_weight):
        super().__init__()
        self.seconds = (forward, of_input, of_weight)
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        time.sleep(self.seconds[0])
        if not x.requires_grad:  # the first stage gets data; its input backward sleeps, too
            x = x.detach().requires_grad_()
        return _SleepingBackward.apply(x, self.seconds[1]) + _SleepingBackward.apply(self.weight, self.seconds[2])
