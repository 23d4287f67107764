//! Runs random operations: the model predicts the answer of each, the filesystem under test performs it, and the
//! answers are compared.
//!
//! I1. The sequence depends only on the seed and the model, so a failure repeats from its seed.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Result, bail};

use crate::model::{Model, ROOT};
use crate::target::{Errno, FallocateOp, NodeKind, RenameOp, Target};
use crate::tree_entry::{join, show};
use crate::{Rng, name_of_len};

/// Applies random operations to a model and a target.
#[derive(Debug)]
pub struct Driver {
    rng: Rng,
    seed: u64,
    step: usize,
    max_file_bytes: u64,
    names_only: bool,
    ids: Vec<u64>,
    rest: Option<Rest>,
    report: DriverReport,
    trace: Vec<String>,
}

/// The second half of making a file or directory. The second half is a separate step, because snapshots and power
/// cuts may occur between both halves.
#[derive(Debug)]
enum Rest {
    /// Set the mode.
    Mode(Vec<u8>, u32),
    /// Write content of this length to the file at this path.
    Content(Vec<u8>, u64),
}

/// The number of operations of each name, and the total number of operations that failed as predicted.
#[derive(Clone, Debug, Default)]
pub struct DriverReport {
    counts: BTreeMap<&'static str, usize>,
    failures: usize,
}

impl fmt::Display for DriverReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, count) in &self.counts {
            write!(f, "{name} {count}, ")?;
        }
        write!(f, "refused as predicted {}", self.failures)
    }
}

impl Driver {
    /// Makes a driver for this seed. Files stay below about `max_file_bytes`.
    pub fn new(seed: u64, max_file_bytes: u64) -> Self {
        Self {
            rng: Rng::new(seed),
            seed,
            step: 0,
            max_file_bytes: max_file_bytes.max(8192),
            names_only: false,
            ids: Vec::new(),
            rest: None,
            report: DriverReport::default(),
            trace: Vec::new(),
        }
    }

    /// Makes the driver change only names, links and attributes, not the content of files.
    pub fn names_only(mut self) -> Self {
        self.names_only = true;
        self
    }

    /// Performs `operations` random operations. Fails at the first operation whose answer differs from its prediction.
    pub fn run(&mut self, model: &mut Model, target: &mut dyn Target, operations: usize) -> Result<DriverReport> {
        for _ in 0..operations {
            self.one(model, target)?;
        }
        Ok(self.report.clone())
    }

    fn one(&mut self, model: &mut Model, target: &mut dyn Target) -> Result<()> {
        self.step += 1;
        if self.ids.is_empty() || self.step.is_multiple_of(64) {
            self.ids = model.nodes.iter().filter(|(_, node)| !node.fixed).map(|(id, _)| *id).collect();
        }
        match self.rest.take() {
            Some(Rest::Mode(path, mode)) => {
                return self.both("chmod", show(&path), model, target, |to| to.chmod(&path, mode));
            }
            Some(Rest::Content(path, len)) => return self.write_to(path, 0, len, model, target),
            None => {}
        }
        let choice = self.rng.below(100);
        match choice {
            40..83 | 93..99 if self.names_only => self.rename(model, target),
            0..14 => self.create(model, target),
            14..18 => self.make_directory(model, target),
            18..22 => self.make_special(model, target),
            22..26 => self.link(model, target),
            26..34 => self.rename(model, target),
            34..40 => self.remove(model, target),
            40..62 => self.write(model, target),
            62..70 => self.truncate(model, target),
            70..78 => self.fallocate(model, target),
            78..83 => self.copy_range(model, target),
            83..89 => self.attributes(model, target),
            89..93 => self.xattr(model, target),
            93..98 => self.read(model, target),
            98..99 => {
                let Some(path) = self.file(model) else { return Ok(()) };
                self.both("fsync", show(&path), model, target, |to| to.fsync(&path))
            }
            _ => self.both("sync", String::new(), model, target, |to| to.sync()),
        }
    }

    /// Performs an operation on the model and on the target, and compares the answers.
    fn both<T: PartialEq + fmt::Debug>(
        &mut self,
        name: &'static str,
        detail: String,
        model: &mut Model,
        target: &mut dyn Target,
        op: impl Fn(&mut dyn Target) -> Result<T, Errno>,
    ) -> Result<()> {
        if self.trace.len() == 12 {
            self.trace.remove(0);
        }
        self.trace.push(format!("{} {name} {detail}", self.step));
        let expected = op(model);
        let found = op(target);
        *self.report.counts.entry(name).or_default() += 1;
        self.report.failures += usize::from(expected.is_err());
        // Accept EXDEV if another error was predicted: Linux checks for EXDEV last, but FUSE and the engine may check
        // for it earlier.
        let crosses =
            matches!((&expected, &found), (Err(_), Err(errno)) if *errno == rustix::io::Errno::XDEV.raw_os_error());
        if expected != found && !crosses {
            let (expected, found) = (brief(&expected), brief(&found));
            bail!(
                "seed {}, step {}: {name} {detail}: expected {expected}, found {found}; the last steps:\n  {}",
                self.seed,
                self.step,
                self.trace.join("\n  ")
            );
        }
        Ok(())
    }

