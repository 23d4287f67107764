//! Scripted workloads for faults and power cuts: lists of steps that together cover most operations on files,
//! directories and links.
//!
//! I1. Every step of a script succeeds, on a filesystem without faults as well as on the model.
//! I2. A script depends only on its seed.

mod long;

use crate::Rng;
use crate::target::{Errno, FallocateOp, NodeKind, RenameOp, Target};

type Action = Box<dyn Fn(&mut dyn Target) -> Result<(), Errno> + Send + Sync>;

/// One step.
pub enum Step {
    /// An operation, with its description.
    Do(String, Action),
    /// Reads a range (offset, length) of a file; the content must be right.
    Read(Vec<u8>, u64, usize),
    /// Makes one file or directory durable.
    Fsync(Vec<u8>),
    /// Makes everything durable.
    Sync,
    /// Closes the filesystem and opens it again.
    Remount,
}

impl std::fmt::Debug for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Do(name, _) => f.write_str(name),
            Self::Read(path, at, len) => write!(f, "read {} {at}+{len}", String::from_utf8_lossy(path)),
            Self::Fsync(path) => write!(f, "fsync {}", String::from_utf8_lossy(path)),
            Self::Sync => f.write_str("sync"),
            Self::Remount => f.write_str("remount"),
        }
    }
}

/// Steps in order.
#[derive(Debug)]
pub struct Script {
    /// The subject of the script.
    pub name: &'static str,
    /// The steps.
    pub steps: Vec<Step>,
    rng: Rng,
}

impl Script {
    fn new(name: &'static str, seed: u64) -> Self {
        Self { name, steps: Vec::new(), rng: Rng::new(seed) }
    }

    fn act(&mut self, name: String, action: impl Fn(&mut dyn Target) -> Result<(), Errno> + Send + Sync + 'static) {
        self.steps.push(Step::Do(name, Box::new(action)));
    }

    fn create(&mut self, path: &str) {
        let path = path.to_owned();
        self.act(format!("create {path}"), move |to| to.create(path.as_bytes(), NodeKind::File, 0o644, (0, 0)));
    }

    fn mkdir(&mut self, path: &str) {
        let path = path.to_owned();
        self.act(format!("mkdir {path}"), move |to| to.create(path.as_bytes(), NodeKind::Directory, 0o755, (0, 0)));
    }

    fn write(&mut self, path: &str, at: u64, data: Vec<u8>) {
        let path = path.to_owned();
        self.act(format!("write {path} {at}+{}", data.len()), move |to| to.write(path.as_bytes(), at, &data));
    }

    /// Writes content that does not compress.
    fn noise(&mut self, path: &str, at: u64, len: usize) {
        let data = self.rng.bytes(len);
        self.write(path, at, data);
    }

    /// Writes content that compresses.
    fn text(&mut self, path: &str, at: u64, len: usize) {
        let data = self.rng.text(len);
        self.write(path, at, data);
    }

    fn rename(&mut self, old: &str, new: &str, op: RenameOp) {
        let (old, new) = (old.to_owned(), new.to_owned());
        self.act(format!("rename {old} {new} {op:?}"), move |to| to.rename(old.as_bytes(), new.as_bytes(), op));
    }

    fn link(&mut self, old: &str, new: &str) {
        let (old, new) = (old.to_owned(), new.to_owned());
        self.act(format!("link {old} {new}"), move |to| to.link(old.as_bytes(), new.as_bytes()));
    }

    fn unlink(&mut self, path: &str) {
        let path = path.to_owned();
        self.act(format!("unlink {path}"), move |to| to.unlink(path.as_bytes()));
    }

    fn rmdir(&mut self, path: &str) {
        let path = path.to_owned();
        self.act(format!("rmdir {path}"), move |to| to.rmdir(path.as_bytes()));
    }

    fn truncate(&mut self, path: &str, len: u64) {
        let path = path.to_owned();
        self.act(format!("truncate {path} {len}"), move |to| to.truncate(path.as_bytes(), len));
    }

    fn fallocate(&mut self, path: &str, at: u64, len: u64, op: FallocateOp) {
        let path = path.to_owned();
        self.act(format!("fallocate {path} {at}+{len} {op:?}"), move |to| to.fallocate(path.as_bytes(), at, len, op));
    }

    fn copy(&mut self, from: &str, from_at: u64, path: &str, at: u64, len: u64) {
        let (from, path) = (from.to_owned(), path.to_owned());
        self.act(format!("copy {from} {from_at}+{len} {path} {at}"), move |to| {
            to.copy_range(from.as_bytes(), from_at, path.as_bytes(), at, len)
        });
    }

