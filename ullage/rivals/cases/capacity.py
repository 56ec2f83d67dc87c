"""The longest sequences that an engine trained on a machine."""

import math
from collections.abc import Mapping
from typing import Final

from hwprofiles.profile import HardwareProfile
from ullage.rivals.cases.base import Case, CaseError, Metric, Number, Outcome
from ullage.rivals.cases.process import with_room_for_tensors
from ullage.rivals.cases.training import TrainingCase, simulated

STEP_TOKENS = 1024
"""In which sources give lengths."""
_MOST: Final = 2**12  # steps
_HALVES: Final = 6  # of so many lengths one is halfway, whatever the line says


class CapacityCase(Case):
    """The longest sequence of an engine.

    Attributes:
        run: the engine's run; its sequences are as long as what was measured.
        longest: thousands (1024) of tokens of the longest sequence that did not run out of memory.
    """

    run: TrainingCase
    longest: Number

    def measurements(self) -> dict[Metric, float]:
        """Return what was measured."""
        return {Metric.LONGEST: float(self.longest * STEP_TOKENS)}

    def check(self) -> None:
        """Check that the run can be expressed."""
        self.run.check()

    def _predict(self, profile: HardwareProfile) -> Outcome:
        """Find the longest sequence that fits. The room for it is nearly linear, so few lengths are simulated."""
        machine = with_room_for_tensors(self.run.machine_of(profile), self.run.beside_tensors_bytes(profile))
        rooms: dict[int, int] = {}
        fits, lacks, length = 0, _MOST + 1, min(self.longest, _MOST)
        while lacks - fits > 1:
            rooms[length] = self._room_bytes(machine, length)
            fits, lacks = (length, lacks) if rooms[length] >= 0 else (fits, length)
            length = min(max(_without_room(rooms), fits + 1), lacks - 1)
        if not fits:
            raise CaseError(f"case {self.id}: not even sequences of {STEP_TOKENS} tokens are predicted to fit")
        return Outcome({Metric.LONGEST: float(fits * STEP_TOKENS)})

    def _room_bytes(self, machine: HardwareProfile, length: int) -> int:
        setup, decisions = self.run.model_copy(update={"seq_len": length * STEP_TOKENS}).decided(machine)
        return simulated(self.id, machine, setup.units, decisions).room_bytes


def _without_room(rooms: Mapping[int, int]) -> int:
    """Return the next length to look at, by the room at others: the last before a line through two has none.

    That is at most twice the longest, and halfway between the nearest if the line does not come closer.
    """
    nearest, *others = sorted(rooms, key=lambda length: abs(rooms[length]))
    most = 2 * max(rooms)
    if not others:
        return nearest + (1 if rooms[nearest] >= 0 else -1)
    fits = max((length for length, room in rooms.items() if room >= 0), default=0)
    lacks = min((length for length, room in rooms.items() if room < 0), default=most)
    per_step = (rooms[nearest] - rooms[others[0]]) / (others[0] - nearest)
    if per_step <= 0 or not len(rooms) % _HALVES:
        return (fits + lacks) // 2
    return min(nearest + math.floor(rooms[nearest] / per_step), most)