    fn create(&mut self, model: &mut Model, target: &mut dyn Target) -> Result<()> {
        let path = self.new_path(model);
        let mode = *self.rng.pick(&[0o644, 0o600, 0o755, 0o444, 0o000, 0o666]);
        self.both("create", show(&path), model, target, |to| to.create(&path, NodeKind::File, mode, (0, 0)))?;
        if !self.names_only && self.rng.one_in(2) {
            let len = self.rng.len(self.max_file_bytes / 4);
            self.rest = Some(Rest::Content(path, len));
        }
        Ok(())
    }

    fn make_directory(&mut self, model: &mut Model, target: &mut dyn Target) -> Result<()> {
        let path = self.new_path(model);
        let mode = *self.rng.pick(&[0o755, 0o700, 0o1777, 0o2755]);
        let made = mode & 0o1777;
        self.both("mkdir", show(&path), model, target, |to| to.create(&path, NodeKind::Directory, made, (0, 0)))?;
        // mkdir uses only the permission bits and the sticky bit of the mode, so a chmod follows, which also sets or
        // clears the set-group-id bit.
        self.rest = Some(Rest::Mode(path, mode));
        Ok(())
    }

    fn make_special(&mut self, model: &mut Model, target: &mut dyn Target) -> Result<()> {
        let path = self.new_path(model);
        match self.rng.below(5) {
            0 => self.both("mknod", show(&path), model, target, |to| to.create(&path, NodeKind::Fifo, 0o640, (0, 0))),
            1 => self.both("mknod", show(&path), model, target, |to| to.create(&path, NodeKind::Socket, 0o755, (0, 0))),
            2 => {
                let rdev = (self.rng.below(4000) as u32, self.rng.below(1 << 18) as u32);
                let kind = *self.rng.pick(&[NodeKind::CharDevice, NodeKind::BlockDevice]);
                self.both("mknod", show(&path), model, target, |to| to.create(&path, kind, 0o660, rdev))
            }
            _ => {
                let len = self.rng.len(1500) as usize;
                let content = name_of_len(&mut self.rng, len.max(1));
                self.both("symlink", show(&path), model, target, |to| to.symlink(&path, &content))
            }
        }
    }

    fn link(&mut self, model: &mut Model, target: &mut dyn Target) -> Result<()> {
        let Some(id) = self.any(model) else { return Ok(()) };
        let old = model.path_of(id, self.step);
        let new = self.new_path(model);
        self.both("link", format!("{} {}", show(&old), show(&new)), model, target, |to| to.link(&old, &new))
    }

    fn rename(&mut self, model: &mut Model, target: &mut dyn Target) -> Result<()> {
        let Some(id) = self.any(model) else { return Ok(()) };
        let old = model.path_of(id, self.step);
        let (op, new) = match self.rng.below(8) {
            0..4 => (RenameOp::Replace, self.new_path(model)),
            4 => (RenameOp::NoReplace, self.new_path(model)),
            choice => {
                let Some(other) = self.any(model) else { return Ok(()) };
                let op = [RenameOp::Replace, RenameOp::NoReplace, RenameOp::Exchange][(choice - 5) as usize];
                (op, model.path_of(other, self.step))
            }
        };
        let detail = format!("{} {} {op:?}", show(&old), show(&new));
        self.both("rename", detail, model, target, |to| to.rename(&old, &new, op))
    }

    fn remove(&mut self, model: &mut Model, target: &mut dyn Target) -> Result<()> {
        let Some(id) = self.any(model) else { return Ok(()) };
        let path = model.path_of(id, self.step);
        let directory = model.nodes[&id].kind == NodeKind::Directory;
        if directory != self.rng.one_in(10) {
            self.both("rmdir", show(&path), model, target, |to| to.rmdir(&path))
        } else {
            self.both("unlink", show(&path), model, target, |to| to.unlink(&path))
        }
    }

    fn write(&mut self, model: &mut Model, target: &mut dyn Target) -> Result<()> {
        let Some(path) = self.file(model) else { return Ok(()) };
        let size = self.size(model, &path);
        let len = self.rng.len(self.max_file_bytes / 8);
        let at = match self.rng.below(4) {
            0 => size,
            1 => self.rng.below(self.max_file_bytes),
            2 => self.rng.below(size + 1) / 4096 * 4096,
            _ => self.rng.below(size + 1),
        };
        self.write_to(path, at, len, model, target)
    }

