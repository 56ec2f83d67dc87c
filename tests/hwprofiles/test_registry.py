import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles import registry
from hwprofiles.registry import (
    ProfileError,
    canonical_json,
    list_profiles,
    load_profile,
    local_profile_path,
    profile_of,
    save_profile,
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def broken(change):
    """Return the text of the h100 profile with ``change`` applied to its JSON."""
    data = json.loads(canonical_json(load_profile("h100")))
    change(data)
    return json.dumps(data)


@pytest.mark.usefixtures("home")
def test_a_built_in_name_comes_before_a_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_profile(load_profile("gh200"), tmp_path / "h100")
    assert load_profile("h100").name == "h100"
    assert load_profile("./h100").name == "gh200"


@pytest.mark.usefixtures("home")
def test_a_built_in_name_may_be_written_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_profile("RTX4090").name == load_profile("rtx 4090").name == "rtx-4090"
    letters = [registry._letters(name) for name in list_profiles()]
    assert len(set(letters)) == len(letters)
    save_profile(load_profile("gh200"), tmp_path / "H100")
    assert load_profile("H100").name == "gh200"


@pytest.mark.usefixtures("home")
def test_local_is_what_was_saved_for_this_machine():
    assert "local" not in list_profiles()
    with pytest.raises(ProfileError, match="run `ullage calibrate` first"):
        load_profile("local")
    mine = load_profile("h100").model_copy(update={"name": "mine"})
    save_profile(mine, local_profile_path())
    assert load_profile("local") == mine
    assert list_profiles()[-1] == "local"


def test_where_the_local_profile_lives(monkeypatch, tmp_path):
    monkeypatch.setattr(registry.platform, "node", lambda: "box")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ULLAGE_HOME", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert local_profile_path() == tmp_path / ".local" / "share" / "ullage" / "box.json"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert local_profile_path() == tmp_path / "data" / "ullage" / "box.json"
    monkeypatch.setenv("ULLAGE_HOME", str(tmp_path / "home"))
    assert local_profile_path() == tmp_path / "home" / "box.json"


def test_a_saved_profile_reads_back_equal_and_leaves_nothing_else(tmp_path):
    profile = load_profile("polaris-a100-40g")
    path = tmp_path / "deep" / "er" / "p.json"
    save_profile(profile, path)
    assert load_profile(str(path)) == profile
    assert [p.name for p in path.parent.iterdir()] == ["p.json"]
    save_profile(profile, path)
    assert canonical_json(load_profile(str(path))) == canonical_json(profile)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / "p.json"
    save_profile(load_profile("h100"), path)
    before = path.read_bytes()

    def fail(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail) if step == "fsync" else monkeypatch.setattr(type(path), "replace", fail)
    with pytest.raises(OSError, match="No space"):
        save_profile(load_profile("gh200"), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_complete_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    path, calls = tmp_path / "p.json", []
    fsync, replace = os.fsync, type(path).replace
    profile = load_profile("h100")
    size = len(canonical_json(profile).encode())

    def spy_fsync(descriptor):
        calls.append(("fsync", os.fstat(descriptor).st_size))
        fsync(descriptor)

    def spy_replace(self, target):
        calls.append(("replace", size))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(type(path), "replace", spy_replace)
    save_profile(profile, path)
    assert calls == [("fsync", size), ("replace", size)]


@given(st.permutations(sorted(json.loads(canonical_json(load_profile("h100"))))))
def test_the_canonical_form_does_not_depend_on_how_the_file_was_written(keys):
    data = json.loads(canonical_json(load_profile("h100")))
    data["device"]["memory_bytes"]["value"] = int(data["device"]["memory_bytes"]["value"])
    data["pfs"] = None
    text = json.dumps({**{key: data[key] for key in keys}, "pfs": None})
    assert canonical_json(profile_of(json.loads(text), "x")) == canonical_json(load_profile("h100"))


def test_the_canonical_form_has_every_number():
    profile = load_profile("h100")
    text = broken(lambda d: d["device"]["issue_s"].update(value=d["device"]["issue_s"]["value"] * (1 + 1e-15)))
    assert canonical_json(profile_of(json.loads(text), "x")) != canonical_json(profile)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda d: d["device"]["memory_bytes"].update(unit="s"), ["device.memory_bytes", "'s'", "'bytes'", "convert"]),
        (lambda d: d["host"]["dram_bytes_per_s"].update(unit="bytes"), ["host.dram_bytes_per_s", "'bytes_per_s'"]),
        (lambda d: d["device"]["issue_s"].update(unit="count"), ["device.issue_s", "'count'", "'s'"]),
        (lambda d: d["device"]["gemm"]["bf16"].update(size_unit="bytes"), ["device.gemm.bf16", "'bytes'", "'flop'"]),
        (lambda d: d["host"]["optimizer"].update(size_unit="bytes"), ["host.optimizer", "'bytes'", "'params'"]),
        (lambda d: d["host_link"]["up"].update(size_unit="flop"), ["host_link.up", "'flop'", "'bytes'"]),
        (lambda d: d["nvme"]["read"].update(size_unit="params"), ["nvme.read", "'params'", "'bytes'"]),
        (lambda d: d["host_link"]["both_bytes_per_s"].update(value=0), ["host_link.both_bytes_per_s", "is 0", "above"]),
        (lambda d: d["device"]["memory_bytes"].update(value=-3), ["device.memory_bytes.value", "'-3'", "correct"]),
        (lambda d: d["device"]["memory_bytes"].update(unit="GB"), ["device.memory_bytes.unit", "'GB'", "'bytes'"]),
        (lambda d: d["device"].pop("issue_s"), ["device.issue_s", "required", "add it"]),
        (lambda d: d["host"].update(ram=7), ["host.ram", "'7'", "remove it"]),
        (lambda d: d["host"].update(num_optimizer_cores=999), ["host", "999", "112"]),
        (lambda d: d.update(topology=[["gpu0", "dram"]]), ["topology", "gpu7"]),
        (lambda d: d["topology"].append(["island", "bridge"]), ["separate parts", "island"]),
        (lambda d: d.pop("intra_node"), ["8 devices per node", "intra_node"]),
        (lambda d: d["device"]["gemm"]["bf16"]["points"].reverse(), ["device.gemm.bf16", "sizes must increase"]),
        (lambda d: [d["host"].update(a=1), d["host"].update(b=2)], ["host.a", "and 1 more"]),
        (lambda d: d.update(schema_version=2), ["schema_version 2", "reads 1", "ullage calibrate"]),
        (lambda d: d.pop("schema_version"), ["is not a profile", "no schema_version"]),
    ],
)
def test_a_broken_profile_is_refused_in_one_line_that_names_the_field(change, parts, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(broken(change))
    with pytest.raises(ProfileError) as caught:
        load_profile(str(path))
    message = str(caught.value)
    assert "\n" not in message
    for part in [str(path), *parts]:
        assert part in message


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"hello"])
def test_what_is_not_json_is_refused(content, tmp_path):
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"is (not JSON|empty)"):
        load_profile(str(path))


