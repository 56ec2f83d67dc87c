"""The power goes: what was not synced may be there, or not, or be zeros, in any combination.

A process that is killed leaves all its writes to the system, so killing cannot find a missing ``fsync``. Here the
operations of a writer are recorded and replayed on a model of a drive, which is stopped after every one of them. Of
the rest each file's writes, and each change of a folder, then came to the drive or not, independently. What results is
put into a real folder and read as ever.

[Note: Drive] The model is harsher than file systems are: names and bytes have no order among each other, a rename
comes to the drive without the name that it renames, and bytes that were not synced may read as zeros.
"""

import shutil
import sys

import numpy as np
import pytest
from saving import CountingFiles, save, step_of

from executor.checkpoint.files.system_calls import Files
from executor.checkpoint.places.folder import FolderPlace


class RecordingFiles(CountingFiles):
    """Files that keep a log of what was done, with the bytes."""

    def __init__(self, root):
        super().__init__()
        self.log = []
        self._root = root
        self._paths = {}

    def do(self, _number, name, plain, args):
        result = plain(self, *args)
        if name in {"create", "reuse"}:
            self._paths[result] = args[0]
        if name in {"create", "make_folder", "sync_folder", "remove", "remove_folder"}:
            self.log.append((name, self._name(args[0])))
        elif name == "rename":
            self.log.append((name, self._name(args[0]), self._name(args[1])))
        elif name == "write":
            self.log.append((name, self._name(self._paths[args[0]]), args[2], bytes(args[1][:result])))
        elif name in {"truncate", "allocate"}:
            self.log.append((name, self._name(self._paths[args[0]]), args[1]))
        elif name == "sync":
            self.log.append((name, self._name(self._paths[args[0]])))
        return result

    def _name(self, path):
        return tuple(path.relative_to(self._root.parent).parts)


class File:
    def __init__(self):
        self.durable = bytearray()
        self.pending = []  # functions of a bytearray

    def sync(self):
        for change in self.pending:
            change(self.durable)
        self.pending = []

    def crashed(self, choose):
        found = bytearray(self.durable)
        for change in self.pending:
            fate = choose(3)
            if fate:
                change(found, zeros=fate == 2)
        return found


class Folder:
    def __init__(self):
        self.durable = {}
        self.now = {}
        self.pending = []  # functions of a dict of names

    def change(self, function):
        function(self.now)
        self.pending.append(function)

    def sync(self):
        for change in self.pending:
            change(self.durable)
        self.pending = []

    def crashed(self, choose):
        found = dict(self.durable)
        for change in self.pending:
            if choose(2):
                change(found)
        return found


def write(offset, data):
    def change(content, *, zeros=False):
        end = offset + len(data)
        content.extend(bytes(max(end - len(content), 0)))
        content[offset:end] = bytes(len(data)) if zeros else data

    return change


def resize(length, *, grows_only):
    def change(content, *, zeros=False):  # noqa: ARG001 - as of a write
        if len(content) < length:
            content.extend(bytes(length - len(content)))
        elif not grows_only:
            del content[length:]

    return change


