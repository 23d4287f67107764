//! Scripted workloads: short lists of steps that touch everything a filesystem does, for faults and power cuts.
//!
//! I1. A script is valid: on a filesystem without faults every step succeeds, and so it does on the model.
//! I2. It depends on its seed alone.

use crate::Rng;
use crate::target::{Errno, FallocateOp, NodeKind, RenameOp, Target};

type Action = Box<dyn Fn(&mut dyn Target) -> Result<(), Errno> + Send + Sync>;

/// One step.
pub enum Step {
    /// Changes or reads something.
    Do(String, Action),
    /// Reads (offset, length); the content must be right.
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
    /// What it is about.
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

    /// Content that does not compress.
    fn noise(&mut self, path: &str, at: u64, len: usize) {
        let data = self.rng.bytes(len);
        self.write(path, at, data);
    }

    /// Content that does.
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

    /// Everything once: for faults at every request.
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
}
