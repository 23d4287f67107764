//! A filesystem that Linux made and filled, with everything that an ordinary filesystem can contain.
//!
//! The filesystem has three kinds of compression; inline, regular and preallocated extents; holes; reflinks; more
//! hard links than fit into an inode reference; names with equal hashes; large directories; all types of inodes;
//! extended attributes; ACLs; subvolumes; a writable and a read-only snapshot that share blocks with their source.
//!
//! I1. The content depends only on the seed and on `RichTree::extrefs`, so two images with the same seed and
//!     `extrefs` differ only in format.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{CWD, FallocateFlags, FileType, IFlags, Mode, XattrFlags};
use ubtrfs_format::CsumType;
use ubtrfs_format::superblock::CompatRo;

use crate::command::run;
use crate::{Image, LoopMount, Model, Rng, colliding_names, name_of_len};

/// The format of an image, and the mount options while it is filled.
#[derive(Clone, Debug)]
pub struct KernelImageSpec {
    /// The name in messages.
    pub name: &'static str,
    /// The size of the image file in bytes.
    pub len_bytes: u64,
    /// Arguments for mkfs.btrfs.
    pub mkfs: &'static [&'static str],
    /// Options of the kernel's mount.
    pub mount: &'static str,
    /// Whether the image is formatted by `ubtrfs_mkfs` with a block group tree, which btrfs-progs 6.2 cannot make.
    pub block_group_tree: bool,
}

/// An image in the format of a `KernelImageSpec`.
#[derive(Debug)]
pub struct KernelImage {
    /// The image file.
    pub image: Image,
    /// The format of the image.
    pub spec: KernelImageSpec,
}

impl KernelImageSpec {
    const fn new(name: &'static str, mkfs: &'static [&'static str]) -> Self {
        Self { name, len_bytes: 512 << 20, mkfs, mount: "", block_group_tree: false }
    }

    /// The format that `mkfs.btrfs` makes without options.
    pub const DEFAULT: Self = Self::new("default", &[]);

    /// The formats of filesystems on one device that tests use.
    pub fn matrix() -> Vec<Self> {
        vec![
            Self::DEFAULT,
            Self::new("nodes of 4 KiB", &["-n", "4096"]),
            Self::new("nodes of 64 KiB", &["-n", "65536"]),
            Self::new("xxhash", &["--csum", "xxhash"]),
            Self::new("sha256, nodes of 4 KiB", &["--csum", "sha256", "-n", "4096"]),
            Self::new("blake2", &["--csum", "blake2"]),
            Self::new("hole extents", &["-O", "^no-holes"]),
            Self {
                mount: "space_cache=v1",
                ..Self::new("space cache v1, hole extents", &["-O", "^no-holes", "-R", "^free-space-tree"])
            },
            Self { mount: "nospace_cache", ..Self::new("no free space tree", &["-R", "^free-space-tree"]) },
            Self::new("single", &["-m", "single", "-d", "single"]),
            Self::new("dup data", &["-m", "dup", "-d", "dup"]),
            Self::new("mixed", &["-M"]),
            Self::new("no skinny metadata, no extrefs", &["-O", "^skinny-metadata,^extref"]),
            Self { block_group_tree: true, ..Self::new("block group tree", &[]) },
        ]
    }

    /// The format with this name.
    ///
    /// # Panics
    /// If there is no such format.
    pub fn named(name: &str) -> Self {
        Self::matrix().into_iter().find(|spec| spec.name == name).expect("a name from the matrix")
    }

    fn has_extrefs(&self) -> bool {
        !self.mkfs.iter().any(|arg| arg.contains("^extref"))
    }
}

impl KernelImage {
    /// Formats an image and fills it with a [`RichTree`].
    pub fn rich(spec: KernelImageSpec, seed: u64) -> Result<Self> {
        let made = Self::empty(spec)?;
        let mount = LoopMount::new(made.image.path(), made.spec.mount)?;
        let tree = RichTree { seed, extrefs: made.spec.has_extrefs() };
        tree.fill(mount.path()).with_context(|| format!("fill the image '{}'", made.spec.name))?;
        mount.close()?;
        Ok(made)
    }

