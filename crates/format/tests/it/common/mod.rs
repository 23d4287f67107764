//! Images made by mkfs.btrfs and the kernel, and a simple reader of their trees that uses only this crate.
//!
//! The reader uses the first stripe of each chunk, which suffices for single and DUP chunks.

#![allow(dead_code, reason = "each test file uses a part")]

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ubtrfs_format::item::{ChunkItem, RootItem};
use ubtrfs_format::node::NodeView;
use ubtrfs_format::superblock::{SUPERBLOCK_SIZE, Superblock};
use ubtrfs_format::{Key, KeyType, RootId};

/// The reason why this machine cannot make kernel images, if there is one. In CI, the test fails if there is a reason.
pub(crate) fn cannot_run() -> Option<&'static str> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let is_root = status.lines().any(|line| line.starts_with("Uid:") && line.split_whitespace().nth(2) == Some("0"));
    let filesystems = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let reason = if !is_root {
        "not root"
    } else if !filesystems.contains("btrfs") {
        "the kernel has no btrfs"
    } else if !Path::new("/dev/loop-control").exists() {
        "no loop devices"
    } else if Command::new("mkfs.btrfs").arg("--version").output().is_err() {
        "mkfs.btrfs is not installed"
    } else {
        return None;
    };
    assert!(std::env::var_os("CI").is_none(), "CI must be able to run this: {reason}");
    eprintln!("SKIPPED, not tested: {reason}");
    Some(reason)
}

