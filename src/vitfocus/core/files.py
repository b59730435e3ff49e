"""Writing files atomically (a crash leaves the old or the new file, never a part), and locking folders."""

from __future__ import annotations

import errno
import hashlib
import os
import shlex
import socket
import stat
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path

from vitfocus.core.errors import VitfocusError, warn

if sys.platform != "win32":
    import fcntl

_KINDS = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}

#: What numpy and zipfile raise for arrays and archives that are truncated or damaged, or whose members are not arrays.
DAMAGED = (
    *(OSError, ValueError, EOFError, KeyError, MemoryError, NotImplementedError, RuntimeError),
    *(AttributeError, TypeError),
    *(zipfile.BadZipFile, zlib.error),
)
#: The lock file of a run folder in use; it may remain after a run was killed.
LOCK = ".lock"
_TEMPORARY = ".vitfocus-"  # begins the names of files that are being written
_locks: set[int] = set()  # descriptors of the locks that this process holds
_roots: list[Path] = []  # the folders that no link may lead out of, without resolving links


class NotWritten(VitfocusError, OSError):
    """A file or folder cannot be written; also an `OSError`, so that a full disk is handled like one."""


def not_written(target: Path, error: OSError) -> NotWritten:
    """The error for a file or folder that the system refuses to write."""
    return NotWritten(f"{target} cannot be written: {str(error.strerror or error).rstrip('.')}.")


def writable_path(target: str | Path, folder: bool = False) -> Path:
    """Check that a path is new or a regular file (with `folder`: a folder), so that it can be written.

    Anything else, such as a device or a FIFO, is refused. A link to a file is followed within its own folder only, and
    one to a folder within the locked or `confined` folder only: an untrusted run folder cannot redirect writes.

    >>> writable_path("/dev/null")
    Traceback (most recent call last):
    vitfocus.core.errors.VitfocusError: /dev/null is a device; expected a regular file or a new path.
    """
    target = Path(target)
    expected = f"expected {'a folder' if folder else 'a regular file'} or a new path"
    try:
        kind = stat.S_IFMT(target.stat().st_mode)
    except NotADirectoryError:
        above = next((place for place in target.parents if place.exists()), target.parent)
        raise VitfocusError(f"{target} cannot be written: {above} is not a folder.") from None
    except ValueError:  # NUL, or what has no encoding
        raise VitfocusError(f"{str(target)!r} cannot be the name of a file; {expected}.") from None
    except FileNotFoundError:
        for place in (target, target.parent):
            if place.is_symlink() and not place.exists():
                raise VitfocusError(f"{place} is a link to a path that does not exist; {expected}.") from None
        return _inside(target)
    except OSError as error:  # such as a name that is too long, or links in a circle
        raise VitfocusError(f"{target} cannot be written: {error.strerror}; {expected}.") from None
    if kind != (stat.S_IFDIR if folder else stat.S_IFREG):
        raise VitfocusError(f"{target} is {_KINDS.get(kind, 'a device')}; {expected}.")
    if folder or not target.is_symlink():
        return _inside(target)
    real = target.resolve()
    if not real.is_relative_to(target.parent.resolve()):
        raise VitfocusError(f"{target} is a link out of its folder; {expected}, such as {real} itself.")
    return real


def _inside(target: Path) -> Path:
    """The target, unless it is below a `confined` folder and a link in that folder leads out of it."""
    place = target.absolute()
    for root in _roots:
        if place.is_relative_to(root) and not place.resolve().is_relative_to(root.resolve()):
            raise VitfocusError(f"{target} is behind a link out of {root}; expected a place in that folder.")
    return target


@contextmanager
def confined(folder: str | Path) -> Iterator[None]:
    """Within the context, a path below the folder is refused for writing if a link in the folder leads out of it."""
    root = Path(folder).absolute()
    _roots.append(root)
    try:
        yield
    finally:
        _roots.remove(root)


def is_file(path: str | Path) -> bool:
    """Whether the file exists; False for text that is not a valid file name, for which `Path` may raise."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: str | Path) -> bool:
    """The same for a folder.

    >>> is_folder("x" * 300), is_folder("a\\0b"), is_file("\\ud800")
    (False, False, False)
    """
    return os.path.isdir(path)  # noqa: PTH112


def home_path(path: str | os.PathLike[str]) -> Path:
    """A path in which "~" is the home folder, and "~name" that of a user, if there is one; `Path` raises if not.

    >>> home_path("~nobody-of-that-name/x")
    PosixPath('~nobody-of-that-name/x')
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111