    /// Formats an image.
    pub fn empty(spec: KernelImageSpec) -> Result<Self> {
        let image = if spec.block_group_tree {
            let image = Image::empty(spec.len_bytes)?;
            let device = ubtrfs_device::FileDevice::open(image.path(), ubtrfs_device::Access::ReadWrite)
                .map_err(|error| anyhow::anyhow!("{error}"))?;
            let mut options = ubtrfs_mkfs::MkfsOptions { csum_type: CsumType::Crc32c, ..Default::default() };
            options.compat_ro |= CompatRo::BLOCK_GROUP_TREE;
            ubtrfs_mkfs::make(&device, &options)?;
            image
        } else {
            Image::kernel_made(spec.len_bytes, spec.mkfs)?
        };
        Ok(Self { image, spec })
    }
}

/// The content of a [`KernelImage`]. A [`RichTree`] can fill any mounted btrfs.
#[derive(Clone, Copy, Debug)]
pub struct RichTree {
    /// Seed of the whole content.
    pub seed: u64,
    /// Whether a file may have more links in one directory than fit into an inode reference.
    pub extrefs: bool,
}

impl RichTree {
    /// The directory for properties that the reference model does not implement: inherited ACLs and inode flags.
    pub const SPECIAL: &'static [u8] = b"special";
    /// The read-only snapshot.
    pub const READ_ONLY: &'static [u8] = b"snapshots/read-only";

    /// Loads a mounted rich tree into the reference model.
    pub fn model(mount: &Path) -> Result<Model> {
        let mut model = Model::load(mount)?;
        let known = |error| anyhow::anyhow!("the tree is not complete: errno {error}");
        model.fix(Self::SPECIAL).map_err(known)?;
        model.set_read_only(Self::READ_ONLY).map_err(known)?;
        Ok(model)
    }

    /// Fills the filesystem mounted at `root`. Needs root privileges.
    pub fn fill(&self, root: &Path) -> Result<()> {
        rustix::process::umask(Mode::empty());
        let mut rng = Rng::new(self.seed);
        self.files(&root.join("files"), &mut rng).context("files")?;
        self.compressed(&root.join("compressed"), &mut rng).context("compressed")?;
        self.sparse(&root.join("sparse"), &mut rng).context("sparse")?;
        self.preallocated(&root.join("prealloc"), &mut rng).context("prealloc")?;
        self.reflinks(&root.join("reflinks"), &mut rng).context("reflinks")?;
        self.links(&root.join("links"), &mut rng).context("links")?;
        self.names(&root.join("names"), &mut rng).context("names")?;
        self.types(&root.join("types")).context("types")?;
        self.attributes(&root.join("attributes"), &mut rng).context("attributes")?;
        self.special(&root.join("special"), &mut rng).context("special")?;
        self.subvolumes(root, &mut rng).context("subvolumes")?;
        run("sync", ["-f".as_ref(), root.as_os_str()])?;
        Ok(())
    }

