"""What the compilers left behind, in one file that can be carried to another machine of the same kind.

Kernels that took minutes to compile load in seconds. The archive is a tar, compressed (xz) by all cores at once. The
programs themselves come first, files that can be made from them last: what is beyond the limit is left out.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vitfocus.core.errors import VitfocusError

_PIECE = 4 << 20  # compressed at once by one core
_PROGRAMS = ("fxgraph", "aotautograd")


def share(folder: Path, workers: int) -> None:
    """Let the compilers of some processes share their caches below a folder, and not crowd each other out.

    Processes that are started afterwards inherit this.
    """
    threads = max(1, (os.cpu_count() or 1) // workers)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "compiled"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(compiled() / "triton"))
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(4, threads)))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def compiled() -> Path:
    """The folder of what the compilers made."""
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def pack(folder: Path, archive: Path, limit: int) -> str:
    """Write the caches in a folder to a file of at most `limit` bytes; says how much it is."""
    files = sorted((rank(path.relative_to(folder)), -path.stat().st_mtime, path) for path in _files(folder))
    pieces, packed = [], 0
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        start = 0
        for _, _, path in files:
            tar.add(path, str(path.relative_to(folder)), recursive=False)
            if stream.tell() - start >= _PIECE:
                pieces.append((start, stream.tell(), len(tar.getmembers())))
                start = stream.tell()
        pieces.append((start, stream.tell(), len(tar.getmembers())))
    whole = stream.getbuffer()
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the compressor works outside Python's lock
        small = list(pool.map(lambda piece: lzma.compress(whole[piece[0] : piece[1]], preset=1), pieces))
    end, taken = lzma.compress(bytes(1024)), [b""]
    for piece, (_, _, count) in zip(small, pieces, strict=True):
        if sum(map(len, taken)) + len(piece) + len(end) > limit:
            break
        taken.append(piece)
        packed = count
    temporary = archive.with_name(f".{archive.name}.new")
    archive.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_bytes(b"".join([*taken, end]))
    temporary.replace(archive)
    return f"{packed} of {len(files)} cached files in {archive} ({archive.stat().st_size / 1e6:.1f} MB)"


def unpack(archive: Path, folder: Path) -> str:
    """Put an archive's files into a folder; says how many there are. What is there already and newer stays."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive, mode="r:xz") as tar:
            members = [one for one in tar if one.isfile() and not (folder / one.name).exists()]
            tar.extractall(folder, members, filter="data")
    except (OSError, tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise VitfocusError(f"The compilers' cache {archive} cannot be read ({error}).") from None
    for group in (folder / "triton").glob("*/__grp__*.json"):  # Triton notes where its files lay
        content = json.loads(group.read_text())
        content["child_paths"] = {name: str(group.parent / name) for name in content.get("child_paths", {})}
        group.write_text(json.dumps(content))
    return f"{len(members)} cached files from {archive}"


def rank(path: Path) -> int:
    """0 for what cannot be made from anything else, 1 for code that can, 2 for kernels that programs hold as well.

    >>> [rank(Path(p)) for p in ("fxgraph/ab/c/d", "triton/A/_context_kernel.cubin", "triton/A/triton_poi_fused.cubin")]
    [0, 0, 2]
    """
    if path.parts[0] in _PROGRAMS or path.suffix == ".best_config":
        return 0
    if path.parts[0] == "triton":
        return 2 if path.name.removeprefix("__grp__").startswith("triton_") else 0
    return 1


def _files(folder: Path) -> list[Path]:
    """Every file but locks and those that a process was still writing."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file()
        and path.suffix not in (".lock", ".tmp")
        and not any(part == "locks" or part.startswith("tmp") for part in path.relative_to(folder).parts)
    ]