def open_file(path: str | Path) -> BufferedReader:
    """Open a regular file for reading; anything else is an `OSError`, since reading a FIFO would block.

    >>> open_file("/dev/zero")
    Traceback (most recent call last):
    OSError: [Errno 22] not a regular file: '/dev/zero'
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


@contextmanager
def atomic_path(target: str | Path, sync: bool = True) -> Iterator[Path]:
    """A temporary path that replaces the target when the block succeeds, and is removed when it fails.

    If the file cannot be written, `NotWritten` is raised.

    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_path(folder / "a.txt") as path:
    ...     _ = path.write_text("whole")
    >>> [file.name for file in folder.iterdir()], (folder / "a.txt").read_text()
    (['a.txt'], 'whole')
    """
    with atomic_paths([target], sync) as [temporary]:
        yield temporary


@contextmanager
def atomic_paths(targets: Iterable[str | Path], sync: bool = True) -> Iterator[list[Path]]:
    """The same for files that belong together: none is replaced before all are written."""
    with ExitStack() as stack:
        files = {stack.enter_context(_temporary_file(one)): one for one in map(writable_path, targets)}
        try:
            yield list(files)
        except NotWritten:
            raise
        except OSError as error:
            mine = files if error.filename is None else [one for one in files if str(one) == str(error.filename)]
            if not mine:  # a file that was read
                raise
            wanted = [files[one] for one in mine]
            raise not_written(wanted[0] if len(wanted) == 1 else wanted[0].parent, error) from None
        for temporary, target in files.items():
            try:
                if sync:
                    with temporary.open("rb+") as file:
                        os.fsync(file.fileno())
                temporary.chmod(0o666 & ~_umask())
            except OSError as error:
                raise not_written(target, error) from None
        for temporary, target in files.items():
            try:
                temporary.replace(target)
            except OSError as error:
                raise not_written(target, error) from None


@contextmanager
def _temporary_file(target: Path) -> Iterator[Path]:
    """An empty file beside the target, locked, and removed at the end if it is still there."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A long name is shortened to leave room for the random part.
        handle, name = tempfile.mkstemp(target.suffix[:20], f"{_TEMPORARY}{target.name[:40]}.", target.parent)
    except OSError as error:
        raise not_written(target, error) from None
    temporary = Path(name)
    locked = _lock(handle)  # until it is closed, which a killed process does too: see _remove_stale
    if not locked:
        os.close(handle)
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
        if locked:
            os.close(handle)


def _remove_stale(folder: Path) -> None:
    """Remove temporary files of `atomic_path` that a killed process left behind; files in use are kept."""
    with suppress(OSError):
        for path in folder.glob(f"{_TEMPORARY}*"):
            if stat.S_ISREG(path.lstat().st_mode):
                with path.open("rb+") as file:
                    if _lock(file.fileno()):
                        path.unlink()