    fn files(&self, dir: &Path, rng: &mut Rng) -> Result<()> {
        fs::create_dir(dir)?;
        for len in [0usize, 1, 100, 2047, 2048, 2049, 4095, 4096, 4097, 65_536, 131_072, 131_073, 1_000_000] {
            fs::write(dir.join(format!("random-{len}")), rng.bytes(len))?;
            fs::write(dir.join(format!("text-{len}")), rng.text(len))?;
        }
        fs::write(dir.join("large"), rng.bytes(4 << 20))?;
        // Make many extents: write backwards, with syncs in between, so that Linux does not merge the extents.
        let file = File::create(dir.join("fragmented"))?;
        for index in (0..40u64).rev() {
            file.write_all_at(&rng.bytes(4096 + 37 * index as usize), index * 12_288)?;
            if index % 8 == 0 {
                file.sync_data()?;
            }
        }
        // Make enough small files for a tree with several levels.
        let small = dir.join("small");
        fs::create_dir(&small)?;
        for index in 0..1500 {
            let len = rng.len(6000) as usize;
            let path = small.join(format!("file-{index:05}"));
            fs::write(&path, rng.content(len))?;
            if index % 3 == 0 {
                std::os::unix::fs::chown(&path, Some(index % 70_000), Some(index % 100))?;
                fs::set_permissions(&path, fs::Permissions::from_mode(index & 0o777))?;
            }
        }
        let mut deep = dir.join("deep");
        for level in 0..40 {
            deep.push(format!("level-{level}"));
        }
        fs::create_dir_all(&deep)?;
        fs::write(deep.join("bottom"), b"bottom")?;
        Ok(())
    }

    fn compressed(&self, dir: &Path, rng: &mut Rng) -> Result<()> {
        fs::create_dir(dir)?;
        for method in ["zlib", "lzo", "zstd"] {
            for len in [60usize, 900, 2040, 4096, 20_000, 131_072, 131_073, 700_001] {
                let path = dir.join(format!("{method}-{len}"));
                with_compression(&path, method)?.write_all_at(&rng.text(len), 0)?;
            }
            let path = dir.join(format!("{method}-overwritten"));
            let file = with_compression(&path, method)?;
            file.write_all_at(&rng.text(600_000), 0)?;
            file.sync_all()?;
            // Cut compressed extents in two, and leave a compressed extent of which only the end is used.
            file.write_all_at(&rng.bytes(5000), 50_000)?;
            file.write_all_at(&rng.text(140_000), 200_000)?;
            punch(&file, 400_000, 70_000)?;
            let path = dir.join(format!("{method}-sparse"));
            let file = with_compression(&path, method)?;
            for index in 0..6u64 {
                file.write_all_at(&rng.text(30_000), index * 200_000)?;
            }
            file.set_len(2_000_001)?;
            let path = dir.join(format!("{method}-incompressible"));
            with_compression(&path, method)?.write_all_at(&rng.bytes(300_000), 0)?;
            let path = dir.join(format!("{method}-zeros"));
            with_compression(&path, method)?.write_all_at(&vec![0; 300_000], 0)?;
        }
        Ok(())
    }

    fn sparse(&self, dir: &Path, rng: &mut Rng) -> Result<()> {
        fs::create_dir(dir)?;
        File::create(dir.join("only-a-hole"))?.set_len(10_000_000)?;
        let file = File::create(dir.join("terabyte"))?;
        for offset in [0, 5 << 30, (1 << 40) - 100] {
            file.write_all_at(&rng.bytes(5000), offset)?;
        }
        file.set_len((1 << 40) + (1 << 30))?;
        let file = File::create(dir.join("comb"))?;
        for index in 0..64u64 {
            file.write_all_at(&rng.bytes(4096), index * 8192)?;
        }
        let file = File::create(dir.join("punched"))?;
        file.write_all_at(&rng.bytes(1 << 20), 0)?;
        file.sync_all()?;
        punch(&file, 4096, 4096)?;
        punch(&file, 100_001, 50_000)?;
        punch(&file, 900_000, 200_000)?;
        let file = File::create(dir.join("inline-then-grown"))?;
        file.write_all_at(&rng.bytes(500), 0)?;
        file.sync_all()?;
        file.set_len(300_000)?;
        file.write_all_at(&rng.bytes(10), 299_000)?;
        Ok(())
    }

