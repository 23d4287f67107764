"""The filesystem of fsspec: fsspec's own tests, chained URLs, and storages of all kinds."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem, make_path_posix
from fsspec.tests import abstract

import ubtrfs
from conftest import MIB
from ubtrfs.fsspec import BtrfsFileSystem


class BtrfsFixtures(abstract.AbstractFixtures):
    @pytest.fixture
    def fs(self) -> Iterator[BtrfsFileSystem]:
        with ubtrfs.make_in_memory(256 * MIB) as image:
            yield BtrfsFileSystem(image, auto_mkdir=True)

    @pytest.fixture
    def fs_path(self) -> str:
        return "/base"

    @pytest.fixture
    def fs_join(self) -> Any:
        return os.path.join

    @pytest.fixture
    def fs_sanitize_path(self) -> Any:
        return make_path_posix

    @pytest.fixture(autouse=True)
    def base(self, fs: BtrfsFileSystem, fs_path: str) -> None:
        fs.makedirs(fs_path)

    @pytest.fixture
    def local_fs(self) -> LocalFileSystem:
        return LocalFileSystem(auto_mkdir=True)


class TestCopy(abstract.AbstractCopyTests, BtrfsFixtures):
    pass


class TestGet(abstract.AbstractGetTests, BtrfsFixtures):
    pass


class TestPut(abstract.AbstractPutTests, BtrfsFixtures):
    pass


class TestOpen(abstract.AbstractOpenTests, BtrfsFixtures):
    pass


class TestPipe(abstract.AbstractPipeTests, BtrfsFixtures):
    pass


@pytest.fixture
def image(image: str) -> str:
    """An image with some files."""
    with ubtrfs.make(image, size=256 * MIB) as fs:
        fs.makedirs("/etc/app")
        fs.write_bytes("/etc/app/config", b"color = blue\n")
        fs.symlink("app", "/etc/link")
        fs.create_subvolume("/sub")
        fs.write_bytes("/sub/f", b"f")
    return image


def test_the_protocol_is_registered(image: str) -> None:
    assert "btrfs" in fsspec.available_protocols()
    assert fsspec.get_filesystem_class("btrfs") is BtrfsFileSystem
    fs = fsspec.filesystem("btrfs", fo=image)
    assert fs.ls("/", detail=False) == ["/etc", "/sub"] and fs.cat("etc/app/config") == b"color = blue\n"
    assert fs.find("/") == ["/etc/app/config", "/etc/link", "/sub/f"]
    fs.close()


@pytest.mark.parametrize("protocol", ["file", "memory", "simplecache::memory"])
def test_urls_chain(image: str, protocol: str) -> None:
    path = image
    if "memory" in protocol:
        path = "/chained.img"
        fsspec.filesystem("memory").pipe(path, Path(image).read_bytes())
    url = f"btrfs://etc/app/config::{protocol}://{path}"
    with fsspec.open(url, "rb") as file:
        assert file.read() == b"color = blue\n"
    with fsspec.open(url, "rt") as file:
        assert file.readlines() == ["color = blue\n"]
    fs, name = fsspec.core.url_to_fs(url)
    assert name == "/etc/app/config" and fs.info(name)["size"] == 13
    assert "/etc/app/config" in fs.glob("/etc/**/conf*")
    fs.close()


def test_files_are_described(image: str) -> None:
    fs = BtrfsFileSystem(image)
    about = fs.info("/etc/link")
    assert about["islink"] and about["destination"] == "app" and about["type"] == "directory"
    assert fs.info("/etc/app/config")["type"] == "file" and fs.info("/sub")["subvolume"] == 256
    assert fs.modified("/sub/f").year >= 2024 and fs.created("/sub/f").tzinfo is not None
    assert fs.du("/sub") == 1
    with pytest.raises(FileNotFoundError):
        fs.ls("/none")
    with pytest.raises(OSError):
        fs.pipe("/f", b"")
    fs.close()


def test_changes_reach_the_storage(image: str) -> None:
    content = Path(image).read_bytes()
    storage = io.BytesIO(content)
    fs = BtrfsFileSystem(storage, mode="r+")
    fs.mkdir("/new")
    fs.pipe("/new/f", b"text")
    fs.mv("/new/f", "/etc/")
    fs.mv("/etc/f", "/sub/g")
    fs.cp("/sub/g", "/sub/h")
    fs.touch("/sub/empty")
    with fs.open("/sub/h", "ab") as file:
        file.write(b" and more")
    with pytest.raises(NotImplementedError), fs.transaction:
        fs.open("/sub/h", "wb")
    fs.rm("/etc", recursive=True)
    fs.close()
    with ubtrfs.open(storage, read_only=True) as image_again:
        assert image_again.listdir("/") == ["sub", "new"]
        assert image_again.read_bytes("/sub/g") == b"text" and image_again.read_bytes("/sub/h") == b"text and more"
    memory = fsspec.filesystem("memory")
    memory.pipe("/w.img", content)
    fs = fsspec.filesystem("btrfs", fo="/w.img", target_protocol="memory", mode="r+")
    fs.pipe("/f", b"through memory")
    fs.close()
    assert BtrfsFileSystem("memory://w.img").cat("/f") == b"through memory"


def test_wrong_arguments_are_refused(image: str) -> None:
    with pytest.raises(ValueError, match="fo is missing"):
        BtrfsFileSystem()
    with pytest.raises(ValueError, match="mode"):
        BtrfsFileSystem(image, mode="w")
    with pytest.raises(FileNotFoundError):
        BtrfsFileSystem(image + ".none")


def test_links_end_no_walk_and_hide_nothing(fs: ubtrfs.Filesystem) -> None:
    fs.makedirs("/two/real")
    fs.write_bytes("/two/real/f", b"text")
    for name, target in (("a", "."), ("b", "."), ("loop", "loop"), ("c", "real")):
        fs.symlink(target, f"/two/{name}")
    view = BtrfsFileSystem(fo=fs)
    links = [f"/two/{name}" for name in ("a", "b", "c", "loop")]
    assert view.find("/two") == [*links, "/two/real/f"]
    assert {found["name"] for found in view.ls("/two") if found["type"] == "link"} == set(links)
    # A path that is named is followed.
    assert view.info("/two/c")["type"] == "directory" and view.ls("/two/c", detail=False) == ["/two/c/f"]
    assert view.du("/two") >= 4
    with pytest.raises(OSError):
        view.cp("/two/real/f", "/two/real/f")
    assert view.cat("/two/real/f") == b"text"
