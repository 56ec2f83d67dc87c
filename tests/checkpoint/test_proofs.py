"""What is claimed of checkpoints, and which tests would turn red if it were not so.

``make torture`` runs all of them in full and prints how much each has tried; ``make test`` a part of the long ones.
"""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
KILLED, POWER, FAULTS = (
    f"checkpoint/faults/test_{name}.py" for name in ("killed_writers", "power_loss", "file_faults")
)
DAMAGED, UNTRUSTED = (f"checkpoint/faults/test_{name}.py" for name in ("damaged_checkpoints", "untrusted_files"))
STORE = "checkpoint/test_checkpoint_store.py"
RESTING, SAVING, STOPPED = (
    f"executor/training_state/test_{name}.py" for name in ("immutability", "saving", "stopped_drives")
)
COMMAND = "ullage/commands/test_checkpoint_command.py"

PROOFS = {
    "1 a writer that is killed anywhere loses nothing acknowledged, and mixes nothing": {
        KILLED: ("nothing_acknowledged_is_lost", "every_kill_point_one_behind_the_other"),
        COMMAND: ("a_run_that_is_ended_goes_on",),
    },
    "2 nor does a loss of power, and no sync could be left out": {
        POWER: ("what_was_acknowledged_is_there", "every_sync_is_needed", "plain_files_have_the_operations"),
    },
    "3 any operation may fail, be interrupted or cut short": {
        FAULTS: ("a_failing_operation_costs_one_checkpoint", "a_full_drive_is_reported"),
        SAVING: ("a_full_drive_costs_checkpoints_and_not_training",),
    },
    "4 whatever is not as it was written is found, and passed over": {
        DAMAGED: (
            "a_flipped_bit_anywhere",
            "another_length",
            "a_file_of_another_step",
            "swapped_files",
            "a_missing_file",
        ),
        SAVING: ("what_is_damaged_is_passed_over",),
        UNTRUSTED: (
            "a_manifest_that_says_anything",
            "a_hostile_manifest",
            "what_is_no_plain_file",
            "a_shard_that_holds_anything",
            "nothing_of_a_checkpoint_is_run",
        ),
    },
    "5 state is at rest while it is taken": {
        RESTING: ("what_is_taken_is_at_rest", "what_is_missing_in_the_schedule_is_seen"),
        "checkpoint/test_loans.py": ("what_changes_after_a_loan_is_settled",),
        "checkpoint/test_shard_layout.py": ("values_may_change_as_soon_as_they_were_given",),
    },
    "6 readers, writers and retention do not disturb one another": {
        STORE: ("two_writers_retention_and_a_reader_at_once", "what_a_dead_writer_left"),
    },
    "7 training that goes on is training that never stopped, under any plan and on any ranks": {
        SAVING: ("any_plan_goes_on_from_each", "what_ranks_share_goes_on_on_any_ranks", "every_optimizer_goes_on"),
        COMMAND: ("a_run_that_is_ended_goes_on",),
    },
    "8 a drive that does not answer is waited for no longer than was said": {
        STOPPED: ("training_does_without_a_drive_that_hangs",),
        FAULTS: ("a_drive_that_does_not_answer",),
        "checkpoint/test_loans.py": ("the_owner_waits_no_longer",),
        COMMAND: ("a_run_whose_drive_hangs",),
    },
    "9 of nodes with folders of their own, a lost one costs nothing that its neighbour has": {
        "executor/training_state/test_nodes.py": (
            "a_lost_node_costs_nothing",
            "of_neighbours_that_are_lost",
            "what_a_crash_or_damage_has_left",
            "drives_of_nodes",
        ),
        "checkpoint/test_agreement.py": ("all_hear_of_a_failure",),
        "ullage/execute/test_execute_ranks.py": ("goes_on_when_a_node_is_lost",),
    },
}


@pytest.mark.parametrize("proof", PROOFS)
def test_what_proves_it_is_there(proof):
    for path, names in PROOFS[proof].items():
        defined = re.findall(r"^def (test_\w+)", (TESTS / path).read_text(), re.MULTILINE)
        for name in names:
            assert any(name in function for function in defined), f"{path} has no test of {name}"
