"""SHA-256 of every tensor of a file, in parallel, with progress, and remembered.

The cache holds one small JSON file per weight file, in `~/.cache/pdctl/fingerprints/`
(XDG_CACHE_HOME honoured). An entry counts only while path, size, mtime, ctime, device and
inode are those of the file; anything odd in the cache is as good as no entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from pdctl.topology.weights import Tensor, WeightsError, read_tensors

Progress = Callable[[int, int], None]
"""(bytes hashed, bytes to hash); called from any thread, one at a time."""

CACHE_VERSION = 1
_PIECE_BYTES = 4 << 20


class Digest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor's content: `value` is SHA-256 (hex) over dtype, shape and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: str


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must be unchanged for a remembered digest to count."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    device: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Identity:
        found = path.stat()
        return cls(
            path=os.fspath(path.resolve()),
            size=found.st_size,
            mtime_ns=found.st_mtime_ns,
            ctime_ns=found.st_ctime_ns,
            device=found.st_dev,
            inode=found.st_ino,
        )


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    identity: Identity
    digests: tuple[Digest, ...]


def cache_dir() -> Path:
    """Where pdctl keeps what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "pdctl"


class DigestCache:
    """Remembered digests, one file each; every failure of the cache is silent by design: it
    only costs the time to hash again."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_dir() / "fingerprints"

    def get(self, identity: Identity) -> tuple[Digest, ...] | None:
        try:
            entry = msgspec.json.decode(self._file(identity).read_bytes(), type=_Entry)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        fits = entry.version == CACHE_VERSION and entry.identity == identity
        return entry.digests if fits else None

    def put(self, identity: Identity, digests: Sequence[Digest]) -> None:
        entry = _Entry(version=CACHE_VERSION, identity=identity, digests=tuple(digests))
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                try:
                    file.write(msgspec.json.encode(entry))
                    file.close()
                    os.replace(file.name, self._file(identity))
                except BaseException:
                    os.unlink(file.name)
                    raise

    def _file(self, identity: Identity) -> Path:
        key = hashlib.sha256(identity.path.encode("utf-8", "surrogateescape")).hexdigest()
        return self._folder / f"{key[:40]}.json"


class Hashed(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of several files, and how many bytes had to be read for them (0: all cached)."""

    digests: tuple[Digest, ...]
    total_bytes: int
    read_bytes: int


def hash_files(
    files: Sequence[Path],
    *,
    cache: DigestCache | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> Hashed:
    """The digests of every tensor in these files.

    Files are read with positioned reads, not mapped: a file that is truncated meanwhile is
    then an error and not a SIGBUS.

    Raises:
        WeightsError: a file is garbled, changes while it is read, or two name one tensor.
    """
    cache = cache or DigestCache()
    tensors: list[Tensor] = []
    done: list[Digest] = []
    fresh: dict[Path, Identity] = {}
    total = 0
    for path in files:
        identity = _identity(path)
        found = read_tensors(path)
        total += sum(tensor.length_bytes for tensor in found)
        known = cache.get(identity)
        if known is not None and {d.name for d in known} == {t.name for t in found}:
            done += known
        else:
            fresh[path] = identity
            tensors += found
    made = _hash_tensors(tensors, progress, workers or min(8, os.cpu_count() or 1))
    for path, identity in fresh.items():
        if _identity(path) != identity:
            raise WeightsError(f"{path} changed while it was read")
        cache.put(identity, made.get(os.fspath(path), []))
    digests = [*done, *(digest for group in made.values() for digest in group)]
    names = [digest.name for digest in digests]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise WeightsError(f"{files[0].parent}: tensor {twice} stands in more than one file")
    read = sum(tensor.length_bytes for tensor in tensors)
    digests.sort(key=lambda digest: digest.name)
    return Hashed(digests=tuple(digests), total_bytes=total, read_bytes=read)


def _identity(path: Path) -> Identity:
    try:
        return Identity.of(path)
    except OSError as error:
        raise WeightsError(f"{path} can't be read: {error.strerror}") from None


def _hash_tensors(
    tensors: Sequence[Tensor], progress: Progress | None, workers: int
) -> dict[str, list[Digest]]:
    """File → its digests. Large tensors go first, so that no worker ends with one alone."""
    made: dict[str, list[Digest]] = {}
    if not tensors:
        return made
    order = sorted(tensors, key=lambda tensor: -tensor.length_bytes)
    advance = _Advance(sum(t.length_bytes for t in tensors), progress)
    with contextlib.ExitStack() as stack:
        opened = {name: _open(name, stack) for name in {t.file for t in tensors}}
        pool = stack.enter_context(ThreadPoolExecutor(workers, thread_name_prefix="pdctl-hash"))
        try:
            for tensor, digest in zip(
                order, pool.map(lambda t: _digest(t, opened[t.file], advance), order), strict=True
            ):
                made.setdefault(tensor.file, []).append(digest)
        except BaseException:
            advance.stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return made


def _open(name: str, stack: contextlib.ExitStack) -> int:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsError(f"{name} can't be read: {error.strerror}") from None
    stack.callback(os.close, descriptor)
    return descriptor


class _Advance:
    """Counts bytes over all workers and tells them to stop."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self.stopped = False
        self._lock = threading.Lock()
        self._done = 0
        self._total = total_bytes
        self._progress = progress

    def __call__(self, count_bytes: int) -> None:
        with self._lock:
            self._done += count_bytes
            if self._progress is not None:
                self._progress(self._done, self._total)


def _digest(tensor: Tensor, descriptor: int, advance: _Advance) -> Digest:
    hasher = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    buffer = memoryview(bytearray(min(_PIECE_BYTES, tensor.length_bytes)))
    position, end = tensor.start, tensor.start + tensor.length_bytes
    while position < end and not advance.stopped:
        piece = buffer[: end - position]
        try:
            got = os.preadv(descriptor, [piece], position)
        except OSError as error:
            raise WeightsError(f"{tensor.file} can't be read: {error.strerror}") from None
        if got == 0:
            raise WeightsError(f"{tensor.file} became shorter while it was read")
        hasher.update(piece[:got])
        position += got
        advance(got)
    return Digest(
        name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, value=hasher.hexdigest()
    )
