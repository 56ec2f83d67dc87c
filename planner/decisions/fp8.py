"""How the weights of products in fp8 move: as one byte each, and their scales and the unit's other weights beside."""

import dataclasses

ALIGNMENT_BYTES = 16
"""``torch._scaled_mm`` wants matrices that begin at a multiple of it."""
CAST_AT_ONCE = 1 << 22
"""Values of a resident shard that are cast at once on a device."""
_SCALE_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8Weights:
    """Sizes of one unit's trained weights where those of its products in fp8 are fetched or gathered in fp8.

    [Note: Weights in fp8] A unit's flat range begins with its other parameters, such as norms and biases, and ends with
    the weights of products in fp8. The host has an fp8 copy of the rank's shard of the whole range, a byte for each
    value (those of the others are unused), and a scale for each weight. It casts them anew when the shard has been
    updated, from its own weights, which stay. A shard that is resident on the device (ZeRO-3) has no such copy: each
    gather casts it, straight into the slot. A slot on the device has an fp8 block of the whole padded range; then,
    from the next multiple of 16 bytes on, the others in the type of weights; then, aligned, the scales. Each rank
    brings the first ``min(shard, others)`` values of its shard to the others' block, which so begins with all others.

    Attributes:
        shard_params: values of the unit's flat range in one rank's shard.
        num_others: values before the first weight of a product in fp8; a multiple of 16.
        num_scales: the number of weights of products in fp8.
        num_ranks: ranks that gather the range from their shards; 1 if each has all of it.
        weight_bytes: bytes of one value of the others.
    """

    shard_params: int
    num_others: int
    num_scales: int
    num_ranks: int
    weight_bytes: int

    @property
    def own_others(self) -> int:
        """The values that a rank brings in the type of weights."""
        return min(self.shard_params, self.num_others)

    @property
    def others_start_bytes(self) -> int:
        """Where the others begin in a slot."""
        return -(-self.num_ranks * self.shard_params // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @property
    def scales_bytes(self) -> int:
        """Bytes of all scales, in fp32."""
        return _SCALE_BYTES * self.num_scales

    @property
    def _own_bytes(self) -> int:
        return self.shard_params + self.weight_bytes * self.own_others

    @property
    def fetched_bytes(self) -> int:
        """Bytes of a fetch, without frozen weights."""
        return self._own_bytes + self.scales_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes that all ranks together bring to an all-gather, without frozen weights."""
        return self.num_ranks * self._own_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, without frozen weights."""
        others_bytes = self.weight_bytes * self.num_ranks * self.own_others
        return -(-(self.others_start_bytes + others_bytes) // _SCALE_BYTES) * _SCALE_BYTES + self.scales_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes on the host beside its weights: the fp8 copy of a shard, and the scales."""
        return self.shard_params + self.scales_bytes

    @property
    def cast_bytes(self) -> int:
        """Bytes of host memory that a cast moves: it reads a shard to find the largest values, and again to cast it."""
        return (2 * self.weight_bytes + 1) * self.shard_params

    @property
    def device_cast_workspace_bytes(self) -> int:
        """Bytes that a cast of a resident shard takes on the device: a chunk in fp32."""
        return 4 * min(self.shard_params, CAST_AT_ONCE)

    @property
    def saves(self) -> bool:
        """Whether a fetch moves fewer bytes than all weights in their own type."""
        return self.fetched_bytes < self.weight_bytes * self.shard_params