    fn preallocated(&self, dir: &Path, rng: &mut Rng) -> Result<()> {
        fs::create_dir(dir)?;
        let allocate = |name: &str, flags, offset, len_bytes| -> Result<File> {
            let file = File::create(dir.join(name))?;
            rustix::fs::fallocate(&file, flags, offset, len_bytes)?;
            Ok(file)
        };
        allocate("whole", FallocateFlags::empty(), 0, 1 << 20)?;
        allocate("beyond-the-end", FallocateFlags::KEEP_SIZE, 0, 1 << 20)?.write_all_at(&rng.bytes(3000), 0)?;
        let file = allocate("partly-written", FallocateFlags::empty(), 0, 2 << 20)?;
        for index in 0..10u64 {
            file.write_all_at(&rng.bytes(9000), index * 150_000)?;
        }
        file.sync_all()?;
        punch(&file, 300_000, 200_000)?;
        let file = allocate("zeroed", FallocateFlags::empty(), 4096, 8192)?;
        file.write_all_at(&rng.bytes(400_000), 0)?;
        file.sync_all()?;
        rustix::fs::fallocate(&file, FallocateFlags::ZERO_RANGE, 10_000, 300_000)?;
        Ok(())
    }

    fn reflinks(&self, dir: &Path, rng: &mut Rng) -> Result<()> {
        fs::create_dir(dir)?;
        let source = dir.join("source");
        fs::write(&source, rng.bytes(1 << 20))?;
        let text = dir.join("text");
        with_compression(&text, "zstd")?.write_all_at(&rng.text(1 << 20), 0)?;
        for path in [&source, &text] {
            File::open(path)?.sync_all()?;
            for copy in 0..3 {
                let clone = path.with_extension(format!("clone-{copy}"));
                rustix::fs::ioctl_ficlone(File::create(&clone)?, File::open(path)?)?;
                let file = File::options().write(true).open(&clone)?;
                file.write_all_at(&rng.bytes(5000), 100_000 * (copy + 1))?;
            }
        }
        let patchwork = File::create(dir.join("patchwork"))?;
        let source = File::open(&source)?;
        for index in 0..20u64 {
            let (mut from, mut to) = (rng.below(200) * 4096, index * 40_960);
            rustix::fs::copy_file_range(&source, Some(&mut from), &patchwork, Some(&mut to), 32_768)?;
        }
        Ok(())
    }

    fn links(&self, dir: &Path, rng: &mut Rng) -> Result<()> {
        fs::create_dir(dir)?;
        let target = dir.join("target");
        fs::write(&target, rng.text(10_000))?;
        // A name of 200 bytes takes 210 bytes in an inode reference, so 400 names do not fit into one item.
        let count = if self.extrefs { 400 } else { 15 };
        for index in 0..count {
            let name = [format!("{index:04}-").into_bytes(), name_of_len(rng, 195)].concat();
            fs::hard_link(&target, dir.join(OsStr::from_bytes(&name)))?;
        }
        for sub in 0..4 {
            let sub = dir.join(format!("dir-{sub}"));
            fs::create_dir(&sub)?;
            for index in 0..10 {
                fs::hard_link(&target, sub.join(format!("link-{index}")))?;
            }
        }
        Ok(())
    }

    fn names(&self, dir: &Path, rng: &mut Rng) -> Result<()> {
        fs::create_dir(dir)?;
        for name in colliding_names(rng, 20) {
            fs::write(dir.join(OsStr::from_bytes(&name)), &name)?;
        }
        for len in [1, 127, 254, 255, 255] {
            let name = name_of_len(rng, len);
            fs::write(dir.join(OsStr::from_bytes(&name)), b"x")?;
        }
        let bytes: Vec<u8> = (1..=255).filter(|&byte| byte != b'/').collect();
        fs::write(dir.join(OsStr::from_bytes(&bytes)), b"all bytes")?;
        fs::write(dir.join(OsStr::from_bytes("名前 🦀 naïve".as_bytes())), b"utf-8")?;
        let large = dir.join("large");
        fs::create_dir(&large)?;
        for index in 0..4000 {
            File::create(large.join(format!("entry-{index}")))?;
        }
        for index in (0..4000).step_by(7) {
            fs::remove_file(large.join(format!("entry-{index}")))?;
        }
        Ok(())
    }