def writable_folder(folder: str | Path) -> Path:
    """Create the folder if it is missing, and check that files can be written there.

    >>> writable_folder(Path(tempfile.mkdtemp()) / "runs" / "a").is_dir()
    True
    """
    folder = writable_path(folder, folder=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise NotWritten(f"The folder is not writable ({error.strerror or error}): {folder}.") from None


def require_run_folder(folder: str | Path, marks: Collection[str], what: str) -> None:
    """Refuse a folder that holds files but none of the `marks` of a run, which would mix with those files.

    Hidden files do not count, nor logs, which a job may have opened there before the run begins.

    Args:
        folder: The folder; it may be missing or empty.
        marks: Names of files and folders, one of which every run has that was begun there.
        what: What wrote the run, such as "vitfocus train".

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> require_run_folder(folder, ["config.toml"], "vitfocus train")
        >>> (folder / "thesis.tex").touch()
        >>> require_run_folder(folder, ["config.toml"], "vitfocus train")
        Traceback (most recent call last):
        vitfocus.core.errors.VitfocusError: ... holds thesis.tex and no run of vitfocus train: name a new folder, ...
    """
    try:
        present = sorted(path.name for path in Path(folder).iterdir())
    except OSError:  # a new folder, or what `lock_folder` refuses
        return
    names = [name for name in present if not name.startswith(".") and not name.endswith((".log", ".out", ".err"))]
    if names and not set(names) & set(marks):
        more = len(names) - 3
        found = ", ".join(names[:3]) + (f", {more} more" if more > 0 else "")
        new = Path(folder, what.rpartition(" ")[2])
        raise VitfocusError(f"{folder} holds {found} and no run of {what}: name a new folder, such as {new}.")


class FolderInUse(VitfocusError):
    """Another process holds the lock of a folder."""


@contextmanager
def lock_folder(folder: str | Path) -> Iterator[None]:
    """Lock a folder, which is created if it is missing; the lock ends with the context or with this process.

    Temporary files that a killed process left there are removed. A read-only folder is not locked. On a file system
    without locks, a warning is issued.

    >>> folder = Path(tempfile.mkdtemp())
    >>> with lock_folder(folder), lock_folder(folder):
    ...     pass
    Traceback (most recent call last):
    vitfocus.core.files.FolderInUse: ... is in use by process ...
    """
    folder = writable_path(folder, folder=True)
    try:
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        lock = _take_lock(folder) if os.access(folder, os.W_OK) or (folder / LOCK).exists() else None
    except OSError as error:
        raise VitfocusError(f"The run cannot be kept in {folder}: {error.strerror or error}.") from None
    try:
        if lock is not None:
            _remove_stale(folder)
        with confined(folder):
            yield
    finally:
        if lock in _locks:  # not in a forked process
            with suppress(OSError):
                (folder / LOCK).unlink()
            _locks.discard(lock)
            os.close(lock)
            if new:  # and nothing was written
                with suppress(OSError):
                    folder.rmdir()


def _take_lock(folder: Path) -> int | None:
    """The descriptor of the folder's lock file, locked; None where the file system has no locks."""
    path = folder / LOCK
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    while True:
        file = os.open(path, flags, 0o666)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise VitfocusError(f"{path} is not a lock file of vitfocus: remove it, or name another folder.")
            locked = _lock(file)
            if locked is False:
                text = os.read(file, 1000).decode(errors="replace")
                owner = "".join(filter(str.isprintable, text)) or "another process"
                raise FolderInUse(f"{folder} is in use by {owner}: wait for it to end, or name another folder.")
            if locked is None:
                path.unlink(missing_ok=True)
                warn(f"{folder} cannot be locked on this file system: see that no other run is started there.")
                os.close(file)
                return None
            if not (path.exists() and os.path.samestat(status, path.lstat())):  # its owner has just removed it
                os.close(file)
                continue
        except BaseException:
            os.close(file)
            raise
        _locks.add(file)
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        owner = f"process {os.getpid()} on {socket.gethostname()} since {since} ({shlex.join(sys.argv)[:300]})"
        with suppress(OSError):  # a full disk: the lock holds without its owner's name
            os.truncate(file, 0)
            os.write(file, owner.encode(errors="replace"))
        return file


def _leave_locks() -> None:
    """Release the locks in a forked process, such as a data loader's worker: only the parent owns them."""
    while _locks:
        os.close(_locks.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks)


def encoded(text: str) -> bytes:
    """Text as UTF-8; characters that cannot be encoded (file names may hold any bytes) are escaped."""
    return text.encode("utf-8", errors="backslashreplace")


def write_text(target: str | Path, text: str) -> None:
    """Write a text file atomically, `encoded`."""
    with atomic_path(target) as path:
        path.write_bytes(encoded(text))


def write_bytes(target: str | Path, content: bytes, sync: bool = True) -> None:
    """Write a binary file atomically; without `sync`, a crash of the machine may lose it, but not truncate it."""
    with atomic_path(target, sync) as path:
        path.write_bytes(content)


class Appender:
    """Appends records to a file, each completely or not at all; after a full disk, pending records are written later.

    >>> file = Appender(Path(tempfile.mkdtemp()) / "log")
    >>> file.add(b"one ")
    >>> file.add(b"two")
    >>> file.path.read_bytes()
    b'one two'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: list[bytes] = []

    def add(self, piece: bytes) -> None:
        """Append a piece, after any pending ones."""
        self._pending.append(piece)
        self.catch_up()

    def catch_up(self) -> None:
        """Try to write the pending pieces."""
        with suppress(OSError):
            path = writable_path(self.path)
            size = path.stat().st_size if path.exists() else 0
            try:
                with path.open("ab") as file:
                    file.writelines(self._pending)
            except OSError:
                os.truncate(path, size)
                raise
            self._pending.clear()


def digest(path: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _lock(handle: int) -> bool | None:
    """Lock an open file: True, False if another process has locked it, None where the file system has no locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