    fn xattr(&mut self, path: &str, name: &str, len: usize) {
        let (path, name, value) = (path.to_owned(), name.to_owned(), self.rng.bytes(len));
        self.act(format!("setxattr {path} {name} {len}"), move |to| {
            to.set_xattr(path.as_bytes(), name.as_bytes(), &value)
        });
    }

    fn remove_xattr(&mut self, path: &str, name: &str) {
        let (path, name) = (path.to_owned(), name.to_owned());
        self.act(format!("removexattr {path} {name}"), move |to| to.remove_xattr(path.as_bytes(), name.as_bytes()));
    }

    fn symlink(&mut self, path: &str, content: &str) {
        let (path, content) = (path.to_owned(), content.to_owned());
        self.act(format!("symlink {path}"), move |to| to.symlink(path.as_bytes(), content.as_bytes()));
    }

    fn fsync(&mut self, path: &str) {
        self.steps.push(Step::Fsync(path.as_bytes().to_vec()));
    }

    fn read(&mut self, path: &str, at: u64, len: usize) {
        self.steps.push(Step::Read(path.as_bytes().to_vec(), at, len));
    }

    fn sync(&mut self) {
        self.steps.push(Step::Sync);
    }

    fn remount(&mut self) {
        self.steps.push(Step::Remount);
    }

    /// A script that contains most operations, for faults at every request.
    pub fn everything(seed: u64) -> Self {
        let mut s = Self::new("everything", seed);
        s.mkdir("dir");
        s.mkdir("dir/sub");
        s.create("dir/inline");
        s.noise("dir/inline", 0, 900);
        s.create("data");
        s.noise("data", 0, 200_000);
        s.create("text");
        s.text("text", 0, 700_000);
        s.sync();
        s.create("dir/synced");
        s.noise("dir/synced", 0, 30_000);
        s.fsync("dir/synced");
        s.noise("dir/synced", 30_000, 5000);
        s.fsync("dir/synced");
        s.text("text", 100_000, 50_000);
        s.rename("dir/inline", "inline", RenameOp::Replace);
        s.link("data", "dir/sub/data-2");
        s.symlink("dir/symlink", "../data");
        s.xattr("inline", "user.one", 300);
        s.xattr("dir", "user.two", 20);
        s.sync();
        s.remount();
        s.read("data", 1000, 100_000);
        s.read("text", 0, 700_000);
        s.noise("data", 50_000, 60_000);
        s.truncate("text", 250_001);
        s.fallocate("data", 8192, 40_000, FallocateOp::PunchHole);
        s.fallocate("data", 400_000, 65_536, FallocateOp::Allocate);
        s.noise("data", 404_096, 8192);
        s.create("clone");
        s.copy("data", 0, "clone", 0, 131_072);
        s.copy("text", 0, "clone", 262_144, 131_072);
        s.noise("clone", 12_288, 4096);
        s.fsync("clone");
        s.remove_xattr("inline", "user.one");
        s.sync();
        for index in 0..40 {
            let path = format!("dir/many-{index}");
            s.create(&path);
            s.noise(&path, 0, 100 + 400 * index);
        }
        s.fsync("dir");
        s.create("tmp");
        s.noise("tmp", 0, 20_000);
        s.fsync("tmp");
        s.rename("tmp", "dir/synced", RenameOp::Replace);
        s.fsync("dir/synced");
        s.sync();
        for index in (0..40).step_by(3) {
            s.unlink(&format!("dir/many-{index}"));
        }
        s.unlink("dir/sub/data-2");
        s.rmdir("dir/sub");
        s.rename("clone", "text", RenameOp::Exchange);
        s.remount();
        s.read("clone", 0, 300_000);
        s.read("text", 0, 700_000);
        s.unlink("data");
        s.create("big");
        s.text("big", 0, 5 << 20);
        s.noise("big", 1 << 20, 300_000);
        s.sync();
        s.truncate("big", 2 << 20);
        s.noise("big", 100, 5000);
        s.fsync("big");
        s.sync();
        s
    }

    /// A script of about 60 to 100 steps about one behaviour that programs rely on. `kind` is below [`Script::KINDS`].
    pub fn about(kind: usize, seed: u64) -> Self {
        let make = [
            Self::overwrite_by_rename,
            Self::append,
            Self::directories,
            Self::links,
            Self::sizes,
            Self::holes,
            Self::reflinks,
            Self::attributes,
            Self::log_structured,
        ];
        make[kind % Self::KINDS](seed)
    }

    /// Number of kinds of scripts.
    pub const KINDS: usize = 9;

    fn len(&mut self, most: u64) -> usize {
        self.rng.len(most).max(1) as usize
    }

