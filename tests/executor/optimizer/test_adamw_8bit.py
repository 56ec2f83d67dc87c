"""AdamW with moments in 8 bits: bitsandbytes' format, a float64 oracle, the same bits on host, device and threads."""

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from executor.memory.stream import by_value, converted
from executor.optimizer.adamw import AdamWParams
from executor.optimizer.adamw_8bit import KEYS, adamw_8bit_step
from executor.optimizer.adamw_narrow import adamw_narrow_
from executor.optimizer.blocks import (
    HAS_VBMI,
    NEAR,
    SCALES,
    SIGNED,
    UNSIGNED,
    _dynamic,
    borders,
    decoded,
    decoder,
    encode,
    encode_signed,
    encode_unsigned,
    position_function,
)
from executor.optimizer.passes import BLOCK, cut
from executor.optimizer.table import entry_of
from executor.optimizer.workers import WorkerTeam
from ullage import AdamW8bit

UNIT = 2.0**-24


def random_state(num_params, seed):
    """Return master, codes, scales and gradient; magnitudes span decades, and the gradient is bf16."""
    generator = torch.Generator().manual_seed(seed)

    def signed(low, high, size=num_params):
        magnitudes = 10 ** (low + (high - low) * torch.rand(size, generator=generator))
        return magnitudes * (torch.randint(0, 2, (size,), generator=generator) * 2 - 1)

    codes = [torch.randint(0, 256, (num_params,), generator=generator, dtype=torch.uint8) for _ in range(2)]
    scales = [signed(-5, 2, -(-num_params // BLOCK)).abs() for _ in range(2)]
    return [signed(-3, 1), *codes, *scales, signed(-6, 2).bfloat16()]


def stepped(state, params, step, scale=1.0, team=None):
    """Return master, codes and scales after a step on the host."""
    *held, gradient = (values.clone() for values in state)
    weight = np.zeros(len(gradient), np.uint16)
    bits = gradient.view(torch.uint16).numpy()
    adamw_8bit_step([values.numpy() for values in held], bits, weight, params, step, scale, team)
    written = torch.from_numpy(weight).view(torch.bfloat16)
    torch.testing.assert_close(written, held[0].bfloat16(), rtol=0, atol=0, equal_nan=True)
    return held


def moments_of(state):
    """Return first and second moments, float32."""
    return decoded(state[1], state[3], SIGNED), decoded(state[2], state[4], UNSIGNED)


def error_of_quantizing(values, table):
    """Return how far the nearest kept value may be: half of the widest gap around each, times the scale."""
    rows = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = rows.abs().amax(1, keepdim=True)
    gaps = torch.from_numpy(np.diff(table).astype(np.float64))
    place = torch.searchsorted(torch.from_numpy(table.astype(np.float64)), rows / scales.clamp_min(1e-38))
    around = [gaps[(place + shift).clamp(0, 254)] for shift in (-1, 0)]
    if table[0] < 0:
        beyond = torch.where(rows < table[0] * scales, 1 + float(table[0]), 0.0)
    else:  # what is nearest to 0 gets the least value above it
        beyond = torch.where(rows < float(table[1]) * scales, float(table[1]) / 2, 0.0)
    return (scales * (torch.maximum(*around) / 2 + beyond)).view(-1)[: len(values)]


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 1000), st.integers(0, 2**32 - 1), st.integers(1, 10**6), st.floats(1e-3, 10))
def test_a_step_is_float64_arithmetic_within_rounding_and_the_gaps_of_the_table(num_params, seed, step, scale):
    """Kept values are products of two float32: exact moments come from them. Then as with moments in bf16."""
    state = random_state(num_params, seed)
    params = AdamWParams(0.1, 0.9, 0.95, weight_decay=0.1)
    seen = stepped(state, params, step, scale)
    (m, v), w, g = (each.double() for each in moments_of(state)), state[0].double(), state[5].double()
    g = g * float(np.float32(scale))
    products = (0.9 * m).abs() + (0.1 * g).abs()
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    for rounded_state, exact, error, table in zip(
        moments_of(seen), (m, v), (5 * UNIT * products, 5 * UNIT * v), (SIGNED, UNSIGNED), strict=True
    ):
        most = torch.nn.functional.pad(exact.abs(), (0, -num_params % BLOCK)).view(-1, BLOCK).amax(1)
        rounded = 10 * UNIT * most.repeat_interleave(BLOCK)[:num_params]  # of the scale, quotient and product
        assert bool(
            ((rounded_state.double() - exact).abs() <= error_of_quantizing(exact, table) + error + rounded).all()
        )
    divisor = v.sqrt() / (1 - 0.95**step) ** 0.5 + 1e-8
    moved = 0.1 / (1 - 0.9**step) / divisor
    bound = 4 * UNIT * (w.abs() + moved * m.abs()) + moved * (12 * UNIT * m.abs() + 5 * UNIT * products)
    assert bool(((seen[0].double() - (w * 0.99 - moved * m)).abs() <= bound).all())


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 70_000), st.integers(0, 2**32 - 1), st.integers(1, 10**6), st.data())
def test_device_threads_and_cuts_give_the_same_bits(num_params, seed, step, data):
    *held, gradient = random_state(num_params, seed)
    params = AdamWParams(0.1)
    expected = stepped([*held, gradient], params, step)
    with WorkerTeam(3) as team:
        in_threads = stepped([*held, gradient], params, step, team=team)
    on_device = [values.clone() for values in held]
    adamw_narrow_(on_device[0], tuple(on_device[1:]), gradient.float(), params, step)
    at = BLOCK * data.draw(st.integers(0, -(-num_params // BLOCK)))
    ends = [(0, min(at, num_params)), (at, num_params)]
    parts = [stepped(cut([*held, gradient], *part), params, step) for part in ends if part[0] < part[1]]
    joined = [torch.cat(of_parts) for of_parts in zip(*parts, strict=True)]
    for whole, *others in zip(expected, in_threads, on_device, joined, strict=True):
        assert all(torch.equal(whole, other) for other in others)


@njit
def positions(values, position):
    found = np.empty(values.size, np.int64)
    for i in range(values.size):
        found[i] = position(values[i])
    return found


@njit
def encoded(values, factor, codes, encode_block):
    for start in range(0, values.size, BLOCK):
        encode_block(values[start : start + BLOCK], factor, codes[start : start + BLOCK])


@njit
def decoded_by(codes, scale, values, decode_block):
    decode_block(codes, scale, values)


@pytest.mark.parametrize(("table", "encode_block"), [(SIGNED, encode_signed), (UNSIGNED, encode_unsigned)])
def test_kernels_encode_by_arithmetic_to_the_nearest_code(table, encode_block):
    """Around every border and every value, among zeros (which are far from borders), and at random."""
    signed = table is SIGNED
    ends = borders(table)
    points = np.concatenate([ends, table, [0, -0.0, np.nextafter(np.float32(1), np.float32(2)), np.nan]])
    close = [points]
    for shift in range(1, 20):
        close += [(points.view(np.int32) + side * shift).view(np.float32) for side in (1, -1)]
    rng = np.random.default_rng(0)
    size = rng.uniform(0, 1, 1 << 16) * 10.0 ** rng.uniform(-9, 0, 1 << 16)
    random = size * rng.choice([-1, 1], size.size)
    values = np.concatenate([*close, random, np.linspace(-1, 1, 1 << 16)]).astype(np.float32)
    values = values[(np.abs(values) < 1.5) | np.isnan(values)]
    if not signed:
        values = np.abs(values)
    values = np.resize(values, -(-len(values) // BLOCK) * BLOCK)
    nearest = torch.bucketize(torch.from_numpy(values), torch.from_numpy(ends)).numpy()
    for factor in (1.0, 0.5):
        codes = np.zeros(len(values), np.uint8)
        encoded((values / np.float32(factor)).astype(np.float32), np.float32(factor), codes, encode_block)
        assert np.array_equal(codes, nearest)
    some = slice(5 * len(points))
    alone = np.zeros((5 * len(points), BLOCK), np.float32)  # no other value makes the block compare with borders
    alone[:, 7] = values[some]
    codes = np.zeros(alone.size, np.uint8)
    encoded(alone.ravel(), np.float32(1), codes, encode_block)
    assert np.array_equal(codes.reshape(alone.shape)[:, 7], nearest[some])


@pytest.mark.parametrize("table", [SIGNED, UNSIGNED])
def test_positions_of_borders_are_closer_to_whole_numbers_than_kernels_rely_on(table):
    signed = table is SIGNED
    position, bits = position_function(table, signed=signed)
    ends = borders(table)
    ends = ends[ends > 0][:-1]  # of the last, values are compared with it
    whole = np.arange(len(ends)) + (1 if signed else 3)  # second moments have no border above 0
    for steps in (-1, 0, 1):
        off = positions((ends.view(np.int32) + steps).view(np.float32), position) - (whole << bits)
        assert np.abs(off).max() < NEAR


@pytest.mark.parametrize(
    ("table", "in_registers"),
    [
        (SIGNED, False),
        pytest.param(UNSIGNED, True, marks=pytest.mark.skipif(not HAS_VBMI, reason="a processor without VBMI")),
    ],
)
def test_kernels_decode_what_the_table_has(table, in_registers):
    codes = np.random.default_rng(0).permutation(np.arange(3 * 256) % 256).astype(np.uint8)
    scale = np.float32(0.3)
    for part in (codes, codes[:BLOCK], codes[5:200], codes[:1], codes[:0]):
        values = np.full(len(part) + 1, 7, np.float32)
        decoded_by(part, scale, values, decoder(table, in_registers=in_registers))
        assert np.array_equal(values[:-1], table[part] * scale)
        assert values[-1] == 7


def test_values_are_made_on_the_host_whatever_the_default_device():
    with torch.device("meta"):
        assert np.array_equal(_dynamic(signed=True), SIGNED)


@pytest.fixture(scope="module")
def bitsandbytes():
    return pytest.importorskip("bitsandbytes")


def test_values_and_codes_are_those_of_bitsandbytes(bitsandbytes):
    """Of its operators for any device; those for CPUs take the nearest of 65,536 equal steps first."""
    default = torch._C.DispatchKey.CompositeExplicitAutograd
    quantize = torch.ops.bitsandbytes.quantize_blockwise.default
    generator = torch.Generator().manual_seed(0)
    for signed, table in ((True, SIGNED), (False, UNSIGNED)):
        theirs = bitsandbytes.functional.create_dynamic_map(signed=signed)
        assert np.array_equal(table, theirs.numpy())
        ends = torch.from_numpy(borders(table))
        ends = ends[ends.isfinite()]
        near = [torch.nextafter(ends, ends + shift) for shift in (-1, 0, 1)]
        values = torch.cat(
            [*near, theirs, torch.zeros(3 * BLOCK), 10 ** (torch.rand(1 << 14, generator=generator) * -9)]
        )
        values = values[: len(values) // BLOCK * BLOCK]
        values[::BLOCK] = 1
        values[: 40 * BLOCK] *= 3e-5
        codes, scales = torch.zeros(len(values), dtype=torch.uint8), torch.zeros(len(values) // BLOCK)
        encode(values.clone(), codes, scales, table)
        expected = quantize._op_dk(default, values, theirs, BLOCK)
        assert torch.equal(codes, expected[0] if signed else expected[0].clamp_min(1))
        assert torch.equal(scales, expected[1])


def test_training_is_no_further_from_fp32_state_than_with_bitsandbytes(bitsandbytes):
    """After each step from the same state: its weights within rounding, and moments at least as close."""
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.zeros(40 * BLOCK)) for _ in range(2))
    own, other = AdamW8bit([ours], lr=1e-2), bitsandbytes.optim.AdamW8bit([theirs], lr=1e-2, min_8bit_size=0)
    names = dict(zip(KEYS, ("state1", "state2", "absmax1", "absmax2"), strict=True))
    for _ in range(5):
        gradient = torch.randn(40 * BLOCK, generator=generator) * 10 ** (
            torch.rand(40 * BLOCK, generator=generator) * -3
        )
        ours.grad, theirs.grad = gradient, gradient.clone()
        before = {key: own.state[ours][key].clone() for key in KEYS} if own.state else None
        own.step()
        other.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
        mine, his = own.state[ours], other.state[theirs]
        held = converted(by_value(before), ()) if before else dict.fromkeys(SCALES, torch.zeros(1))
        exact = held["exp_avg"] * 0.9 + 0.1 * gradient, held["exp_avg_sq"] * 0.999 + 0.001 * gradient * gradient
        for key, table, values in zip(SCALES, (SIGNED, UNSIGNED), exact, strict=True):
            errors = [
                (decoded(state[codes], state[scales], table) - values).abs()
                for state, codes, scales in ((mine, key, SCALES[key]), (his, names[key], names[SCALES[key]]))
            ]
            assert bool((errors[0] <= errors[1] + 4 * UNIT * mine[SCALES[key]].repeat_interleave(BLOCK)).all())
        for key, name in names.items():
            his[name].copy_(mine[key])


def test_rows_of_an_embedding_that_a_batch_does_not_have_move_no_further_than_others():
    """The first gradient has all magnitudes, the others are 0, as of tokens that come once."""
    first = torch.randn(64 * BLOCK, generator=torch.Generator().manual_seed(0))
    rows = torch.nn.Parameter(torch.zeros(64 * BLOCK))
    on_host = [torch.zeros(64 * BLOCK), *torch.zeros(2, 64 * BLOCK).byte(), *torch.zeros(2, 64)]
    optimizer = AdamW8bit([rows], lr=1e-3, weight_decay=0.0)
    for step in range(1, 6):
        rows.grad = first.clone() if step == 1 else torch.zeros(64 * BLOCK)
        on_host = stepped([*on_host, rows.grad.bfloat16()], AdamWParams(1e-3, weight_decay=0.0), step)
        optimizer.step()
    for weights in (rows.detach(), on_host[0]):
        assert float(weights.abs().max()) < 6e-3  # by at most lr in the first step, and less in each of the others


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_spoils_its_block_and_no_other(bad):
    state = random_state(3 * BLOCK, 0)
    state[5][BLOCK + 3] = bad
    on_device = [values.clone() for values in state]
    adamw_narrow_(on_device[0], tuple(on_device[1:5]), on_device[5].float(), AdamWParams(), 1)
    host = stepped(state, AdamWParams(), 1)
    for one, other in zip(host, on_device[:5], strict=True):
        torch.testing.assert_close(one[one.isfinite()], other[other.isfinite()], rtol=0, atol=0)
    assert not host[0][BLOCK + 3].isfinite()
    for moment in moments_of(host):
        assert not bool(moment[BLOCK : 2 * BLOCK].isfinite().any())
        assert bool(moment[:BLOCK].isfinite().all() and moment[2 * BLOCK :].isfinite().all())


def test_bad_hyper_parameters_and_scales_of_another_length_are_refused():
    with pytest.raises(ValueError, match="must be"):
        AdamW8bit([torch.nn.Parameter(torch.zeros(3))], betas=(0.9, 1.0))
    assert entry_of(AdamW8bit([torch.nn.Parameter(torch.zeros(3))])).planned_as == "adamw-8bit"
    state = [np.zeros(300, np.float32), *np.zeros((2, 300), np.uint8), *np.zeros((2, 1), np.float32)]
    with pytest.raises(AssertionError, match="a kernel checks nothing"):
        adamw_8bit_step(state, np.zeros(300, np.uint16), None, AdamWParams(), 1)


def test_blocks_that_were_cut_elsewhere_are_quantized_anew_and_others_stay():
    """As where tensor-parallel shards of a matrix become one."""
    values = {"exp_avg": torch.randn(4 * BLOCK), "exp_avg_sq": torch.rand(4 * BLOCK)}
    state = converted(values, KEYS)
    flat = by_value(state)
    assert all(torch.equal(again, state[key]) for key, again in converted(flat, KEYS).items())
    moved = converted({key: each[100:] for key, each in flat.items()}, KEYS)
    rounded_state = converted({key: each[100:] for key, each in flat.items()}, ())
    expected = converted(rounded_state, KEYS)
    assert all(torch.equal(again, expected[key]) for key, again in moved.items())
