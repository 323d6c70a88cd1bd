"""AdamW with a warm-up and a linear decay to zero, a whole training step as one CUDA graph, and expert balance."""

from collections.abc import Callable

import torch
from torch import Tensor

from twostroke.builder.demo.budget import Pace

WARM_UPS = 3


class Optimiser:
    """Weight decay on matrices only; gradients are clipped to norm 1. The learning rate lives on the device."""

    def __init__(self, trained: dict[str, Tensor], learning_rate: float, steps: int, warmup: int = 200) -> None:
        for tensor in trained.values():
            tensor.requires_grad_(True)
        self._tensors = list(trained.values())
        matrices = [t for name, t in trained.items() if t.dim() > 1 and "hc_" not in name and ".ape" not in name]
        chosen = {id(t) for t in matrices}
        rest = [t for t in self._tensors if id(t) not in chosen]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        on_device = self._tensors[0].is_cuda
        self._rate = torch.tensor(0.0, device=self._tensors[0].device) if on_device else torch.tensor(0.0)
        self._adam = torch.optim.AdamW(
            groups, lr=self._rate, betas=(0.9, 0.95), eps=1e-9, fused=on_device, capturable=on_device
        )
        self._peak, self._steps, self._warmup = learning_rate, steps, min(warmup, max(1, steps // 10))

    def set_rate(self, pace: Pace) -> None:
        rise = (pace.done + 1) / self._warmup
        fall = (1 - pace.share) * self._steps / (self._steps - self._warmup + 1)
        self._rate.fill_(self._peak * min(rise, fall))

    def descend(self, loss: Tensor) -> None:
        self._adam.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._tensors, 1.0)
        self._adam.step()


def captured(step: Callable[[Tensor], Tensor], example: Tensor) -> Callable[[Tensor], Tensor]:
    """`step` as one CUDA graph: hundreds of small kernels cost more to launch than to run. On a CPU, `step` itself.

    The warm-up runs are real steps on `example`; the result lives in the graph's memory until the next call.
    """
    if not example.is_cuda:
        return step
    given = example.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step(given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step(given)

    def replay(value: Tensor) -> Tensor:
        given.copy_(value)
        graph.replay()
        return result

    return replay


@torch.no_grad()
def balance_experts(weights: dict[str, Tensor], loads: dict[str, Tensor], rate: float = 0.001) -> None:
    """Auxiliary-loss-free balancing: the selection bias of a busy expert falls, that of an idle one rises."""
    for bias, load in loads.items():
        if bias in weights:  # a hash layer has none
            weights[bias] += rate * torch.sign(load.mean() - load)