    fn sync_sometimes(&mut self, every: u64) {
        if self.rng.one_in(every) {
            self.sync();
        }
    }

    /// Works as editors do: writes a temporary file, fsyncs it, and renames it over the old file.
    fn overwrite_by_rename(seed: u64) -> Self {
        let mut s = Self::new("overwrite by rename", seed);
        for file in 0..3 {
            s.create(&format!("file-{file}"));
            s.noise(&format!("file-{file}"), 0, 3000 + 5000 * file);
        }
        s.sync();
        for _ in 0..14 {
            let file = format!("file-{}", s.rng.below(3));
            let len = s.len(30_000);
            s.create("tmp");
            s.noise("tmp", 0, len);
            s.fsync("tmp");
            s.rename("tmp", &file, RenameOp::Replace);
            match s.rng.below(4) {
                0 => s.fsync(&file),
                1 => s.fsync(""),
                _ => {}
            }
            s.sync_sometimes(6);
        }
        s
    }

    /// Works as logs and mail servers do: appends to files and fsyncs them.
    fn append(seed: u64) -> Self {
        let mut s = Self::new("append and fsync", seed);
        let mut sizes = [0u64; 3];
        for file in 0..3 {
            s.create(&format!("log-{file}"));
        }
        for _ in 0..40 {
            let file = s.rng.index(3);
            let path = format!("log-{file}");
            let len = s.len(9000);
            if s.rng.one_in(2) {
                s.noise(&path, sizes[file], len);
            } else {
                s.text(&path, sizes[file], len);
            }
            sizes[file] += len as u64;
            if s.rng.below(3) > 0 {
                s.fsync(&path);
            }
            s.sync_sometimes(15);
        }
        s
    }

    /// Creates, renames and removes names, and fsyncs the directory or the file.
    fn directories(seed: u64) -> Self {
        let mut s = Self::new("directories", seed);
        s.mkdir("a");
        s.mkdir("b");
        s.sync();
        let mut files: Vec<String> = Vec::new();
        for index in 0..35 {
            let dir = *s.rng.pick(&["a", "b"]);
            match s.rng.below(if files.is_empty() { 1 } else { 6 }) {
                0..2 => {
                    let path = format!("{dir}/file-{index}");
                    s.create(&path);
                    let len = s.len(5000);
                    s.noise(&path, 0, len);
                    files.push(path);
                }
                2 => {
                    let at = s.rng.index(files.len());
                    let path = files.swap_remove(at);
                    s.unlink(&path);
                }
                3 => {
                    let at = s.rng.index(files.len());
                    let (old, new) = (files.swap_remove(at), format!("{dir}/moved-{index}"));
                    s.rename(&old, &new, RenameOp::NoReplace);
                    files.push(new);
                }
                4 => {
                    let path = format!("{dir}/sub-{index}");
                    s.mkdir(&path);
                    s.create(&format!("{path}/leaf"));
                    if s.rng.one_in(2) {
                        s.fsync(&format!("{path}/leaf"));
                    } else {
                        s.fsync(&path);
                    }
                }
                _ => {
                    let path = s.rng.pick(&files).clone();
                    s.fsync(&path);
                }
            }
            if s.rng.one_in(3) {
                s.fsync(dir);
            }
            s.sync_sometimes(12);
        }
        s
    }

    /// Makes and removes several names of one file.
    fn links(seed: u64) -> Self {
        let mut s = Self::new("links", seed);
        s.mkdir("dir");
        s.create("file");
        s.noise("file", 0, 10_000);
        s.sync();
        let mut names = vec!["file".to_owned()];
        for index in 0..35 {
            match s.rng.below(5) {
                0..2 => {
                    let old = s.rng.pick(&names).clone();
                    let new = format!("{}name-{index}", s.rng.pick(&["", "dir/"]));
                    s.link(&old, &new);
                    names.push(new);
                }
                2 if names.len() > 1 => {
                    let at = s.rng.index(names.len());
                    let name = names.swap_remove(at);
                    s.unlink(&name);
                }
                3 => {
                    let at = s.rng.index(names.len());
                    let (old, new) = (names.swap_remove(at), format!("dir/renamed-{index}"));
                    s.rename(&old, &new, RenameOp::Replace);
                    names.push(new);
                }
                _ => {
                    let name = s.rng.pick(&names).clone();
                    let at = s.rng.below(12_000);
                    s.noise(&name, at, 700);
                }
            }
            if s.rng.one_in(3) {
                let name = s.rng.pick(&names).clone();
                s.fsync(&name);
            }
            s.sync_sometimes(12);
        }
        s
    }