    fn write_to(&mut self, path: Vec<u8>, at: u64, len: u64, model: &mut Model, target: &mut dyn Target) -> Result<()> {
        let len = len.max(1);
        let data = self.rng.content(len as usize);
        self.both("write", format!("{} {at}+{len}", show(&path)), model, target, |to| to.write(&path, at, &data))
    }

    fn truncate(&mut self, model: &mut Model, target: &mut dyn Target) -> Result<()> {
        let Some(path) = self.file(model) else { return Ok(()) };
        let size = self.size(model, &path);
        let len = match self.rng.below(5) {
            0 => 0,
            1 => self.rng.below(self.max_file_bytes),
            2 => self.rng.below(size + 1) / 4096 * 4096,
            _ => self.rng.below(size + 1),
        };
        self.both("truncate", format!("{} {len}", show(&path)), model, target, |to| to.truncate(&path, len))
    }

    fn fallocate(&mut self, model: &mut Model, target: &mut dyn Target) -> Result<()> {
        let Some(path) = self.file(model) else { return Ok(()) };
        let op = *self.rng.pick(&[
            FallocateOp::Allocate,
            FallocateOp::KeepSize,
            FallocateOp::PunchHole,
            FallocateOp::PunchHole,
            FallocateOp::ZeroRange,
        ]);
        let (mut at, mut len) = (self.rng.below(self.max_file_bytes), self.rng.len(self.max_file_bytes / 4).max(1));
        if self.rng.one_in(2) {
            (at, len) = (at / 4096 * 4096, len.next_multiple_of(4096));
        }
        let detail = format!("{} {at}+{len} {op:?}", show(&path));
        self.both("fallocate", detail, model, target, |to| to.fallocate(&path, at, len, op))
    }

    fn copy_range(&mut self, model: &mut Model, target: &mut dyn Target) -> Result<()> {
        let (Some(from), Some(to_path)) = (self.file(model), self.file(model)) else { return Ok(()) };
        let size = self.size(model, &from);
        if size == 0 {
            return Ok(());
        }
        let (mut from_at, mut len) = (self.rng.below(size), self.rng.len(size).max(1));
        let mut to_at = self.rng.below(self.max_file_bytes);
        if !self.rng.one_in(4) {
            (from_at, to_at) = (from_at / 4096 * 4096, to_at / 4096 * 4096);
        }
        len = len.min(size - from_at);
        if from_at + len < size && len > 4096 {
            len = len / 4096 * 4096;
        }
        // Skip copies between overlapping ranges of one file, because they are refused.
        let same = model.find(&from) == model.find(&to_path);
        if same && from_at < to_at + len && to_at < from_at + len {
            return Ok(());
        }
        let detail = format!("{} {from_at}+{len} {} {to_at}", show(&from), show(&to_path));
        self.both("copy_range", detail, model, target, |to| to.copy_range(&from, from_at, &to_path, to_at, len))
    }

    fn attributes(&mut self, model: &mut Model, target: &mut dyn Target) -> Result<()> {
        let Some(id) = self.any(model) else { return Ok(()) };
        let path = model.path_of(id, self.step);
        let node = &model.nodes[&id];
        let has_acl = node.xattrs.keys().any(|name| name.starts_with(b"system."));
        let directory = node.kind == NodeKind::Directory;
        match self.rng.below(3) {
            0 if node.kind != NodeKind::Symlink && !has_acl => {
                let mode =
                    *self.rng.pick(if directory { &[0o755, 0o1777, 0o2775, 0o711] } else { &[0o644, 0o7, 0, 0o755] });
                self.both("chmod", format!("{} {mode:o}", show(&path)), model, target, |to| to.chmod(&path, mode))
            }
            1 if node.mode & 0o6000 == 0 || directory => {
                let (uid, gid) = (self.rng.below(70_000) as u32, self.rng.below(70_000) as u32);
                let detail = format!("{} {uid}:{gid}", show(&path));
                self.both("chown", detail, model, target, |to| to.chown(&path, uid, gid))
            }
            _ => {
                let mtime = (self.rng.below(1 << 33) as i64 - (1 << 31), self.rng.below(1_000_000_000) as u32);
                self.both("utimens", format!("{} {mtime:?}", show(&path)), model, target, |to| {
                    to.set_mtime(&path, mtime)
                })
            }
        }
    }

