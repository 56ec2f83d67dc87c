"""The time of kernels on a device."""

import dataclasses
from collections.abc import Iterable
from typing import Final

from hwprofiles.profile import Dtype, HardwareProfile, ProductType
from hwprofiles.quantity import Curve
from planner.costs.rank import RankHardware
from planner.costs.resources import Resource
from planner.decisions import Precision
from planner.graph import Attention, Elementwise, Gemm, Kernel
from planner.models.kernels import Collective

# Outputs along each side of the tile that one multiprocessor computes at a time, and its rate. At full rate, a tile of
# (m, n) reads 2048 (1 / m + 1 / n) B a clock on an A100, of the 5120 B that its L2 gives 108 multiprocessors (NVIDIA
# A100 Tensor Core GPU Architecture): (128, 128) needs 32 B of 47.
_TILE: Final = (128, 128)
_TILES: Final = {_TILE: 1.0, (128, 64): 0.98, (64, 128): 0.98, (64, 64): 0.73, (64, 32): 0.49, (32, 32): 0.37}
_LEAST_PART = 8192  # of the inner side of a product whose tiles are too few: more parts would mostly add up
_FP32 = 4
# A row that is added to one to which others are added, on a GPU. PyTorch sorts them, and adds those of one row one
# after another (``aten/src/ATen/native/cuda/Indexing.cu::indexing_backward_kernel``). A step of Halo's own engine with
# gpt-oss-20b and 4096 tokens is 1.65 times as fast without 48 such sums of 512 rows each, and takes 0.455 s then
# (github.com/whitecircle/halo, agent-docs/optimization/grouped-gemm.md and halo-vs-stock-trl.md, EP1 on 8 B300).
_MEETING_ROW_S: Final = 0.65 * 0.455 / 48 / 512
_NARROW_HEAD = 64  # values; see :data:`hwprofiles.profile.AttentionType`