class Drive:
    """See [Note: Drive]."""

    def __init__(self):
        self.top = Folder()

    def apply(self, operation):
        name, path, *rest = operation
        if name == "create":
            made = File()
            self._folder(path).change(lambda names: names.__setitem__(path[-1], made))
        elif name == "make_folder":
            folder = Folder()
            self._folder(path).change(lambda names: names.__setitem__(path[-1], folder))
        elif name == "rename":
            moved, new = self._at(path), rest[0][-1]

            def rename(names):
                names.pop(path[-1], None)
                names[new] = moved

            self._folder(path).change(rename)
        elif name in {"remove", "remove_folder"}:
            self._folder(path).change(lambda names: names.pop(path[-1], None))
        elif name == "write":
            self._at(path).pending.append(write(*rest))
        elif name in {"truncate", "allocate"}:
            self._at(path).pending.append(resize(rest[0], grows_only=name == "allocate"))
        else:
            self._at(path).sync()

    def crash(self, target, choose):
        """Put what is left into a real folder."""
        self._crash(self.top, target, choose)

    def _crash(self, folder, target, choose):
        target.mkdir()
        for name, item in folder.crashed(choose).items():
            if isinstance(item, Folder):
                self._crash(item, target / name, choose)
            else:
                (target / name).write_bytes(item.crashed(choose))

    def _at(self, path):
        item = self.top
        for name in path:
            item = item.now[name]
        return item

    def _folder(self, path):
        return self._at(path[:-1])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the operations of four checkpoints, of which two are kept, with the steps where they were acknowledged."""
    root = tmp_path_factory.mktemp("recorded") / "store"
    files = RecordingFiles(root)
    store = FolderPlace(root, files)
    for step in (1, 2, 3, 4):
        save(store, step)
        files.log.append(("acknowledged", step))
        store.prune()
    return files.log


def fates(seed):
    """Return how a crash chooses: nothing, everything or zeros for all that is pending, or anything at random."""
    if seed < 3:
        return lambda count: min(seed, count - 1)
    rng = np.random.default_rng(seed)
    likely = rng.random()
    return lambda count: int(rng.integers(1, count)) if rng.random() < likely else 0


def lost(log, stops, seeds, folder):
    """Stop the drive after each of ``stops`` operations, in each way; return where something acknowledged was lost."""
    drive, acknowledged, found = Drive(), 0, []
    for number, operation in enumerate(log):
        if operation[0] == "acknowledged":
            acknowledged = operation[1]
        else:
            drive.apply(operation)
        for seed in seeds if number in stops else ():
            target = folder / "crashed"
            drive.crash(target, fates(seed))
            root = target / "store"
            if ((step_of(FolderPlace(root)) if root.is_dir() else None) or 0) < acknowledged:
                found.append((number, seed))
            shutil.rmtree(target)
    return found


@pytest.mark.parametrize(("every", "num_fates"), [(7, 5), pytest.param(1, 40, marks=pytest.mark.torture)])
def test_what_was_acknowledged_is_there_when_the_power_is_back(recorded, tmp_path, capsys, every, num_fates):
    stops = range(0, len(recorded), every)
    assert lost(recorded, stops, range(num_fates), tmp_path) == []
    with capsys.disabled():
        sys.stdout.write(f"\n{len(stops) * num_fates} losses of power survived\n")


def check_every_sync_is_needed(recorded, seeds, folder):
    """Without any one of the second checkpoint's, some loss of power after it was acknowledged loses it."""
    positions = [number for number, operation in enumerate(recorded) if operation[0] == "acknowledged"]
    syncs = [i for i in range(positions[0] + 1, positions[1]) if recorded[i][0] in {"sync", "sync_folder"}]
    assert len(syncs) == 7, "two files, the manifest, three folders, the name"
    for sync in syncs:
        log = [operation for number, operation in enumerate(recorded[: positions[1] + 1]) if number != sync]
        assert lost(log, [len(log) - 1], seeds, folder), f"{recorded[sync]} could be left out"


def test_every_sync_is_needed(recorded, tmp_path):
    check_every_sync_is_needed(recorded, range(40), tmp_path)
    positions = [number for number, operation in enumerate(recorded) if operation[0] == "acknowledged"]
    first = [i for i in range(positions[0]) if recorded[i][0] == "sync_folder" and len(recorded[i][1]) == 0]
    assert len(first) == 1, "the store's own name"
    log = [operation for number, operation in enumerate(recorded[: positions[0] + 1]) if number != first[0]]
    assert lost(log, [len(log) - 1], range(40), tmp_path)


def test_plain_files_have_the_operations_that_are_recorded():
    """An operation that is added to Files has to come into the model too."""
    known = {"make_folder", "create", "reuse", "allocate", "write", "truncate", "sync", "close", "sync_folder"}
    assert {name for name in vars(Files) if not name.startswith("_")} == known | {"rename", "remove", "remove_folder"}
