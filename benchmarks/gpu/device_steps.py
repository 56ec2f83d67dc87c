"""The steps of ``probe.py`` that need torch: rates of the device, of the link, and of the host's memory beside it.

Shapes are those of Llama-3.1-8B at 8k tokens, or tiny ones.
"""

import ctypes
import functools
import math
import mmap
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

_WIDTH, _MLP, _HEADS, _KV_HEADS, _HEAD_DIM = 4096, 14336, 32, 8, 128
_ROWS = 8192
_BF16: Final = torch.bfloat16
_DEVICE: Final = "cuda"
_UPDATE_BYTES = 28  # per parameter: master copy and moments in fp32 read and written, gradient and weight in bf16
Way = Literal["down", "up"]  # to the device, or from it


class _Log(Protocol):
    def tell(self, step: str, **values: Any) -> None: ...


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    make: Callable[..., torch.cuda.Event] = torch.cuda.Event
    return make(enable_timing=True), make(enable_timing=True)


def gpu_ms(call: Callable[[], object], count: int = 1, *, beside: bool = False) -> float:
    """Return milliseconds of a call on the current stream, mean of so many; ``beside``: while other streams work."""
    start, end = _events()
    if not beside:
        torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    total_ms: float = start.elapsed_time(end)
    return total_ms / count


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


