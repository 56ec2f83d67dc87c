"""The one place through which files are written, and through which files are read whole."""

import contextlib
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import special_files
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles.files import check_output, check_regular, make_folder, read_json, read_whole, write_whole

DATA = st.binary(max_size=200)


@pytest.fixture
def foreign() -> Iterator[Path]:
    """A folder in which this user may make nothing; root, who may, is another user meanwhile."""
    with tempfile.TemporaryDirectory() as name:  # not of pytest, whose folders others cannot enter
        Path(name).chmod(0o555)
        if is_root := not os.geteuid():
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            if is_root:
                os.seteuid(0)
            Path(name).chmod(0o700)


def around(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir())


@given(before=st.none() | DATA, after=DATA, links=st.integers(0, 3))
def test_a_regular_file_is_replaced_and_links_to_it_stay(
    before: bytes | None, after: bytes, links: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also where the link leads to nothing yet, as a shell's ``>`` does."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "elsewhere").mkdir()
    real = path = folder / "elsewhere" / "file"
    if before is not None:
        real.write_bytes(before)
    for number in range(links):
        link = folder / f"link{number}"
        link.symlink_to(path if number % 2 else os.path.relpath(path, folder))
        path = link
    check_output("--output", path)
    write_whole(path, after)
    assert real.read_bytes() == after
    assert path.is_symlink() == bool(links)
    assert around(real) == ["file"]


def test_a_name_as_long_as_names_can_be_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    check_output("--output", path)
    write_whole(path, "text")
    assert path.read_text() == "text"
    with pytest.raises(ValueError, match=r"--output .*: File name too long; give the name of a file"):
        check_output("--output", tmp_path / ("n" * 256))


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("durable", [False, True])
def test_what_is_no_regular_file_is_written_into_and_stays(linked: bool, durable: bool, tmp_path: Path) -> None:
    data = b"a line\n" * 100_000  # more than a pipe holds
    null = tmp_path / "null"
    special_files.device(null, 3, os.devnull)
    with special_files.fifo(tmp_path / "fifo") as came, special_files.terminal(tmp_path / "terminal"):
        for name in ("fifo", "null", "terminal"):
            path = tmp_path / name
            if linked:
                path = tmp_path / f"to {name}"
                path.symlink_to(name)
            before = special_files.identity(path)
            check_output("--output", path)
            write_whole(path, data if name != "terminal" else "short\n", durable=durable)
            assert special_files.identity(path) == before
        assert came() == data
    assert not list(tmp_path.glob(".*"))


def test_a_full_device_is_an_error_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "full"
    special_files.device(path, 7, "/dev/full")
    before = special_files.identity(path)
    check_output("--output", path)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_whole(path, "text")
    assert caught.value.filename == str(path)
    assert special_files.identity(path) == before
    assert around(path) == ["full"]


@pytest.mark.parametrize("linked", [False, True])
def test_folders_sockets_and_drives_are_refused(linked: bool, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    kinds = ["folder", "socket"]
    if not os.geteuid():
        os.mknod(tmp_path / "drive", stat.S_IFBLK | 0o600, os.makedev(259, 1048575))
        kinds.append("drive")
    words = {"folder": "a folder", "socket": "a socket", "drive": "a block device"}
    with special_files.unix_socket(tmp_path / "socket"):
        for name in kinds:
            path = tmp_path / name
            if linked:
                path = tmp_path / f"to {name}"
                path.symlink_to(name)
            before = special_files.identity(path)
            with pytest.raises(ValueError, match=f"--output .* is {words[name]}; give the name of a file"):
                check_output("--output", path)
            with pytest.raises(ValueError, match=f"is {words[name]}; give the name of a file"):
                write_whole(path, "text")
            assert special_files.identity(path) == before


def test_only_regular_files_may_be_asked_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match=r"--output .* is a pipe; give the name of a regular file"):
        check_output("--output", tmp_path / "fifo", only_regular=True)
    check_output("--output", tmp_path / "new", only_regular=True)
    assert around(tmp_path / "new") == ["fifo"]


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(ValueError, match=r"--output .*: Too many levels of symbolic links; give"):
        check_output("--output", tmp_path / "one")
    with pytest.raises(OSError, match="Too many levels"):
        write_whole(tmp_path / "one", "text")
    assert around(tmp_path / "one") == ["one", "two"]


def test_standard_output_is_refused_and_other_descriptors_are_written_into(tmp_path: Path) -> None:
    """A regular file behind a descriptor is written from where the descriptor is, and is not replaced."""
    script = (
        "import sys; from pathlib import Path; from hwprofiles.files import check_output, write_whole\n"
        "for name in ('-', '/dev/stdout', '/dev/fd/1', '/proc/self/fd/1', '/dev/stdin'):\n"
        "    try: check_output('--output', Path(name))\n"
        "    except ValueError as error: print(error)\n"
        "print('before', file=sys.stderr, flush=True)\n"
        "check_output('--output', Path('/dev/stderr')); write_whole(Path('/dev/stderr'), 'whole\\n')\n"
        "print('after', file=sys.stderr)\n"
    )
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("w") as first, err.open("w") as second:
        subprocess.run([sys.executable, "-c", script], stdout=first, stderr=second, check=True)
    assert err.read_text() == "before\nwhole\nafter\n"
    lines = out.read_text().splitlines()
    assert len(lines) == 5
    assert all("give the name of" in line for line in lines)
    assert sum("is standard output" in line for line in lines) == 3


def test_a_folder_that_cannot_be_written_is_reported_before(foreign: Path) -> None:
    path = foreign / "file"
    with pytest.raises(ValueError, match=r"--output .* \(Permission denied\); give a file in another one"):
        check_output("--output", path)
    with pytest.raises(ValueError, match=r"--output .*: there is no such folder; make it first"):
        check_output("--output", foreign / "no" / "file")
    for path in (foreign, foreign / "no"):
        with pytest.raises(ValueError, match=r"--figures .*: no file can be made there \(Permission denied\)"):
            make_folder("--figures", path)


def test_a_folder_is_made_or_refused(tmp_path: Path) -> None:
    make_folder("--figures", tmp_path / "a" / "b")
    make_folder("--figures", tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path / "fifo" / "inner"):
        with pytest.raises(ValueError, match=r"--figures .*: there is a file of that name, not a folder"):
            make_folder("--figures", path)


def test_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    """Also what a process left that had the same number, as in a container, is in nobody's way."""
    path = tmp_path / "file"
    (tmp_path / f".file.{os.getpid()}.tmp").touch()
    threads = [threading.Thread(target=write_whole, args=(path, f"{n}" * 10_000)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = path.read_text()
    assert text == text[0] * 10_000
    assert around(path) == [f".file.{os.getpid()}.tmp", "file"]


def test_a_pipe_is_read_up_to_a_bound(tmp_path: Path) -> None:
    def feed(data: bytes) -> None:
        os.mkfifo(tmp_path / "fifo")

        def write() -> None:
            with contextlib.suppress(BrokenPipeError):
                (tmp_path / "fifo").write_bytes(data)

        threading.Thread(target=write, daemon=True).start()

    feed(b'{"a": 1}')
    assert read_json(tmp_path / "fifo", ValueError, "give another") == {"a": 1}
    (tmp_path / "fifo").unlink()
    feed(b"x" * 3_000_000)
    with pytest.raises(ValueError, match="has more than 2,000,000 B"):
        read_whole(tmp_path / "fifo", 2_000_000)


def test_what_has_no_end_or_no_sane_size_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "folder").mkdir()
    (tmp_path / "nothing").touch()
    zero = tmp_path / "zero"
    special_files.device(zero, 5, "/dev/zero")
    with special_files.unix_socket(tmp_path / "socket"), special_files.terminal(tmp_path / "terminal"):
        for name, words in {
            "sparse": "has more than 268,435,456 B",
            "zero": "is a device",
            "terminal": "is a device",
            "socket": "is a socket",
            "folder": "is a folder",
            "nothing": "is empty",
        }.items():
            with pytest.raises(KeyError, match=rf"{name} {words}.*; give a plan") as caught:
                read_json(tmp_path / name, SomeKeyError, "give a plan")
            assert "\n" not in str(caught.value)
            if name not in {"sparse", "nothing"}:
                with pytest.raises(ValueError, match=rf"{name} {words}; give a regular file"):
                    check_regular(tmp_path / name)
    assert check_regular(tmp_path / "sparse") == 1 << 40


class SomeKeyError(ValueError, KeyError):
    """An error as modules have of their own."""
