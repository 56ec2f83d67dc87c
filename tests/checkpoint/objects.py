"""An object store as fsspec sees one, in a folder, which processes share: things appear whole, and can go wrong."""

import io
import os
import re
import secrets
import tempfile
import threading
import time
from pathlib import Path

import fsspec
from fsspec import AbstractFileSystem

PROTOCOL = "objects"
_FOLDER = tempfile.TemporaryDirectory()
UPLOADS = Path(_FOLDER.name)


class Objects(AbstractFileSystem):
    """Objects below a folder, under paths that begin with it. :attr:`at` is called before and after every request.

    A file that is written consists of parts, which are requests, and appears by the last one, as of S3. Below a folder
    ``slow-5`` each part takes so many seconds.
    """

    protocol = PROTOCOL
    cachable = False
    at = staticmethod(lambda _name, _after: None)

    def _open(self, path, mode="rb", **_options):
        return _Upload(self, path) if mode == "wb" else io.BytesIO(self.cat_file(path))

    def cat_file(self, path, version=None, start=None, end=None):  # as s3fs has it
        assert version is None, "a range is given by name"
        return _found(path).read_bytes()[start:end]

    def pipe_file(self, path, value, mode="overwrite", **_options):
        assert mode == "overwrite"
        self.at("put", False)
        self.put(path, value)
        self.at("put", True)

    def rm_file(self, path):
        self.at("delete", False)
        _found(path).unlink()
        self.at("delete", True)

    def info(self, path, **_options):
        return {"name": path, "size": _found(path).stat().st_size, "type": "file"}

    def find(self, path, maxdepth=None, withdirs=False, detail=False, **_options):
        assert (maxdepth, withdirs, detail) == (None, False, True)
        self.at("list", False)
        return {str(p): self.info(str(p)) for p in Path(_clean(path)).rglob("*") if p.is_file()}

    def list_multipart_uploads(self, bucket):
        """Return what was begun and has neither ended nor been given up, as s3fs does."""
        assert not bucket, "paths are absolute"
        found = []
        for path in UPLOADS.glob("upload-*"):
            key = path.read_text()
            found.append({"Key": key.removeprefix("/"), "UploadId": path.name})
        return found

    def abort_mpu(self, bucket, key, upload):
        assert (UPLOADS / upload).read_text() == f"{bucket}/{key}"
        (UPLOADS / upload).unlink()

    @staticmethod
    def put(path, value):
        target = Path(_clean(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.parents[3] / f"new-{secrets.token_hex(4)}"  # outside of what is listed
        new.write_bytes(value)
        new.rename(target)


class _Upload(io.RawIOBase):
    def __init__(self, system, path):
        self._system, self._path, self._parts = system, path, []
        self._begun = UPLOADS / f"upload-{secrets.token_hex(4)}"
        self._begun.write_text(_clean(path))

    def write(self, data):
        self._system.at("part", False)
        time.sleep(float((re.findall(r"/slow-(\d+)/", self._path) or [0])[0]))
        self._parts.append(bytes(data))
        return len(data)

    def close(self):
        if not self.closed:
            super().close()
            self._system.pipe_file(self._path, b"".join(self._parts))
            self._begun.unlink()


def _clean(path):
    return path.removeprefix(f"{PROTOCOL}://")


def _found(path):
    if not Path(_clean(path)).is_file():
        raise FileNotFoundError(path)
    return Path(_clean(path))


fsspec.register_implementation(PROTOCOL, Objects, clobber=True)


class Counting:
    """What is called before and after every request, with its number."""

    def __init__(self):
        self.num = 0
        self._lock, self._of_thread = threading.Lock(), threading.local()  # parts are sent by several threads

    def __call__(self, name, after):
        if not after:
            with self._lock:
                self._of_thread.number, self.num = self.num, self.num + 1
        self.do(self._of_thread.number, name, after)

    def do(self, number, name, after):
        """Do something at a request."""


class Killing(Counting):
    """The process is killed before or after a request."""

    def __init__(self, number, phase):
        super().__init__()
        self._at = (number, phase == "after")

    def do(self, number, name, after):  # noqa: ARG002 - others need it
        if (number, after) == self._at:
            os.kill(os.getpid(), 9)


class Failing(Counting):
    """A request fails, before or after it has been done."""

    def __init__(self, number, error, *, after):
        super().__init__()
        self._at, self._error = (number, after), error
        self.failed = ""

    def do(self, number, name, after):
        if (number, after) == self._at:
            self.failed = name
            raise self._error
