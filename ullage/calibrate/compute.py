"""Probes of the device: matrix products, attention, elementwise kernels, optimizer, memory."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch.nn import functional

from hwprofiles.profile import AttentionType, Dtype
from hwprofiles.quantity import Curve, Quantity
from ullage.calibrate import kernels
from ullage.calibrate.backend import Backend, in_turn
from ullage.calibrate.sampling import Call, Case, Summary, build_curve, conditions, quantity, rate, seconds, summarize

_DTYPES: Mapping[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
_FP8_GRAIN = 16  # sizes of products in fp8 are multiples of this
# At most this many matrices of a pool rotate. A pool could hold hundreds of thousands of small ones.
_MOST_VIEWS = 1024


@dataclasses.dataclass(frozen=True)
class ComputeProbe:
    """Probes that share a backend and random operands.

    Operands that training reads from memory (weights, saved activations) rotate through ``pools``, which are larger
    than any cache. Results that training keeps (activations, gradients of weights) rotate through ``outputs``, because
    writes to memory outside the cache are slower. Operands that the previous operator has just produced are reused. So
    are gradients of activations, which the next operator consumes.
    """

    backend: Backend
    pools: Mapping[Dtype, torch.Tensor]
    outputs: torch.Tensor

    @classmethod
    def create(cls, backend: Backend) -> "ComputeProbe":
        """Fill the pools with small random numbers."""
        generator = torch.Generator(backend.device).manual_seed(0)
        pools = {
            name: torch.empty(backend.pool_bytes // dtype.itemsize, dtype=dtype, device=backend.device)
            for name, dtype in _DTYPES.items()
        }
        for pool in pools.values():
            pool.uniform_(-0.1, 0.1, generator=generator)
        outputs = torch.zeros(backend.pool_bytes, dtype=torch.uint8, device=backend.device)
        return cls(backend, pools, outputs)

    def gemm_rows_half(self, budget_s: float) -> Quantity:
        """Measure how much few rows slow down a bf16 product, from products with few and many rows of equal FLOP.

        With ``time = curve(flop) (1 + r_half / rows)`` the ratio q of a short product's time to a tall one's gives
        ``r_half = (q - 1) / (1 / short - q / tall)``; the result is the median over several pairs.
        """
        narrow, wide = self.backend.shapes[1][0], self.backend.shapes[1][2]
        factor = (wide // narrow) ** 2
        shorts = [r for r in (8, 16, 32, 64, 128, 256, 512) if r * factor <= 2 * max(self.backend.shapes[0])]
        shapes = [shape for rows in shorts for shape in ((rows, wide), (rows * factor, narrow))]
        cases = [self._linear_mix("bf16", rows, hidden) for rows, hidden in shapes]
        found = self.backend.sample(cases, budget_s)
        halves = []
        for short, tall, rows in zip(found[::2], found[1::2], shorts, strict=False):
            ratio = short.median_s / tall.median_s
            slope = 1 / rows - ratio / (rows * factor)
            halves.append(max(ratio - 1, 0.0) / slope if slope > 0 else float(rows * factor))
        source = f"short against tall products of equal FLOP, {min(shorts)} to {max(shorts)} rows, median"
        source += conditions(found)
        return quantity(float(np.median(halves)), "count", source, sum(s.num_samples for s in found), halves)

    def gemm(self, dtype: Dtype, rows_half: float, budget_s: float) -> Curve:
        """Measure products of a linear layer: the mean of forward, dgrad and wgrad, corrected for few rows."""
        return self._products(functools.partial(self._linear_mix, dtype), dtype, rows_half, budget_s)

    def gemm_fp8(self, rows_half: float, budget_s: float) -> Curve | None:
        """Measure the same products of matrices that are in fp8 already; ``None`` if the device has no such products.

        PyTorch has them on GPUs of compute capability 8.9 or newer, and emulates them on CPUs.
        """
        values = self.pools["bf16"].to(torch.float8_e4m3fn)
        try:
            self._fp8_mix(values, _FP8_GRAIN, _FP8_GRAIN).call()
        except (RuntimeError, NotImplementedError):
            return None
        return self._products(functools.partial(self._fp8_mix, values), "fp8", rows_half, budget_s)

    def _products(self, mix: Callable[..., Case], dtype: str, rows_half: float, budget_s: float) -> Curve:
        rows, hiddens = self.backend.shapes
        if dtype == "fp32" and self.backend.kind == "gpu":  # ten times slower, so smaller ones fill the device
            rows, hiddens = rows[:-1], hiddens[:-1]
        shapes = sorted(itertools.product(rows, hiddens), key=lambda s: (s[0] * s[1] ** 2, s))
        cases = [mix(r, h, 1 / (1 + rows_half / r)) for r, h in shapes]
        found = self.backend.sample(cases, budget_s)
        source = f"{dtype} products of a linear layer, mean of forward, dgrad and wgrad, corrected for few rows"
        sizes = [case.size for case in cases]
        return build_curve("flop", sizes, _no_faster_than_most_rows(shapes, sizes, found), source)

    def attention(self, dtype: Dtype, budget_s: float, *, backward: bool = False) -> dict[AttentionType, Curve]:
        """Measure fused causal attention or its backward, for each type of heads.

        The FLOP of forward are 2 batch heads seq² head_dim, without the masked half. Those of backward are 2.5 times
        as many: it has five products of the size of which forward has two (Dao et al., FlashAttention, appendix B).
        """
        heads = {name: sizes for name, sizes in self.backend.heads.items() if name.startswith(dtype)}
        part_s = budget_s / len(heads)
        return {
            name: self._attention(dtype, head_dim, num_key_value_heads, part_s, backward=backward)
            for name, (head_dim, num_key_value_heads) in heads.items()
        }

    def _attention(
        self, dtype: Dtype, head_dim: int, num_key_value_heads: int, budget_s: float, *, backward: bool
    ) -> Curve:
        batch, num_heads = self.backend.batch, self.backend.num_heads
        cases = [
            Case(
                (5.0 if backward else 2.0) * batch * num_heads * seq**2 * head_dim,
                self._attention_call(
                    dtype,
                    (batch, num_heads, seq, head_dim),
                    (batch, num_key_value_heads, seq, head_dim),
                    backward=backward,
                ),
            )
            for seq in (self.backend.backward_seq_lens if backward else self.backend.seq_lens)
        ]
        found = self.backend.sample(cases, budget_s)
        what = "the backward of fused causal attention" if backward else "fused causal attention forward"
        source = f"{dtype} {what}, FLOP without the masked half, head dimension {head_dim}"
        if num_key_value_heads < num_heads:
            source += f", {num_heads // num_key_value_heads} query heads per key-value head"
        return build_curve("flop", [c.size for c in cases], found, source)

    def elementwise(self, dtype: Dtype, budget_s: float) -> Curve:
        """Measure eager kernels over the bytes they read and write: the mean of add, mul, silu, and a cast or copy."""
        counts = itertools.takewhile(lambda count: count <= self.backend.most_elements, (4**i for i in range(4, 99)))
        cases = [self._elementwise_mix(dtype, count) for count in counts]
        found = self.backend.sample(cases, budget_s)
        last = "cast to fp32" if dtype == "bf16" else "copy"
        source = f"eager elementwise kernels, mean of {dtype} add, mul, silu and {last}"
        return build_curve("bytes", [c.size for c in cases], found, source)

    def optimizer(self, budget_s: float) -> Curve:
        """Measure one AdamW update on the device."""
        cases = self.backend.optimizer_cases()
        found = self.backend.sample(cases, budget_s)
        source = "AdamW on the device: " + (
            f"{'one kernel' if kernels.fuses_updates() else 'torch, fused'}, from bf16 gradients to bf16 weights"
            if self.backend.kind == "gpu"
            else f"CPU kernel on {self.backend.num_cores} cores"
        )
        return build_curve("params", [c.size for c in cases], found, source)

    def memory_bytes_per_s(self, budget_s: float) -> Quantity:
        """Measure a copy inside the device's memory, reads and writes added."""
        first, second = self.pools["fp32"].chunk(2)
        case = Case(2.0 * first.nbytes, lambda: second.copy_(first))
        (found,) = self.backend.sample([case], budget_s)
        source = "copy inside device memory, reads and writes added"
        return rate(case.size, found, "bytes_per_s", source)

    def gradient_norm(self, budget_s: float) -> Curve | None:
        """Measure the sum of squares of a bf16 gradient; ``None`` on a GPU, where memory bandwidth hides it."""
        if self.backend.kind == "gpu":
            return None
        bits = self.pools["bf16"].view(torch.uint16).numpy()

        def norm(part: slice) -> float:
            return kernels.sum_of_squares(bits[part])

        cases = [Case(n, in_turn(norm, len(bits), n)) for n in self.backend.optimizer_sizes]
        found = self.backend.sample(cases, budget_s)
        return build_curve("params", [c.size for c in cases], found, "sum of squares of a bf16 gradient")

    def host_s(self, elementwise: Curve, budget_s: float) -> tuple[Quantity, Quantity]:
        """Measure a tiny model's host time per kernel (with Python and autograd) and per tensor of an optimizer step.

        On a CPU, the curve of elementwise kernels includes their dispatch already. So the smallest time of that curve
        is subtracted.
        """
        issue_s: list[float] = []
        step_s: list[float] = []
        begin_s = time.perf_counter()
        with torch.enable_grad():
            while not issue_s or time.perf_counter() - begin_s < budget_s / 2:
                more_issue_s, more_step_s = kernels.host_times(self.backend.device.type)
                issue_s += more_issue_s
                step_s += more_step_s
        floor_s = elementwise.points[0].median_s if self.backend.kind == "host" else 0.0
        source = "forward and backward of a tiny model, per kernel" + (
            ", less the dispatch of an elementwise kernel" if floor_s else ""
        )
        issue = seconds(summarize(issue_s), source, floor_s)
        source = "from the end of backward to the next forward of a tiny model, per parameter tensor"
        return issue, seconds(summarize(step_s), source)

    def gemm_call(self) -> Call:
        """Return products of a few milliseconds, to run beside other work.

        They use the data type that is faster here: on processors without bf16 instructions, bf16 may be tens of times
        slower.
        """
        calls = [self._linear_mix(dtype, *self.backend.beside).call for dtype in _DTYPES]
        for call in calls:
            call()  # first use allocates
        return min(calls, key=lambda call: self.backend.time_s(call, 1))

    def _linear_mix(self, dtype: Dtype, rows: int, hidden: int, correction: float = 1.0) -> Case:
        weights, saved = self._views(dtype, hidden, hidden), self._views(dtype, rows, hidden)
        activations, gradients = (self._views(dtype, *shape, self.outputs) for shape in ((rows, hidden), (hidden,) * 2))
        recent = next(self._views(dtype, rows, hidden)).clone()

        def call() -> None:
            weight = next(weights)
            torch.mm(recent, weight.t(), out=next(activations))  # forward
            recent @ weight  # dgrad
            torch.mm(recent.t(), next(saved), out=next(gradients))  # wgrad

        return Case(2.0 * rows * hidden**2, call, correction / 3)

    def _fp8_mix(self, values: torch.Tensor, rows: int, hidden: int, correction: float = 1.0) -> Case:
        """Return products with the first matrix in rows and the second in columns, as ``_scaled_mm`` wants them."""
        one = torch.ones((), device=self.backend.device)
        activations, weights = (self._matrices(values, *shape) for shape in ((rows, hidden), (hidden, hidden)))
        transposed = self._matrices(values, hidden, rows)
        kept, gradients = (self._views("bf16", *shape, self.outputs) for shape in ((rows, hidden), (hidden,) * 2))
        recent = next(activations).clone()
        recent_transposed = recent.t().contiguous()

        def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> None:
            torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, out=out)

        def call() -> None:
            product(recent, next(weights), next(kept))  # forward
            product(recent, next(weights))  # dgrad
            product(recent_transposed, next(transposed), next(gradients))  # wgrad

        return Case(2.0 * rows * hidden**2, call, correction / 3)

    def _attention_call(
        self, dtype: Dtype, of_query: tuple[int, ...], of_key: tuple[int, ...], *, backward: bool
    ) -> Call:
        """Return a call of attention's forward, or of the backward of a forward that ran before.

        On a GPU, forward writes what backward needs, as in training.
        """
        pool, for_backward = self.pools[dtype], self.backend.kind == "gpu"
        query, key, value = inputs = [
            pool[: math.prod(shape)].view(shape).clone().requires_grad_() for shape in (of_query, of_key, of_key)
        ]

        def forward() -> torch.Tensor:
            with torch.set_grad_enabled(for_backward or torch.is_grad_enabled()):
                return functional.scaled_dot_product_attention(
                    query, key, value, is_causal=True, enable_gqa=of_key != of_query
                )

        if not backward:
            return forward
        gradient = query.detach().clone()
        with torch.enable_grad():
            output = forward()
        return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)

    def _elementwise_mix(self, dtype: Dtype, num_elements: int) -> Case:
        bytes_per_element = ((6 + 6 + 4 + 6) if dtype == "bf16" else (12 + 12 + 8 + 8)) / 4
        saved, results = self._views(dtype, 1, num_elements), self._views(dtype, 1, num_elements, self.outputs)
        copies = self._views("fp32", 1, num_elements, self.outputs)
        recent = next(self._views(dtype, 1, num_elements)).clone()

        def call() -> None:
            torch.add(recent, next(saved), out=next(results))
            torch.mul(recent, next(saved), out=next(results))
            torch.ops.aten.silu.out(recent, out=next(results))
            next(copies).copy_(recent)

        return Case(num_elements * bytes_per_element, call, 1 / 4)

    def _views(self, dtype: Dtype, rows: int, columns: int, pool: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """Return an endless iterator over matrices in a type's pool, or in another pool."""
        return self._matrices(self.pools[dtype] if pool is None else pool.view(_DTYPES[dtype]), rows, columns)

    @staticmethod
    def _matrices(whole: torch.Tensor, rows: int, columns: int) -> Iterator[torch.Tensor]:
        size = rows * columns
        parts = torch.split(whole[: _MOST_VIEWS * size], size)
        return itertools.cycle([part.view(rows, columns) for part in parts if len(part) == size])


def _no_faster_than_most_rows(
    shapes: Sequence[tuple[int, int]], sizes: Sequence[float], found: Sequence[Summary]
) -> list[Summary]:
    """Return the times of products of (rows, hidden), none at a higher rate than the best of those with most rows.

    The correction of products of few rows is rough: it must not give them a rate that no product has.
    """
    most_rows = max(rows for (rows, _), _ in zip(shapes, found, strict=False))
    seen = zip(shapes, sizes, found, strict=False)
    best = max(size / one.median_s for (rows, _), size, one in seen if rows == most_rows)
    return [
        one._replace(
            p10_s=max(one.p10_s, size / best),
            median_s=max(one.median_s, size / best),
            p90_s=max(one.p90_s, size / best),
        )
        for size, one in zip(sizes, found, strict=False)
    ]