@pytest.mark.parametrize("content", ["[]", "3", "null"])
def test_json_that_is_no_profile_is_refused(content, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(ProfileError, match="no schema_version"):
        load_profile(str(path))


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("h10", ["'h10'", "did you mean h100", "rtx-4090", "path of a JSON file"]),
        ("RTX4091", ["did you mean rtx-4090"]),
        ("Z", ["unknown hardware 'Z'; built-in profiles are", "gh200"]),
        ("h100,a100-80", ["names several machines", "--beside"]),
        ("mine.json", ["no such file", "gh200"]),
        ("some/where", ["no such file"]),
    ],
)
def test_an_unknown_name_is_answered_with_what_there_is(text, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProfileError) as caught:
        load_profile(text)
    for part in parts:
        assert part in str(caught.value)


def test_fewer_drives_have_their_share() -> None:
    nvme = load_profile("rtx4090-12ssd").nvme
    assert nvme is not None
    third = nvme.striped(4)
    assert third.num_drives == 4
    assert third.capacity_bytes.value == pytest.approx(nvme.capacity_bytes.value / 3)
    for less, all_ in ((third.read, nvme.read), (third.write, nvme.write)):
        assert less.best_rate_per_s() == pytest.approx(all_.best_rate_per_s() / 3)
        assert less.time_s(1e9) == pytest.approx(all_.time_s(3e9))
