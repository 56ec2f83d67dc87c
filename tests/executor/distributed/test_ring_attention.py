"""Keys and values that pass between ranks, here threads, against PyTorch's attention to all of them."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.distributed.groups import Group
from executor.distributed.products import number_of
from executor.distributed.ring_attention import (
    Redirected,
    Ring,
    attend_in_ring,
    gradients_in_ring,
    halves,
    own_tokens,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


class Mailbox:
    """What ranks send each other."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=60)
        self.sent = [None] * size


class ThreadGroup:
    """A group of ranks that are threads of this process."""

    def __init__(self, mailbox, rank, size):
        self._mailbox, self.rank, self.size = mailbox, rank, size

    def all_to_all(self, received, sent, num_received, num_sent):
        assert num_sent[(self.rank + 1) % self.size] == 1 == sum(num_sent)
        self._exchange(sent, lambda all_sent: received.copy_(all_sent[num_received.index(1)]))

    def all_gather(self, whole, own):
        self._exchange(own, lambda all_sent: whole.copy_(torch.cat(all_sent)))

    def reduce_scatter(self, own, values):
        self._exchange(values, lambda all_sent: own.copy_(sum(all_sent)[self.rank * len(own) :][: len(own)]))

    def _exchange(self, sent, take):
        self._mailbox.sent[self.rank] = sent
        self._mailbox.barrier.wait()
        take(self._mailbox.sent)
        self._mailbox.barrier.wait()


assert {name for name in vars(ThreadGroup) if name[0] != "_"} <= vars(Group).keys()


def redirected(options):
    """Return a function that computes a rank's output, and the gradients of its query, key and value."""

    def run(ring, query, key, value, gradient):
        leaves = [each.requires_grad_() for each in (query, key, value)]
        with Redirected(ring, query.shape[2] * ring.group.size) as found:
            made = torch.nn.functional.scaled_dot_product_attention(*leaves, **options)
        assert found.has_attended
        made.backward(gradient)
        return made.detach(), *(leaf.grad for leaf in leaves)

    return run


def attended(ranks, tensors, run):
    """Return what each rank makes of its tokens, all at once."""
    mailbox, found = Mailbox(ranks), [None] * ranks

    def of_rank(rank):
        parts = halves(tensors[0].shape[2], ranks)[rank]
        ring = Ring(ThreadGroup(mailbox, rank, ranks), lambda work: work() or (lambda: None))
        found[rank] = run(ring, *(own_tokens(each, parts, 2) for each in tensors))

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def check(ranks, tensors, tolerance, run=None, **options):
    query, key, value = (each.clone().requires_grad_() for each in tensors[:3])
    made = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
    made.backward(tensors[3])
    expected = made.detach(), query.grad, key.grad, value.grad
    num_tokens, all_found = tensors[0].shape[2], attended(ranks, tensors, run or redirected(options))
    for parts, found in zip(halves(num_tokens, ranks), all_found, strict=True):
        for its, whole in zip(found, expected, strict=True):
            own = own_tokens(whole, parts, 2)
            assert (its - own).float().norm() <= tolerance * own.float().norm()


def make(shape, num_keys, dtype=torch.float32, device="cpu", seed=0):
    batch, heads, tokens, width = shape
    generator = torch.Generator().manual_seed(seed)
    counts = heads, num_keys, num_keys, heads
    return [torch.randn(batch, n, tokens, width, generator=generator).to(device, dtype) for n in counts]


@given(
    ranks=st.integers(2, 4),
    half=st.integers(1, 9),
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    width=st.sampled_from([4, 8, 16]),
    is_causal=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
)
def test_ranks_attend_to_what_all_have(ranks, half, batch, heads, width, is_causal, scale):
    tensors = make((batch, heads[0], 2 * half * ranks, width), heads[1])
    check(ranks, tensors, 1e-5, is_causal=is_causal, scale=scale, enable_gqa=heads[0] != heads[1])


@given(ranks=st.integers(2, 4), half=st.integers(1, 5), seed=st.integers(0, 100), is_shared=st.booleans())
def test_with_a_mask_ranks_gather_keys(ranks, half, seed, is_shared):
    num_tokens = 2 * half * ranks
    tensors = make((2, 4, num_tokens, 8), 4, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, 1, 1 if is_shared else num_tokens, num_tokens, generator=generator) < 0.5
    mask[..., 0] = True  # every token sees one
    check(ranks, tensors, 1e-5, attn_mask=mask)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=str)
@pytest.mark.parametrize("width", [64, 128])
def test_narrow_values_are_merged_in_float32(device, is_causal, heads, width):
    """Backward is called as such: autograd has one thread for all that a GPU computes, and these ranks wait in it."""
    tensors = make((2, heads[0], 512, width), heads[1], torch.bfloat16, device)

    def run(ring, query, key, value, gradient):
        query, passed = query.transpose(1, 2).contiguous().transpose(1, 2), torch.stack((key, value))
        result, sums = attend_in_ring(query, passed, is_causal, None, number_of(ring))
        of_query, of_passed = gradients_in_ring(ring, gradient, (query, passed, result, sums), is_causal, None)
        return result, of_query, *of_passed

    check(4, tensors, 1e-2, run, is_causal=is_causal, enable_gqa=heads[0] != heads[1])
