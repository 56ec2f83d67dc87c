"""The longest sequences that an engine trained on a machine."""

from hwprofiles.profile import HardwareProfile
from ullage.rivals.cases.base import Case, CaseError, Metric, Number, Outcome
from ullage.rivals.cases.process import with_room_for_tensors
from ullage.rivals.cases.training import TrainingCase, simulated

STEP_TOKENS = 1024
"""In which sources give lengths."""
_MOST = 2**12  # steps


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
        """Find the longest sequence that fits, by bisection."""
        machine = with_room_for_tensors(self.run.machine_of(profile), self.run.beside_tensors_bytes(profile))
        low, high = 0, self.longest
        while high <= _MOST and self._fits(machine, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(machine, middle) else (low, middle)
        if not low:
            raise CaseError(f"case {self.id}: not even sequences of {STEP_TOKENS} tokens are predicted to fit")
        return Outcome({Metric.LONGEST: float(low * STEP_TOKENS)})

    def _fits(self, machine: HardwareProfile, length: int) -> bool:
        setup, decisions = self.run.model_copy(update={"seq_len": length * STEP_TOKENS}).decided(machine)
        return simulated(self.id, machine, setup.units, decisions).fits