class KernelCosts:
    """Times of kernels on one rank's device, and the bytes that they touch.

    Args:
        rank: the rank that has the device.
        precision: types of weights and activations.
    """

    def __init__(self, rank: RankHardware, precision: Precision) -> None:
        self._rank = rank
        self._dtype: Dtype = precision.weights
        self._dtype_bytes = precision.weight_bytes
        self._kernels: dict[int, tuple[float, float]] = {}  # by identity: equal layers share their kernels

    def compute_s(self, kernels: Iterable[Kernel]) -> float:
        """Return the time that kernels take on the device, one after another."""
        return sum(self.time_and_bytes(kernel)[0] for kernel in kernels)

    def on_device(self, duration_s: float, num_bytes: float) -> tuple[tuple[Resource, float], ...]:
        """Return the resources that work on the device uses. If the CPU is the device, these are cores and DRAM."""
        device = self._rank.profile.device
        if device.kind == "gpu" or duration_s <= 0:
            return ((Resource.DEVICE, 1.0),)
        # Caches absorb part of the traffic to DRAM. It is at most what the device can draw alone.
        dram = min(
            num_bytes / duration_s, device.memory_bytes_per_s.value, self._rank.profile.host.dram_bytes_per_s.value
        )
        return ((Resource.CORES, float(device.num_cores)), (Resource.DRAM, dram))

    def time_and_bytes(self, kernel: Kernel) -> tuple[float, float]:
        """Return (seconds, bytes touched) of one kernel entry, with all its repetitions."""
        key = id(kernel)
        if key not in self._kernels:
            self._kernels[key] = self._price(kernel)
        return self._kernels[key]

    def _price(self, kernel: Kernel) -> tuple[float, float]:
        device = self._rank.profile.device
        if not isinstance(kernel, Elementwise | Collective) and not kernel.flop:
            return 0.0, 0.0  # a tensor without elements: nothing is launched
        match kernel:
            case Gemm():
                return self._price_product(kernel)
            case Attention():
                curve, steps = self._attention_curve(kernel), kernel.num_steps
                time_s = steps * self._rank.read_s(curve, kernel.flop / steps, "attention")
                rows = kernel.batch * kernel.num_heads * kernel.seq_len * kernel.head_dim // steps
                return time_s, float(4 * self._dtype_bytes * rows)
            case Elementwise():
                curve = (device.elementwise_fp32 if self._dtype == "fp32" else None) or device.elementwise
                time_s = self._rank.read_s(curve, kernel.num_bytes, "elementwise")
                if kernel.num_bytes > curve.points[-1].size:  # a cache may have held the last size, but not this one
                    time_s = max(time_s, kernel.num_bytes / device.memory_bytes_per_s.value)
                if kernel.num_meeting > 1 and device.kind == "gpu":
                    time_s = max(time_s, kernel.num_meeting * _MEETING_ROW_S)
                return time_s * kernel.count, float(kernel.num_bytes * kernel.count)
            case Collective():
                return self._inside_unit_s(kernel) * kernel.count, float(kernel.num_bytes * kernel.count)

    def _attention_curve(self, kernel: Attention) -> Curve:
        """Return the curve of the kernel's kind of heads, or else that of its data type."""
        device = self._rank.profile.device
        if not kernel.flash:
            return device.gemm[self._dtype]
        fused = (kernel.backward and device.attention_backward) or device.attention
        width = "-128" if kernel.head_dim > _NARROW_HEAD else ""
        wanted = (f"{self._dtype}{width}-gqa" if kernel.shares_keys else "", f"{self._dtype}{width}", self._dtype)
        known = {str(name): curve for name, curve in fused.items()}
        return next(known[name] for name in wanted if name in known)

    def _price_product(self, kernel: Gemm) -> tuple[float, float]:
        device = self._rank.profile.device
        curve, in_bytes = self._curve(kernel), 1 if kernel.fp8 else self._dtype_bytes
        out_bytes = (2 * _FP32 if kernel.accumulates else self._dtype_bytes) * kernel.m * kernel.n
        num_bytes = kernel.count * (in_bytes * (kernel.m * kernel.k + kernel.k * kernel.n) + out_bytes)
        # What idles takes as long as if it computed: so the curve is read at the FLOP of a full device. Then a product
        # takes no longer than one that fills its last tiles, and start-up counts once.
        # A batch is one kernel, and its products fill the device together. So are groups, but tiles end where they end.
        if kernel.batched or (kernel.grouped and device.kind == "gpu"):
            # Kernels of groups have one size of tiles for all (CUTLASS).
            idle = (
                _waves(kernel.m, kernel.n, device.multiprocessors or 1, _TILE, kernel.count) if kernel.grouped else 1.0
            )
            time_s = self._rank.read_s(curve, kernel.flop * idle, "GEMM")
            time_s = max(time_s, num_bytes / device.memory_bytes_per_s.value)
        else:
            if device.multiprocessors:
                idle = wave_factor(kernel.m, kernel.n, device.multiprocessors, kernel.k)
            else:  # few rows leave part of the device idle: the curve's rate times r / (r + r_half)
                idle = 1 + device.gemm_rows_half.value / kernel.m
            time_s = self._rank.read_s(curve, kernel.flop / kernel.count * idle, "GEMM") * kernel.count
        if device.gemm_bytes_per_s:
            time_s += num_bytes / device.gemm_bytes_per_s.value
        return time_s, float(num_bytes)

    def _curve(self, kernel: Gemm) -> Curve:
        profile = self._rank.profile
        dtype: ProductType = "fp8" if kernel.fp8 else self._dtype
        if dtype not in profile.device.gemm:
            raise ValueError(no_products(profile, dtype))
        return profile.device.gemm[dtype]

    def _inside_unit_s(self, kernel: Collective) -> float:
        """Return the time of a collective inside a unit for which its next kernel waits."""
        if kernel.behind:
            alone_s = self._inside_unit_s(dataclasses.replace(kernel, behind=None))
            num_steps = kernel.behind.num_steps if isinstance(kernel.behind, Attention) else 1
            is_hidden = self._rank.profile.device.kind == "gpu"  # a host that computes does one after the other
            return max(alone_s - is_hidden * self.time_and_bytes(kernel.behind)[0] / num_steps, 0.0)
        if kernel.kind != "ring":
            group = self._rank.layout.parts(kernel.num_ranks, over_tensor=kernel.over_tensor)
            is_pass = kernel.kind == "pass"
            return (self._rank.pass_s if is_pass else self._rank.all_to_all_s)(group, kernel.num_bytes)
        return self._rank.collective(self._rank.layout.tensor_group, kernel.num_bytes, kernel.num_passes).alone_s


def no_products(profile: HardwareProfile, dtype: ProductType) -> str:
    """Return the error that a machine's profile has no products of a type."""
    has = ", ".join(profile.device.gemm)
    remedy = "choose another type"
    if dtype == "fp8":
        remedy = (
            "leave out --precision products=fp8 and torchao's convert_to_float8_training, or choose hardware that has "
            "them"
        )
    return (
        f"profile {profile.name} says nothing about products in {dtype}: its device.gemm has {has}; {remedy}, or "
        "measure them with `ullage calibrate`"
    )


def wave_factor(m: int, n: int, multiprocessors: int, k: int = 0) -> float:
    """Return the factor by which a product of (m, n) outputs is slower because tiles come in whole waves.

    Each multiprocessor computes one tile at a time. A partial tile or wave takes as long as a full one (NVIDIA, *Matrix
    Multiplication Background*, "Tile Quantization" and "Wave Quantization"). The size of tiles is the fastest, as
    cuBLAS chooses it. If tiles are too few for all multiprocessors, those that would be idle take parts of a long inner
    side ``k`` (split-K). A last wave of tiles does not: with that, 95 runs of MPT and 92 streamed ones are further off.
    """
    return min(_waves(m, n, multiprocessors, tile, k=k) / rate for tile, rate in _TILES.items())


def _waves(m: int, n: int, multiprocessors: int, tile: tuple[int, int], count: int = 1, k: int = 0) -> float:
    """Return the factor of ``count`` products with one size of tiles, at its own rate."""
    rows, columns = tile
    tiles = count * -(-m // rows) * -(-n // columns)
    waves = -(-tiles // multiprocessors)
    parts = min(max(multiprocessors / tiles, 1.0), max(k / _LEAST_PART, 1.0))
    return waves * multiprocessors * rows * columns / (m * n * count * parts)