    fn types(&self, dir: &Path) -> Result<()> {
        fs::create_dir(dir)?;
        let node = |name: &str, file_type, rdev| {
            rustix::fs::mknodat(CWD, dir.join(name), file_type, Mode::from_raw_mode(0o640), rdev)
        };
        node("fifo", FileType::Fifo, 0)?;
        node("socket", FileType::Socket, 0)?;
        node("null", FileType::CharacterDevice, rustix::fs::makedev(1, 3))?;
        node("big-numbers", FileType::CharacterDevice, rustix::fs::makedev(4095, 1_048_575))?;
        node("disk", FileType::BlockDevice, rustix::fs::makedev(8, 17))?;
        symlink("target", dir.join("link"))?;
        symlink("../files/../files/large", dir.join("relative"))?;
        symlink("x".repeat(2500), dir.join("long-link"))?;
        symlink("nowhere/at/all", dir.join("dangling"))?;
        Ok(())
    }

    fn attributes(&self, dir: &Path, rng: &mut Rng) -> Result<()> {
        fs::create_dir(dir)?;
        let path = dir.join("few");
        fs::write(&path, b"few attributes")?;
        set_xattr(&path, b"user.empty", b"")?;
        set_xattr(&path, b"user.text", b"value")?;
        set_xattr(&path, b"trusted.secret", &rng.bytes(100))?;
        set_xattr(&path, b"security.made-up", &rng.bytes(20))?;
        let path = dir.join("many");
        fs::write(&path, b"many attributes")?;
        for index in 0..60 {
            let len = rng.below(300) as usize;
            set_xattr(&path, format!("user.attribute-{index}").as_bytes(), &rng.bytes(len))?;
        }
        set_xattr(&path, b"user.large", &rng.bytes(3500))?;
        set_xattr(dir, b"user.on-a-directory", b"yes")?;
        // Times before 1970, far in the future, and with nanoseconds.
        for (name, sec, nsec) in [("old", -123_456_789, 1), ("ahead", 1 << 34, 999_999_999), ("now", 1_700_000_000, 5)]
        {
            let path = dir.join(name);
            fs::write(&path, name)?;
            let time = rustix::fs::Timespec { tv_sec: sec, tv_nsec: nsec };
            let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
            rustix::fs::utimensat(CWD, &path, &times, rustix::fs::AtFlags::empty())?;
        }
        Ok(())
    }