/// Runs a command and returns its standard output. Panics with the command's error output if the command fails.
pub(crate) fn run(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().expect(program);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {stderr}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A temporary directory. On drop, a filesystem mounted in the directory is unmounted, and the directory is removed.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new() -> Self {
        Self(PathBuf::from(run("mktemp", &["-d"]).trim()))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let mount = self.0.join("mnt");
        if mount.exists() {
            let _ = Command::new("umount").arg(&mount).output();
        }
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An image made by `mkfs.btrfs` with these options, then filled through the kernel's mount.
pub(crate) fn kernel_image(mkfs: &[&str], mount_options: &str, fill: impl FnOnce(&Path)) -> Image {
    let scratch = Scratch::new();
    let path = scratch.0.join("image");
    File::create(&path).and_then(|file| file.set_len(512 << 20)).expect("image file");
    let path_text = path.to_str().expect("UTF-8 path");
    run("mkfs.btrfs", &[mkfs, &["-q", path_text]].concat());
    let mount = scratch.0.join("mnt");
    std::fs::create_dir(&mount).expect("mount point");
    let mount_text = mount.to_str().expect("UTF-8 path");
    run("mount", &["-o", &format!("loop,{mount_options}"), path_text, mount_text]);
    fill(&mount);
    run("umount", &[mount_text]);
    Image::open(&path, scratch)
}

/// A filesystem image whose trees can be read.
pub(crate) struct Image {
    pub(crate) path: PathBuf,
    pub(crate) superblock: Superblock,
    pub(crate) superblock_raw: Vec<u8>,
    chunks: BTreeMap<u64, ChunkItem>,
    file: File,
    _scratch: Scratch,
}

impl Image {
    fn open(path: &Path, scratch: Scratch) -> Self {
        let file = File::open(path).expect("image");
        let mut raw = vec![0; SUPERBLOCK_SIZE];
        file.read_exact_at(&mut raw, 65536).expect("superblock");
        let superblock = Superblock::decode(&raw).expect("superblock");
        let mut image = Self {
            path: path.to_owned(),
            chunks: BTreeMap::new(),
            file,
            superblock,
            superblock_raw: raw,
            _scratch: scratch,
        };
        let len = usize::try_from(image.superblock.sys_chunk_array_size).expect("2048 at most");
        let array = image.superblock.sys_chunk_array[..len].to_vec();
        let mut reader = ubtrfs_format::codec::Reader::new("sys_chunk_array", &array);
        while !reader.is_empty() {
            let key = Key::decode(&reader.array().expect("key"));
            image.chunks.insert(key.offset, ChunkItem::read(&mut reader).expect("chunk"));
        }
        let mut chunks = BTreeMap::new();
        image.walk(image.superblock.chunk_root.0, &mut |raw| {
            for (key, data) in items(raw) {
                if key.item_type == KeyType::CHUNK_ITEM {
                    chunks.insert(key.offset, ChunkItem::decode(data).expect("chunk"));
                }
            }
        });
        image.chunks = chunks;
        image
    }

    pub(crate) fn read(&self, logical: u64, len_bytes: usize) -> Vec<u8> {
        let (start, chunk) = self.chunks.range(..=logical).next_back().expect("a chunk");
        let mut raw = vec![0; len_bytes];
        self.file.read_exact_at(&mut raw, chunk.stripes[0].offset.0 + (logical - start)).expect("read");
        raw
    }

    /// Device offsets of all copies of a logical address.
    pub(crate) fn copies(&self, logical: u64) -> Vec<u64> {
        let (start, chunk) = self.chunks.range(..=logical).next_back().expect("a chunk");
        chunk.stripes.iter().map(|stripe| stripe.offset.0 + (logical - start)).collect()
    }

    /// Visits the block at this address and all blocks below it, parents first.
    pub(crate) fn walk(&self, bytenr: u64, visit: &mut dyn FnMut(&[u8])) {
        let raw = self.read(bytenr, usize::try_from(self.superblock.nodesize).expect("small"));
        visit(&raw);
        let view = NodeView::new(&raw).expect("a block");
        if !view.is_leaf() {
            for slot in 0..view.nritems() {
                self.walk(view.child(slot).expect("a child").0.0, visit);
            }
        }
    }

    /// Ids and root node addresses of all trees: root and chunk tree, then all trees that the root tree lists.
    pub(crate) fn trees(&self) -> Vec<(RootId, u64)> {
        let mut trees =
            vec![(RootId::ROOT_TREE, self.superblock.root.0), (RootId::CHUNK_TREE, self.superblock.chunk_root.0)];
        self.walk(self.superblock.root.0, &mut |raw| {
            for (key, data) in items(raw) {
                if key.item_type == KeyType::ROOT_ITEM {
                    trees.push((RootId(key.objectid), RootItem::decode_any(data).expect("root item").bytenr.0));
                }
            }
        });
        trees
    }

    /// Visits each block of each tree.
    pub(crate) fn walk_all(&self, visit: &mut dyn FnMut(RootId, &[u8])) {
        for (tree, bytenr) in self.trees() {
            self.walk(bytenr, &mut |raw| visit(tree, raw));
        }
    }
}

/// The items of a block, none if it is not a leaf.
pub(crate) fn items(raw: &[u8]) -> Vec<(Key, &[u8])> {
    let view = NodeView::new(raw).expect("a block");
    if !view.is_leaf() {
        return Vec::new();
    }
    (0..view.nritems()).map(|slot| (view.key(slot).expect("key"), view.item(slot).expect("item"))).collect()
}

/// Fills a mounted filesystem with many types of items: files, links, devices, attributes, holes, clones, snapshots and
/// quota groups.
pub(crate) fn fill_richly(mount: &Path) {
    let script = r#"
        set -e
        cd "$1"
        mkdir dir; echo hello > dir/small; ln dir/small dir/hardlink; ln -s target dir/symlink
        mkfifo dir/fifo; mknod dir/null c 1 3; mknod dir/loop b 7 0
        dd if=/dev/urandom of=big bs=64k count=40 status=none
        sync
        truncate -s 1M hole; dd if=/dev/urandom of=hole bs=4k count=1 seek=100 conv=notrunc status=none
        fallocate -l 256k prealloc
        yes compressible | head -c 400000 > zeros; yes text | head -c 300 > inline
        setfattr -n user.one -v first dir/small; setfattr -n user.two -v second dir/small
        chattr +i big; chattr -i big
        mkdir many; long=$(printf 'x%.0s' $(seq 200))
        echo linked > many/first
        for i in $(seq 150); do ln many/first "many/$long$i" || break; done
        for i in $(seq 400); do echo "$i" > "dir/file$i"; done
        sync
        mkdir clones
        for i in $(seq 120); do cp --reflink=always big "clones/$i"; done
        btrfs -q subvolume create sub 2>/dev/null || btrfs subvolume create sub >/dev/null
        cp -a dir sub/copy
        btrfs subvolume snapshot sub snapshot >/dev/null
        btrfs subvolume snapshot -r . readonly >/dev/null
        echo changed > snapshot/copy/small
        sync
        btrfs quota enable . || true
        btrfs qgroup limit 1G sub || true
        touch deleted; rm -r dir/file1*
        btrfs subvolume delete readonly >/dev/null
        sync
    "#;
    run("bash", &["-c", script, "fill", mount.to_str().expect("UTF-8 path")]);
}