class DeviceProbe:
    """All steps; what one leaves for another are the buffers of the link.

    Args:
        log: where they tell what they find.
        tiny: nothing large.
    """

    def __init__(self, log: _Log, *, tiny: bool) -> None:
        self._log, self._tiny = log, tiny

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=_DEVICE, dtype=_BF16)

    def _steady(self, call: Callable[[], object], seconds: float) -> dict[str, Any]:
        """Return the seconds of the first call, and the median milliseconds of early ones and of the later half."""
        begin_s = time.perf_counter()
        call()
        torch.cuda.synchronize()
        first_s = time.perf_counter() - begin_s
        end_s = time.perf_counter() + (0.02 if self._tiny else seconds)
        count = max(1, min(200, math.ceil(2.0 / max(gpu_ms(call), 1e-3))))
        times: list[float] = []
        while len(times) < 3 or time.perf_counter() < end_s:
            times.append(gpu_ms(call, count))
        late_ms = statistics.median(times[len(times) // 2 :])
        early_ms = round(statistics.median(times[:5]), 4)
        return {"first_call_s": round(first_s, 4), "early_ms": early_ms, "late_ms": round(late_ms, 4)}

    def context(self) -> None:
        """What the context and the first product take of the device's memory."""
        cudnn: Any = torch.backends.cudnn
        free, total = torch.cuda.mem_get_info()
        torch.zeros(1, device=_DEVICE)
        after_tensor = torch.cuda.mem_get_info()[0]
        x = self._random(1024, 1024)
        torch.cuda.synchronize()
        before_product = torch.cuda.mem_get_info()[0]
        torch.mm(x, x)
        torch.cuda.synchronize()
        self._log.tell(
            "context",
            total=total,
            free_at_first=free,
            after_first_tensor=after_tensor,
            of_first_product=before_product - torch.cuda.mem_get_info()[0],
            torch=torch.__version__,
            cuda=torch.version.cuda,
            cudnn=cudnn.version() if cudnn.is_available() else None,
            capability=torch.cuda.get_device_capability(),
        )
        try:
            driver, value, told = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), {}
        except OSError as error:
            self._log.tell("device attributes", error=_told(error))
            return
        # Numbers of CUdevice_attribute in cuda.h.
        for name, number in (("copy_engines", 40), ("multiprocessors", 16), ("host_register", 99), ("l2_bytes", 38)):
            driver.cuDeviceGetAttribute(ctypes.byref(value), number, 0)
            told[name] = value.value
        self._log.tell("device attributes", **told)

    def attention(self) -> None:
        """Which kernel attention takes by itself, the rates of each, their scratch memory, and whether they repeat."""
        backend_of: Any = SDPBackend
        heads, kv, dim = (4, 2, 32) if self._tiny else (_HEADS, _KV_HEADS, _HEAD_DIM)
        for batch, seq_len in ((1, 64),) if self._tiny else ((4, 2048), (2, 4096), (8, 2048), (1, 8192)):
            # [batch, heads, seq_len, head_dim], as transformers has them: transposed views
            q, k, v = (self._random(batch, seq_len, n, dim).transpose(1, 2).requires_grad_() for n in (heads, kv, kv))
            chosen = torch._fused_sdp_choice(q, k, v, None, 0.0, is_causal=True, enable_gqa=True)
            said = {"batch": batch, "seq_len": seq_len, "heads": [heads, kv, dim], "chosen": str(backend_of(chosen))}
            for backend in (None, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                only: AbstractContextManager[object] = nullcontext() if backend is None else sdpa_kernel([backend])
                try:
                    with only:
                        found = self._attention(q, k, v)
                    self._log.tell("attention", **said, backend=str(backend), **found)
                except RuntimeError as error:
                    self._log.tell("attention", **said, backend=str(backend), error=_told(error))

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
        def forward() -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        batch, heads, seq_len, dim = q.shape
        flop = 2.0 * batch * heads * seq_len**2 * dim  # of forward; half of the products are masked
        training = self._steady(forward, 0.2)
        out = forward()
        gradient = torch.randn_like(out)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        back = self._steady(backward, 0.3)
        peak = torch.cuda.max_memory_allocated() - before
        return {
            "forward": training,
            "backward": back,
            "forward_tflops": round(flop / training["late_ms"] * 1e-9, 1),
            "backward_tflops": round(2.5 * flop / back["late_ms"] * 1e-9, 1),
            "backward_peak_bytes": peak,
            "result_bytes": q.nbytes + k.nbytes + v.nbytes,
            "backward_repeats_exactly": all(map(torch.equal, backward(), backward())),
        }

    def products(self) -> None:
        """Matrix products of a layer, and the largest of them for eight seconds: rates under power limits."""
        rows, share = (64, 32) if self._tiny else (_ROWS, 1)
        for name, inner, outer in (
            ("q,o", _WIDTH, _WIDTH),
            ("k,v", _WIDTH, 1024),
            ("gate,up", _WIDTH, _MLP),
            ("down", _MLP, _WIDTH),
        ):
            x, g = self._random(rows, inner // share), self._random(rows, outer // share)
            w = self._random(outer // share, inner // share)
            calls: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
                "forward": lambda x, g, w: x @ w.t(),  # noqa: ARG005 - all have the same arguments
                "input's gradient": lambda x, g, w: g @ w,  # noqa: ARG005
                "weight's gradient": lambda x, g, w: g.t() @ x,  # noqa: ARG005
            }
            for what, call in calls.items():
                found = self._steady(functools.partial(call, x, g, w), 0.4)
                rate = 2e-9 * rows * x.shape[1] * g.shape[1] / found["late_ms"]
                self._log.tell("product", name=name, what=what, rows=rows, tflops=round(rate, 1), **found)
        x, w = self._random(rows, _WIDTH // share), self._random(_MLP // share, _WIDTH // share)
        begin_s, rates, seconds = time.perf_counter(), [], 0.05 if self._tiny else 8.0
        while time.perf_counter() - begin_s < seconds:
            ms = gpu_ms(lambda: x @ w.t(), 4 if self._tiny else 200)
            rates.append(round(2e-9 * rows * x.shape[1] * w.shape[0] / ms, 1))
        self._log.tell("sustained products", seconds=seconds, tflops=rates)

    def elementwise(self) -> None:
        """Elementwise kernels by size, and the norm that eager layers spend most bytes on."""
        for power in range(16 if self._tiny else 20, 17 if self._tiny else 29):
            n = 1 << power
            a, b, c = (torch.ones(n, device=_DEVICE, dtype=_BF16) for _ in range(3))
            wide = torch.empty(n, device=_DEVICE)
            calls: Mapping[str, tuple[Callable[[], object], int]] = {  # and bytes per element
                "add": (functools.partial(torch.add, a, b, out=c), 6),
                "silu": (functools.partial(torch.nn.functional.silu, a), 4),
                "cast": (functools.partial(wide.copy_, a), 6),
            }
            rates = {
                name: round(n * size / self._steady(call, 0.03)["late_ms"] * 1e-9, 3)
                for name, (call, size) in calls.items()
            }
            self._log.tell("elementwise", log2_elements=power, tb_per_s=rates)
        rows, width = (64, 128) if self._tiny else (_ROWS, _WIDTH)
        x, w = self._random(rows, width).requires_grad_(), torch.ones(width, device=_DEVICE, dtype=_BF16)
        w.requires_grad_()

        def eager(x: Tensor, w: Tensor) -> Tensor:
            wide = x.to(torch.float32)
            return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

        ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "eager": eager,
            "rms_norm": lambda x, w: torch.nn.functional.rms_norm(x, (width,), w, 1e-5),
        }
        if not self._tiny:
            ways["compiled"] = torch.compile(eager)
        for name, norm in ways.items():
            try:
                forward = self._steady(functools.partial(norm, x, w), 0.1)
                out = norm(x, w)
                gradient = torch.randn_like(out)
                backward = self._steady(
                    functools.partial(torch.autograd.grad, out, (x, w), gradient, retain_graph=True),
                    0.1,
                )
                self._log.tell("norm", name=name, rows=rows, width=width, forward=forward, backward=backward)
            except RuntimeError as error:
                self._log.tell("norm", name=name, error=_told(error))

    def layer(self) -> None:
        """One decoder layer of Llama-3.1-8B: forward, recomputation and backward, eager and with compiled parts."""
        for batch, seq_len in ((1, 64),) if self._tiny else ((4, 2048), (2, 4096), (8, 2048)):
            for compiled in (False,) if self._tiny or seq_len != 2048 else (False, True):
                try:
                    found = self._layer(batch, seq_len, compiled=compiled)
                    self._log.tell("layer", tokens=batch * seq_len, seq_len=seq_len, compiled=compiled, **found)
                except RuntimeError as error:
                    self._log.tell("layer", tokens=batch * seq_len, compiled=compiled, error=_told(error))

    def _layer(self, batch: int, seq_len: int, *, compiled: bool) -> dict[str, Any]:
        from transformers import LlamaConfig  # noqa: PLC0415 - other steps go on without it
        from transformers.models.llama.modeling_llama import (  # noqa: PLC0415
            LlamaDecoderLayer,
            LlamaRotaryEmbedding,
        )

        width, mlp, heads, kv = (64, 128, 4, 2) if self._tiny else (_WIDTH, _MLP, _HEADS, _KV_HEADS)
        sizes: dict[str, Any] = {
            "hidden_size": width,
            "intermediate_size": mlp,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "max_position_embeddings": 8192,
            "vocab_size": 128,
            "attn_implementation": "sdpa",
        }
        config = LlamaConfig(**sizes)
        with torch.device(_DEVICE):
            one: Any = LlamaDecoderLayer(config, 0).to(_BF16)
            rotary: Any = LlamaRotaryEmbedding(config)
        x = self._random(batch, seq_len, width).requires_grad_()
        place = rotary(x, torch.arange(seq_len, device=_DEVICE)[None])
        if compiled:
            for part in (one.self_attn, one.mlp, one.input_layernorm, one.post_attention_layernorm):
                part.forward = torch.compile(part.forward, dynamic=False)
        gradient = torch.randn_like(x)

        def whole() -> None:
            out: Any = checkpoint(
                one,
                x,
                position_embeddings=place,
                attention_mask=None,
                use_reentrant=False,
                preserve_rng_state=False,
            )
            out.backward(gradient)
            for p in (x, *one.parameters()):
                p.grad = None

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = self._steady(whole, 1.5)
        begin_s, repeats = time.perf_counter(), 1 if self._tiny else 5
        for _ in range(repeats):
            whole()
        issue_ms = (time.perf_counter() - begin_s) * 1e3 / repeats
        torch.cuda.synchronize()
        num_weights = sum(p.numel() for p in one.parameters() if p.dim() == 2)
        rate = 2e-9 * num_weights * batch * seq_len / found["late_ms"]
        return {
            **found,
            "host_issue_ms": round(issue_ms, 3),
            "peak_bytes": torch.cuda.max_memory_allocated() - before,
            "tflops_of_products": round(4 * rate, 1),  # forward, again, and twice in backward
            "tflops_of_model": round(3 * rate, 1),
        }

    # --- host memory and the link ---

    def pinning(self) -> None:
        """How fast memory is touched, registered and let go, in huge pages and in small ones."""
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for huge in (True, False):
            num_bytes = (1 << 22) if self._tiny else (8 << 30) // (1 if huge else 4)
            begin_s = time.perf_counter()
            values = _block(num_bytes, huge=huge)
            touch_s, free = time.perf_counter() - begin_s, torch.cuda.mem_get_info()[0]
            begin_s = time.perf_counter()
            code = cudart.cudaHostRegister(values.data_ptr(), num_bytes, 0)
            register_s, free_after = time.perf_counter() - begin_s, torch.cuda.mem_get_info()[0]
            begin_s = time.perf_counter()
            cudart.cudaHostUnregister(values.data_ptr())
            gb = num_bytes / 1e9
            self._log.tell(
                "pinning",
                huge=huge,
                gb=gb,
                code=str(code),
                threads=torch.get_num_threads(),
                touch_gb_per_s=round(gb / touch_s, 2),
                register_gb_per_s=round(gb / register_s, 2),
                unregister_s=round(time.perf_counter() - begin_s, 3),
                device_bytes_per_gb=(free - free_after) / gb,
            )
        begin_s, num_bytes = time.perf_counter(), 1 << (20 if self._tiny else 32)
        torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._log.tell("pinned by torch", gb=num_bytes / 1e9, seconds=round(time.perf_counter() - begin_s, 3))

    def link(self) -> None:
        """Copies by size, several at once, and beside products."""
        link = _Link((1 << 20) if self._tiny else (1 << 28), 0.02 if self._tiny else 0.4)
        for power in (16, 18) if self._tiny else (16, 18, 20, 22, 24, 26, 28):
            down, up = (link.gb_per_s((way,), 1 << power)[0] for way in ("down", "up"))
            self._log.tell("copies", log2_bytes=power, down=down, up=up)
        several: tuple[tuple[Way, ...], ...] = (("down", "up"), ("down", "down"), ("up", "up"), ("down", "down", "up"))
        for ways in several:
            self._log.tell("copies at once", ways=ways, gb_per_s=link.gb_per_s(ways, 1 << 25))
        n, count = (64, 2) if self._tiny else (8192, 8)
        a = self._random(n, n)
        alone_ms, spent = gpu_ms(lambda: a @ a, 4 * count), list[float]()
        beside: tuple[tuple[Way, ...], ...] = (("down",), ("up",), ("down", "up"))
        for ways in beside:
            spent.clear()
            found = link.gb_per_s(ways, 1 << 25, lambda: spent.append(gpu_ms(lambda: a @ a, count, beside=True)))
            self._log.tell(
                "copies beside products",
                ways=ways,
                gb_per_s=found,
                product_ms_alone=round(alone_ms, 4),
                product_ms=round(statistics.median(spent), 4),
            )

    def host_update(self) -> None:
        """The host's AdamW by threads, alone and beside copies both ways: the memory that all updates share."""
        num_params = 1 << (16 if self._tiny else 27)
        try:
            update = _update_of_ullage(num_params)
        except ImportError as error:
            self._log.tell("host update", note=f"torch's fused AdamW in fp32 in place of Ullage's: {error}"[:300])
            update = _update_of_torch(num_params)
        link = _Link((1 << 20) if self._tiny else (1 << 28), 0.0)
        for threads in (1, 2) if self._tiny else (1, 4, 8, 12, 14, 15, 16):
            for beside in (False, True) if threads in {2, 8, 12, 14, 15} else (False,):
                update(threads)
                with link.copying() if beside else nullcontext([0, 0]) as moved:
                    begin_s, times = time.perf_counter(), list[float]()
                    while time.perf_counter() - begin_s < (0.02 if self._tiny else 0.7) or len(times) < 3:
                        at_s = time.perf_counter()
                        update(threads)
                        times.append(time.perf_counter() - at_s)
                    wall_s = time.perf_counter() - begin_s
                    copied = [round(num_bytes / wall_s / 1e9, 2) for num_bytes in moved]
                once_s = statistics.median(times)
                self._log.tell(
                    "host update",
                    threads=threads,
                    beside_copies=beside,
                    num_params=num_params,
                    ms=round(once_s * 1e3, 3),
                    dram_gb_per_s=round(_UPDATE_BYTES * num_params / once_s / 1e9, 1),
                    copies_gb_per_s=copied,
                )
        big = torch.ones(1 << (16 if self._tiny else 28), dtype=_BF16)
        other, before = torch.ones_like(big), torch.get_num_threads()
        for threads in (1, 2) if self._tiny else (2, 8, 14):
            torch.set_num_threads(threads)
            big.add_(other)
            begin_s = time.perf_counter()
            for _ in range(4):
                big.add_(other)
            rate = 4 * 3 * big.nbytes / (time.perf_counter() - begin_s) / 1e9
            self._log.tell("host accumulation", threads=threads, gb_per_s=round(rate, 1))
        torch.set_num_threads(before)


def _update_of_ullage(num_params: int) -> Callable[[int], object]:
    from ullage.calibrate.kernels import cpu_adamw  # noqa: PLC0415 - the probe runs without it

    state = [torch.full((num_params,), value).numpy() for value in (0.02, 1e-3, 1e-6)]
    narrow = [torch.full((num_params,), value, dtype=torch.int16).numpy().view("uint16") for value in (0x3A83, 0)]
    return lambda threads: cpu_adamw((*state, *narrow), threads)


def _update_of_torch(num_params: int) -> Callable[[int], object]:
    p = torch.zeros(num_params, requires_grad=True)
    p.grad = torch.full_like(p, 1e-3)
    optimizer = torch.optim.AdamW([p], fused=True)

    def update(threads: int) -> None:
        torch.set_num_threads(threads)
        optimizer.step()

    return update


def _block(num_bytes: int, *, huge: bool) -> Tensor:
    """Return touched host memory, uint8 ``[num_bytes]``, in huge pages or in small ones."""
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).zero_()


class _Link:
    """Buffers on both sides of the link, and a stream for each.

    Args:
        num_bytes: of each buffer.
        seconds: of each measurement.
    """

    def __init__(self, num_bytes: int, seconds: float) -> None:
        self._num_bytes, self._seconds = num_bytes, seconds
        self._host = [_block(num_bytes, huge=True) for _ in range(3)]
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for block in self._host:
            cudart.cudaHostRegister(block.data_ptr(), num_bytes, 0)
        self._device = [torch.ones(num_bytes, dtype=torch.uint8, device=_DEVICE) for _ in range(3)]
        self._streams = [torch.cuda.Stream() for _ in range(3)]  # type: ignore[no-untyped-call]

    def _copy(self, number: int, way: Way, piece: slice) -> None:
        source, target = self._host[number], self._device[number]
        if way == "up":
            source, target = target, source
        target[piece].copy_(source[piece], non_blocking=True)

    def gb_per_s(
        self, ways: Sequence[Way], piece_bytes: int, beside: Callable[[], object] | None = None
    ) -> list[float]:
        """Return the rate of each of some copies at once, in pieces; one thread issues them, and what is beside."""
        piece_bytes = min(piece_bytes, self._num_bytes)
        begin_s, moved = time.perf_counter(), 0
        while not moved or time.perf_counter() < begin_s + self._seconds:
            for number, way in enumerate(ways):
                with torch.cuda.stream(self._streams[number]):
                    for at in range(0, self._num_bytes, piece_bytes):
                        self._copy(number, way, slice(at, at + piece_bytes))
            moved += self._num_bytes
            if beside is not None:
                beside()
            for stream in self._streams[: len(ways)]:
                stream.synchronize()
        return [round(moved / (time.perf_counter() - begin_s) / 1e9, 2)] * len(ways)

    @contextmanager
    def copying(self) -> Iterator[list[int]]:
        """Copy both ways, from a thread each, until the end; yield the bytes that have passed each way."""
        stop, moved = threading.Event(), [0, 0]

        def copies(number: int, way: Way) -> None:
            torch.cuda.set_device(0)
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._streams[number]):
                while not stop.is_set():
                    self._copy(number, way, slice(None))
                    arrived.record()
                    arrived.synchronize()
                    moved[number] += self._num_bytes

        pairs: tuple[tuple[int, Way], ...] = ((0, "down"), (1, "up"))
        threads = [threading.Thread(target=copies, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        try:
            yield moved
        finally:
            stop.set()
            for thread in threads:
                thread.join()
