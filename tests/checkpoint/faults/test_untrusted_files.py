"""Files that somebody else made: whatever they hold, one clear error, no code run, nothing read outside, no memory."""

import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from amount import examples
from hypothesis import example, given
from hypothesis import strategies as st
from saving import TENSORS, save, values

from executor.checkpoint.files.system_calls import CheckpointError, DamagedError
from executor.checkpoint.format.manifest import Manifest
from executor.checkpoint.format.reader import Checkpoint, ReadRequest
from executor.checkpoint.places.folder import FolderPlace

MOST_BYTES = 4 << 20
"""Memory that reading this small checkpoint may take, whatever its manifest says, beside the readers' buffers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(FolderPlace(tmp_path_factory.mktemp("untrusted") / "store"), 1)


def signed(data):
    """Return a manifest's text with the digest that it should have: who makes one can do so too."""
    data = {key: value for key, value in data.items() if key != "digest"}
    text = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps(data | {"digest": hashlib.sha256(text).hexdigest()}, sort_keys=True, separators=(",", ":"))


def read_all(folder):
    """Read everything that a checkpoint says it has, as export does; return it by name."""
    with Checkpoint(folder) as checkpoint:
        checkpoint.verify()
        found = {}
        for name, record in checkpoint.manifest.tensors.items():
            found[name] = np.empty(record.num_values * 8, np.uint8)[: record.num_values * 4]
            checkpoint.read([ReadRequest(name, 0, found[name])])
        return found


def tried(folder):
    """Read all; return how that failed. It is one of our errors, and took no more memory than there is in files."""
    tracemalloc.start()
    try:
        found = read_all(folder)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return str(error)
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < MOST_BYTES
    assert all(np.array_equal(found[name].view(np.float32), values(name, 1)) for name in found if name in TENSORS)
    return None


