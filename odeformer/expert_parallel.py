"""Experts spread over processes with torch.distributed: each holds some experts and serves every process's tokens.

    model = spread(model)                  # in every process, with the same weights; then make the optimiser
    loss(model(my tokens)).backward()      # each process has its own part of the batch
    average_gradients(model)
    optimiser.step()

makes the step that one process makes on the mean of the processes' losses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from odeformer.experts import Experts, StackedLinear


class _Exchange(torch.autograd.Function):
    """all_to_all of rows; backward sends the gradients back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, arriving: list[int], leaving: list[int], group: Any) -> Tensor:
        ctx.arriving, ctx.leaving, ctx.group = arriving, leaving, group
        return _all_to_all(rows, arriving, leaving, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grad, ctx.leaving, ctx.arriving, ctx.group), None, None, None


def _all_to_all(rows: Tensor, arriving: list[int], leaving: list[int], group: Any) -> Tensor:
    received = rows.new_empty(sum(arriving), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), arriving, leaving, group=group)
    return received


class _Sum(torch.autograd.Function):
    """all_reduce; the gradient of the sum of all processes' losses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad.contiguous(), ctx.group), None


class ExpertParallel(Experts):
    """The experts of ``whole`` of which this process holds every n-th part: process r of n has those from
    r n_experts / n on. Router and weights must be the same in all processes to begin with.

    Called like ``Experts``, by all processes at the same time, each with its own tokens, perhaps none for some experts;
    backward likewise. Capacity is a sequence's own, so the outputs are those of one process; the losses and loads that
    are reported are those of all processes' tokens. How many rows go where is read by the host in each evaluation.

    Raises ValueError unless the processes divide n_experts.
    """

    def __init__(self, whole: Experts, group: Any = None):
        nn.Module.__init__(self)
        self.group = group
        n, rank = dist.get_world_size(group), dist.get_rank(group)
        if whole.n_experts % n:
            raise ValueError(f"n_experts must be a multiple of the number of processes, got {whole.n_experts} and {n}")
        for name in ("d_model", "d_ff", "n_experts", "top_k", "grouping", "activation"):
            setattr(self, name, getattr(whole, name))
        self.router = whole.router
        self.n_local = whole.n_experts // n
        for name in ("hidden", "gate", "output"):
            stack = getattr(whole, name)
            setattr(self, name, None if stack is None else _part(stack, rank * self.n_local, self.n_local))

    def total(self, tally: Tensor) -> Tensor:
        """The sum over all processes."""
        return _Sum.apply(tally, self.group)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows sorted by expert go to the processes that hold their experts; outputs come back."""
        n = dist.get_world_size(self.group)
        even = [self.n_local] * n
        arriving = _all_to_all(counts, even, even, self.group).view(n, self.n_local)  # [from process, for expert]
        leaving_sizes, arriving_sizes = counts.view(n, -1).sum(1).tolist(), arriving.sum(1).tolist()
        served = sum(leaving_sizes)
        here = _Exchange.apply(rows[:served], arriving_sizes, leaving_sizes, self.group)
        expert = torch.arange(self.n_local, device=rows.device).repeat(n).repeat_interleave(arriving.flatten())
        order = expert.argsort(stable=True)
        y = super().compute(here[order], arriving.sum(0))[order.argsort()]
        back = _Exchange.apply(y, leaving_sizes, arriving_sizes, self.group)
        return torch.cat([back, back.new_zeros(rows.shape[0] - served, back.shape[-1])])

    def held_names(self) -> list[str]:
        """The names of the parameters that no other process has."""
        return [f"{name}.{inner}" for name in ("hidden", "gate", "output") if getattr(self, name) is not None
                for inner, _ in getattr(self, name).named_parameters()]

    def held_here(self) -> list[nn.Parameter]:
        """The parameters that no other process has."""
        return [self.get_parameter(name) for name in self.held_names()]

    def collect(self) -> Experts:
        """All experts in one module again, in every process (called by all)."""
        whole = Experts(self.d_model, self.d_ff, n_experts=self.n_experts, top_k=self.top_k, grouping=self.grouping,
                        bias=self.hidden.bias is not None)
        whole.activation, whole.router = self.activation, self.router
        for name in ("hidden", "gate", "output"):
            setattr(whole, name, _joined(getattr(self, name), self.group))
        return whole.train(self.training)


def _part(stack: StackedLinear, start: int, n: int) -> StackedLinear:
    """Some experts of a stack, copied."""
    return _stack(stack.weight[start:start + n], None if stack.bias is None else stack.bias[start:start + n])


def _stack(weight: Tensor, bias: Tensor | None) -> StackedLinear:
    stack = StackedLinear(1, 1, 1, bias=bias is not None)
    stack.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if bias is not None:
        stack.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return stack


def _joined(stack: StackedLinear | None, group: Any) -> StackedLinear | None:
    """The stacks of all processes behind one another."""
    def join(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.detach().contiguous(), group=group)
        return torch.cat(parts)

    if stack is None:
        return None
    joined = _stack(join(stack.weight), None if stack.bias is None else join(stack.bias))
    for p, part in zip(joined.parameters(), stack.parameters(), strict=True):
        p.requires_grad_(part.requires_grad)
    return joined


def _swap(model: nn.Module, kind: type, make: Any) -> nn.Module:
    """The model with every module of exactly this kind replaced in place; itself if it is one."""
    if type(model) is kind:
        return make(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is kind:
                setattr(module, name, make(child))
    return model


def spread(model: nn.Module, group: Any = None) -> nn.Module:
    """The model with each ``Experts`` made an ``ExpertParallel`` over the group's processes, in place, after all have
    taken the weights of the group's first. Optimisers must be made afterwards. Called by all processes."""
    first = 0 if group is None else dist.get_global_rank(group, 0)
    for x in [*model.parameters(), *model.buffers()]:
        dist.broadcast(x.detach(), first, group=group)
    return _swap(model, Experts, lambda experts: ExpertParallel(experts, group))


def collect(model: nn.Module) -> nn.Module:
    """The model with all experts in each process again, in place: to be saved, or used alone. Called by all."""
    return _swap(model, ExpertParallel, lambda experts: experts.collect())


def average_gradients(model: nn.Module, group: Any = None) -> None:
    """After backward: gradients of the mean of the processes' losses. Those of parameters that all processes have are
    averaged; an expert's, which backward has already gathered from all, are divided by the number of processes."""
    n = dist.get_world_size(group)
    here = {id(p) for m in model.modules() if isinstance(m, ExpertParallel) for p in m.held_here()}
    common = [p for p in model.parameters() if p.requires_grad and id(p) not in here]
    if common:
        some = torch.tensor([p.grad is not None for p in common], dtype=torch.int32, device=common[0].device)
        dist.all_reduce(some, op=dist.ReduceOp.MAX, group=group)  # where one process has a gradient all take part
        common = [p for p, any_has in zip(common, some.tolist(), strict=True) if any_has]
    for p in common:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for dtype in dict.fromkeys(p.dtype for p in common):  # one message, not one a parameter
        same = [p.grad for p in common if p.dtype == dtype]
        together = torch.cat([grad.flatten() for grad in same])
        dist.all_reduce(together, group=group)
        for grad, part in zip(same, together.split([grad.numel() for grad in same]), strict=True):
            grad.copy_(part.view_as(grad))
    for p in [*common, *(p for p in model.parameters() if id(p) in here and p.grad is not None)]:
        p.grad.div_(n)