    fn special(&self, dir: &Path, rng: &mut Rng) -> Result<()> {
        fs::create_dir(dir)?;
        let acl = dir.join("acl");
        fs::write(&acl, b"access list")?;
        run("setfacl", ["-m", "u:1000:rwx,g:100:r,u:65534:-", &acl.to_string_lossy()])?;
        let default = dir.join("default-acl");
        fs::create_dir(&default)?;
        run("setfacl", ["-d", "-m", "u:1000:rwx,g:100:rx,o::r", &default.to_string_lossy()])?;
        fs::write(default.join("inherits"), b"its list")?;
        fs::create_dir(default.join("inherits-too"))?;
        let path = dir.join("setuid");
        fs::write(&path, b"program")?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o6755))?;
        let nocow = dir.join("nodatacow");
        fs::create_dir(&nocow)?;
        set_flags(&nocow, IFlags::from_bits_retain(0x0080_0000))?;
        let file = File::create(nocow.join("file"))?;
        file.write_all_at(&rng.bytes(500_000), 0)?;
        file.sync_all()?;
        file.write_all_at(&rng.bytes(50_000), 100_000)?;
        for (name, flags) in
            [("immutable", IFlags::IMMUTABLE), ("append", IFlags::APPEND), ("noatime", IFlags::NOATIME)]
        {
            let path = dir.join(name);
            fs::write(&path, name)?;
            set_flags(&path, flags)?;
        }
        let handed_down = dir.join("compress-directory");
        fs::create_dir(&handed_down)?;
        run("btrfs", ["property", "set", &handed_down.to_string_lossy(), "compression", "zstd"])?;
        fs::write(handed_down.join("file"), rng.text(300_000))?;
        // Attributes whose names have equal hashes share an item.
        let shared = dir.join("colliding-attributes");
        fs::write(&shared, b"colliding")?;
        for name in colliding_names(rng, 4) {
            set_xattr(&shared, &[b"user.".as_slice(), &name].concat(), &name)?;
        }
        Ok(())
    }

    fn subvolumes(&self, root: &Path, rng: &mut Rng) -> Result<()> {
        let subvolume = root.join("subvolume");
        run("btrfs", ["subvolume", "create", &subvolume.to_string_lossy()])?;
        self.compressed(&subvolume.join("compressed"), rng)?;
        let small = subvolume.join("small");
        fs::create_dir(&small)?;
        for index in 0..800 {
            let len = rng.len(9000) as usize;
            fs::write(small.join(format!("file-{index}")), rng.content(len))?;
        }
        let nested = subvolume.join("nested");
        run("btrfs", ["subvolume", "create", &nested.to_string_lossy()])?;
        fs::write(nested.join("file"), rng.bytes(70_000))?;
        let snapshots = root.join("snapshots");
        fs::create_dir(&snapshots)?;
        let snapshot = |args: &[&str], name: &str| -> Result<PathBuf> {
            let path = snapshots.join(name);
            let (from, to) = (subvolume.to_string_lossy(), path.to_string_lossy());
            run("btrfs", ["subvolume", "snapshot"].iter().chain(args).copied().chain([&*from, &*to]))?;
            Ok(path)
        };
        snapshot(&["-r"], "read-only")?;
        self.scribble(&subvolume, rng)?;
        let writable = snapshot(&[], "writable")?;
        self.scribble(&subvolume, rng)?;
        self.scribble(&writable, rng)?;
        Ok(())
    }

    /// Changes part of a subvolume that has a snapshot. The subvolume and the snapshot still share the unchanged parts.
    fn scribble(&self, subvolume: &Path, rng: &mut Rng) -> Result<()> {
        let small = subvolume.join("small");
        for _ in 0..60 {
            let path = small.join(format!("file-{}", rng.below(800)));
            if path.exists() {
                match rng.below(4) {
                    0 => fs::remove_file(&path)?,
                    1 => fs::write(&path, rng.content(5000))?,
                    2 => File::options().write(true).open(&path)?.write_all_at(&rng.bytes(100), 2000)?,
                    _ => fs::rename(&path, path.with_extension("renamed"))?,
                }
            }
        }
        fs::write(small.join(format!("new-{}", rng.next_u64())), rng.text(40_000))?;
        let file = File::options().write(true).open(subvolume.join("compressed/zstd-700001"))?;
        file.write_all_at(&rng.text(30_000), rng.below(600_000))?;
        Ok(())
    }
}

fn with_compression(path: &Path, method: &str) -> Result<File> {
    let file = File::create(path)?;
    run("btrfs", ["property", "set", &path.to_string_lossy(), "compression", method])?;
    Ok(file)
}

fn punch(file: &File, offset: u64, len_bytes: u64) -> Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(file, flags, offset, len_bytes)?)
}

fn set_xattr(path: &Path, name: &[u8], value: &[u8]) -> Result<()> {
    rustix::fs::lsetxattr(path, OsStr::from_bytes(name), value, XattrFlags::empty())
        .with_context(|| format!("setxattr {} on {}", name.escape_ascii(), path.display()))
}

fn set_flags(path: &Path, flags: IFlags) -> Result<()> {
    let file = File::open(path)?;
    let now = rustix::fs::ioctl_getflags(&file)?;
    rustix::fs::ioctl_setflags(&file, now | flags).with_context(|| format!("flags of {}", path.display()))
}