    fn xattr(&mut self, model: &mut Model, target: &mut dyn Target) -> Result<()> {
        let Some(id) = self.any(model) else { return Ok(()) };
        let path = model.path_of(id, self.step);
        let plain = matches!(model.nodes[&id].kind, NodeKind::File | NodeKind::Directory);
        // Only files and directories can have `user.` attributes.
        let space: &[u8] = if plain && !self.rng.one_in(4) { b"user." } else { b"trusted." };
        let name = [space, &[b'a' + self.rng.below(6) as u8], b"-attribute"].concat();
        let detail = format!("{} {}", show(&path), show(&name));
        if self.rng.one_in(3) {
            return self.both("removexattr", detail, model, target, |to| to.remove_xattr(&path, &name));
        }
        let len = self.rng.len(2000) as usize;
        let value = self.rng.bytes(len);
        self.both("setxattr", detail, model, target, |to| to.set_xattr(&path, &name, &value))
    }

    fn read(&mut self, model: &mut Model, target: &mut dyn Target) -> Result<()> {
        let Some(path) = self.file(model) else { return Ok(()) };
        let size = self.size(model, &path);
        let (at, len) = (self.rng.below(size + 2), self.rng.len(size.max(1)) as usize);
        self.both("read", format!("{} {at}+{len}", show(&path)), model, target, |to| to.read(&path, at, len))
    }

    /// Picks a path that is usually free, in a directory that usually exists.
    fn new_path(&mut self, model: &Model) -> Vec<u8> {
        let mut dir = ROOT;
        for _ in 0..40 {
            let Some(id) = self.any(model) else { break };
            let node = &model.nodes[&id];
            // Do not use directories with properties or ACLs: the model implements neither inherited properties nor
            // default ACLs, which set the modes of new entries.
            let inherits = node.xattrs.keys().any(|name| name.starts_with(b"system.") || name.starts_with(b"btrfs."));
            if node.kind == NodeKind::Directory && !inherits {
                dir = id;
                break;
            }
        }
        if self.rng.one_in(40) {
            return join(&model.path_of(dir, 0), b"no-such-directory/name");
        }
        let len = match self.rng.below(30) {
            0 => 256,
            1 => 255,
            2..6 => self.rng.below(200) + 20,
            _ => self.rng.below(14) + 1,
        };
        let mut name = name_of_len(&mut self.rng, len as usize);
        if name == b"." || name == b".." {
            name = b"dots".to_vec();
        }
        join(&model.path_of(dir, 0), &name)
    }

    /// Picks any node except roots of subvolumes and fixed nodes.
    fn any(&mut self, model: &Model) -> Option<u64> {
        for _ in 0..100 {
            if self.ids.is_empty() {
                return None;
            }
            let at = self.rng.index(self.ids.len());
            let id = self.ids[at];
            match model.nodes.get(&id) {
                None => drop(self.ids.swap_remove(at)),
                Some(node) => {
                    let root = node.links.first().is_none_or(|(parent, _)| model.nodes[parent].volume != node.volume);
                    if !root && !node.fixed {
                        return Some(id);
                    }
                }
            }
        }
        None
    }

    fn file(&mut self, model: &Model) -> Option<Vec<u8>> {
        for _ in 0..100 {
            let id = self.any(model)?;
            if model.nodes[&id].kind == NodeKind::File {
                return Some(model.path_of(id, self.step));
            }
        }
        None
    }

    fn size(&self, model: &Model, path: &[u8]) -> u64 {
        model.find(path).map_or(0, |id| model.nodes[&id].size)
    }
}

fn brief<T: fmt::Debug>(result: &Result<T, Errno>) -> String {
    match result {
        Ok(value) => {
            let text = format!("{value:?}");
            format!("Ok({}{})", text.chars().take(200).collect::<String>(), if text.len() > 200 { "..." } else { "" })
        }
        Err(errno) => format!("Err({})", std::io::Error::from_raw_os_error(*errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Compare, PathTarget, compare_entries, walk_path};

    /// The model must agree with the filesystem of this machine's temporary directory.
    #[test]
    fn model_agrees_with_this_machine() {
        let dir = tempfile::tempdir().unwrap();
        if !rustix::process::geteuid().is_root() {
            assert!(!crate::capability::in_ci(), "CI runs as root");
            eprintln!("SKIPPED: the model acts as root does");
            return;
        }
        for seed in 1..4 {
            let root = dir.path().join(seed.to_string());
            std::fs::create_dir(&root).unwrap();
            let mut model = Model::new();
            let report = Driver::new(seed, 1 << 20).run(&mut model, &mut PathTarget::new(&root), 800).unwrap();
            println!("seed {seed}: {report}");
            compare_entries(&model.entries(), &walk_path(&root).unwrap(), Compare::MODEL).unwrap();
        }
    }
}