def places(data, path=()):
    """Yield the paths of everything within plain data."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def changed(data, path, function):
    """Return a copy in which what is at a path is another thing."""
    if not path:
        return function(data)
    data = copy.deepcopy(data)
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = function(holder[path[-1]])
    return data


strange = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, 4095, 4096, 8192, 2**31, 2**40, 2**62, 2**63, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["../x", "/etc/passwd", "model/../../x", "model", ".", "a/b", "F64", "I64", "U8", "\ud800", "\0"]),
    st.lists(st.integers(0, 2**62), max_size=40),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
)
NUM_TRIED = {"manifests": 0, "read": 0}


@given(data=st.data(), value=strange, repeats=st.booleans())
def test_a_manifest_that_says_anything_is_read_in_bounds_or_refused(folder, data, value, repeats, tmp_path_factory):
    plain = json.loads((folder / "manifest.json").read_text())
    path = data.draw(st.sampled_from(sorted(places(plain), key=repr)))

    def other(present):
        return [*present, *present] if repeats and isinstance(present, list) else value

    target = tmp_path_factory.mktemp("any") / "step-00000001"
    shutil.copytree(folder, target)
    try:
        text = signed(changed(plain, path, other))
    except (TypeError, AttributeError):
        text = repr(value)
    (target / "manifest.json").write_text(text, errors="surrogatepass")
    NUM_TRIED["manifests"] += 1
    NUM_TRIED["read"] += tried(target) is None


@given(text=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode(errors="ignore")))
@example(text=b"[" * 100_000)
@example(text=b'{"version": 1, "step": ' + b"9" * 100_000 + b"}")
@example(text=b'{"version":1,"step":1,"files":[],"tensors":{},"extra":{"x":1e999},"digest":""}')
@example(text=b'{"version":1,"step":1,"files":[],"tensors":{},"extra":{"x":' + b"9" * 10_000 + b'},"digest":""}')
@example(
    text=b'{"version":1,"step":1,"files":[],"tensors":{},"extra":{"x":' + b"[" * 150 + b"]" * 150 + b'},"digest":""}'
)
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(DamagedError):
        Manifest.read(text)


def with_shape(data, shape, **more):
    """Let one tensor have another shape, with a fragment that says it is all there."""
    size = int(np.prod([int(n) for n in shape], dtype=object))
    record = data["tensors"]["w"]
    record["shape"] = shape
    record["fragments"] = [record["fragments"][0] | {"start": 0, "stop": size} | more]


HOSTILE = {
    "a tensor of more bytes than its file": (lambda d: with_shape(d, [2**40]), "overlap in .*, or go beyond its end"),
    "a tensor of no bytes and endless shape": (
        lambda d: with_shape(d, [0, 2**62, 2**62]),
        "which is too large for a tensor",
    ),
    "more dimensions than tensors have": (lambda d: with_shape(d, [1] * 1000), "at most 32 items"),
    "two tensors of the same bytes": (
        lambda d: d["tensors"].__setitem__("again", d["tensors"]["w"]),
        "values overlap in model/values.safetensors",
    ),
    "one file as two": (lambda d: d["files"].append(d["files"][0]), "lists one file twice"),
    "a chunk that no memory holds": (
        lambda d: d["files"][0].update(chunk_bytes=2**50, checksums=d["files"][0]["checksums"][:1]),
        "less than or equal to 67108864 at files.0.chunk_bytes",
    ),
    "chunks of a byte": (lambda d: d["files"][0].update(chunk_bytes=1), "at files.0.chunk_bytes"),
    "fewer checksums than chunks": (
        lambda d: d["files"][0].update(checksums=d["files"][0]["checksums"][:-1]),
        "has another number of checksums than chunks",
    ),
    "a fragment that runs backwards": (
        lambda d: d["tensors"]["b"].update(
            fragments=[
                d["tensors"]["b"]["fragments"][0] | {"stop": 61},
                d["tensors"]["b"]["fragments"][0] | {"start": 61},
            ]
        ),
        "are missing, or present twice|overlap",
    ),
    "a file that is not there": (
        lambda d: [f.update(file=99) for f in d["tensors"]["w"]["fragments"]],
        "are missing, or present twice",
    ),
    "a type that is none": (lambda d: d["tensors"]["w"].update(dtype="O"), "at tensors.w.dtype"),
    "a way out of the folder": (lambda d: d["files"][0].update(path="../x"), "at files.0.path"),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_manifest_is_refused_by_name(folder, change, message, tmp_path):
    shutil.copytree(folder, tmp_path / "step-00000001")
    data = json.loads((folder / "manifest.json").read_text())
    change(data)
    (tmp_path / "step-00000001/manifest.json").write_text(signed(data))
    with pytest.raises(DamagedError, match=message):
        read_all(tmp_path / "step-00000001")


@pytest.mark.parametrize("name", ["manifest.json", "model/values.safetensors"])
@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "device", "link to a folder"])
def test_what_is_no_plain_file_of_the_folder_is_refused_at_once(folder, name, kind, tmp_path):
    """A link leads elsewhere, a pipe waits for ever, and a device never ends."""
    target = tmp_path / "step-00000001"
    shutil.copytree(folder, target)
    path = target / name
    outside = tmp_path / "outside"
    if kind == "link to a folder":
        if name == "manifest.json":
            return
        shutil.move(path.parent, outside)
        path.parent.symlink_to(outside)
    else:
        shutil.move(path, outside)
        makes = {
            "link": lambda: path.symlink_to(outside),
            "folder": path.mkdir,
            "pipe": lambda: os.mkfifo(path),
            "device": lambda: path.symlink_to("/dev/zero"),
        }
        makes[kind]()
    assert path.name in (tried(target) or "")


def test_a_manifest_of_any_length_is_not_read_into_memory(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "step-00000001")
    with (tmp_path / "step-00000001/manifest.json").open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    assert "it has more than 1,073,741,824 B" in (tried(tmp_path / "step-00000001") or "")


@given(position=st.integers(0, 30_000), length=st.integers(0, 3000), byte=st.integers(0, 255))
def test_a_shard_that_holds_anything_is_found_to_be_damaged(folder, position, length, byte, tmp_path_factory):
    target = tmp_path_factory.mktemp("shard") / "step-00000001"
    shutil.copytree(folder, target)
    path = target / "model/values.safetensors"
    whole = path.read_bytes()
    position %= len(whole)
    damaged = whole[:position] + bytes([byte]) * min(length, len(whole) - position) + whole[position + length :]
    path.write_bytes(damaged)
    failure = tried(target)
    assert (failure is None) == (damaged == whole)
    assert failure is None or "values.safetensors is damaged between" in failure


def test_nothing_of_a_checkpoint_is_run(folder):
    """A process that reads everything compiles, evaluates, unpickles, starts and connects to nothing meanwhile."""
    code = """
import sys
def hook(event, args):
    if event in {"exec", "compile", "pickle.find_class", "os.system", "subprocess.Popen", "socket.connect"}:
        if sys.armed: print(event, args)
sys.armed = False
sys.addaudithook(hook)
from pathlib import Path
from executor.checkpoint.format.reader import Checkpoint, ReadRequest
import numpy as np
sys.armed = True
with Checkpoint(Path(sys.argv[1])) as checkpoint:
    checkpoint.verify()
    for name, record in checkpoint.manifest.tensors.items():
        checkpoint.read([ReadRequest(name, 0, np.empty(4 * record.num_values, np.uint8))])
sys.armed = False
print("read")
"""
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout == "read\n"


def test_what_was_tried_is_reported(capsys):
    with capsys.disabled():
        sys.stdout.write(
            f"\n{NUM_TRIED['manifests']} changed manifests: {NUM_TRIED['read']} read, the others refused\n"
        )
    assert NUM_TRIED["manifests"] >= examples(100)