    /// Truncates files to smaller and larger sizes, and writes into them again.
    fn sizes(seed: u64) -> Self {
        let mut s = Self::new("sizes", seed);
        for file in 0..2 {
            s.create(&format!("file-{file}"));
            s.noise(&format!("file-{file}"), 0, 60_000);
        }
        s.sync();
        for _ in 0..35 {
            let path = format!("file-{}", s.rng.below(2));
            let at = s.rng.below(90_000);
            let len = s.len(12_000);
            match s.rng.below(3) {
                0 => s.truncate(&path, at),
                1 => s.noise(&path, at, len),
                _ => s.text(&path, at / 4096 * 4096, len),
            }
            if s.rng.one_in(2) {
                s.fsync(&path);
            }
            s.sync_sometimes(12);
        }
        s
    }

    /// Punches, zeros and preallocates ranges, and writes into them.
    fn holes(seed: u64) -> Self {
        let mut s = Self::new("holes", seed);
        s.create("file");
        s.noise("file", 0, 120_000);
        s.sync();
        for _ in 0..35 {
            let at = s.rng.below(150_000) / 1024 * 1024;
            let len = s.len(40_000);
            match s.rng.below(5) {
                0 => s.fallocate("file", at, len as u64, FallocateOp::PunchHole),
                1 => s.fallocate("file", at, len as u64, FallocateOp::ZeroRange),
                2 => s.fallocate("file", at, len as u64, FallocateOp::Allocate),
                3 => s.fallocate("file", at + 100_000, len as u64, FallocateOp::KeepSize),
                _ => s.noise("file", at, len / 4 + 1),
            }
            if s.rng.one_in(2) {
                s.fsync("file");
            }
            s.sync_sometimes(12);
        }
        s
    }

    /// Shares extents between files, and overwrites shared extents.
    fn reflinks(seed: u64) -> Self {
        let mut s = Self::new("reflinks", seed);
        for file in 0..3 {
            s.create(&format!("file-{file}"));
            s.noise(&format!("file-{file}"), 0, 65_536);
        }
        s.sync();
        for _ in 0..30 {
            let (from, to) = (s.rng.below(3), s.rng.below(3));
            let path = format!("file-{to}");
            let (from_at, at) = (s.rng.below(12) * 4096, s.rng.below(20) * 4096);
            if from == to || s.rng.one_in(3) {
                let len = s.len(9000);
                s.noise(&path, at, len);
            } else {
                s.copy(&format!("file-{from}"), from_at, &path, at, 16_384);
            }
            if s.rng.one_in(2) {
                s.fsync(&path);
            }
            s.sync_sometimes(12);
        }
        s
    }

    /// Sets and removes extended attributes, changes modes, and makes symbolic links.
    fn attributes(seed: u64) -> Self {
        let mut s = Self::new("attributes", seed);
        s.mkdir("dir");
        s.create("dir/file");
        s.sync();
        for index in 0..35 {
            let path = *s.rng.pick(&["dir", "dir/file"]);
            let name = format!("user.{}", s.rng.below(4));
            match s.rng.below(5) {
                0..2 => {
                    let len = s.len(1500);
                    s.xattr(path, &name, len);
                }
                2 => {
                    s.xattr(path, &name, 10);
                    s.fsync(path);
                    s.remove_xattr(path, &name);
                }
                3 => {
                    let mode = *s.rng.pick(&[0o600, 0o644, 0o755]);
                    let to_path = path.to_owned();
                    s.act(format!("chmod {path} {mode:o}"), move |to| to.chmod(to_path.as_bytes(), mode));
                }
                _ => s.symlink(&format!("dir/symlink-{index}"), "somewhere"),
            }
            if s.rng.one_in(2) {
                s.fsync(path);
            }
            s.sync_sometimes(12);
        }
        s
    }

    /// Works as databases do: appends to a journal with fsyncs, overwrites pages in place, and makes checkpoints.
    fn log_structured(seed: u64) -> Self {
        let mut s = Self::new("journal and pages", seed);
        s.create("db");
        s.noise("db", 0, 64 << 10);
        s.fsync("db");
        s.sync();
        for round in 0..6 {
            let journal = format!("journal-{round}");
            s.create(&journal);
            let mut at = 0;
            for _ in 0..4 {
                s.noise(&journal, at, 4096);
                at += 4096;
                s.fsync(&journal);
            }
            for _ in 0..3 {
                let page = s.rng.below(16);
                s.noise("db", page * 4096, 4096);
            }
            s.fsync("db");
            s.unlink(&journal);
            if s.rng.one_in(2) {
                s.fsync("");
            }
        }
        s
    }
}
