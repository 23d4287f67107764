//! Snapshots placed inside their own sources, and inside each other.
//!
//! Method: random operations change several subvolumes. A snapshot of any subvolume is placed into any directory of any
//! subvolume, most often into its own source, while the trees are dirty and have several levels. A map for each
//! subvolume holds its expected content. Everything is compared while the filesystem is open, after a reopen, and under
//! Linux; `btrfs check` and `ubtrfs check` must find nothing. `UBTRFS_SEED` repeats a failure, `UBTRFS_SEEDS` sets the
//! number of seeds.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::{Ino, RootId};
use ubtrfs_fs::{Caller, Fs, InodeId, MountOptions, NewInode, RenameFlags};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{
    Compare, FsTarget, Image, LoopMount, Medium, MediumDevice, NodeKind, RecordingDevice, Rng, TreeEntry, btrfs_check,
    capability, check_medium, compare_entries, second_opinion, walk_fs, walk_path,
};

const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };

/// The expected inode at a path of a subvolume.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Expected {
    Directory,
    /// A file of this many bytes.
    File(u64),
    /// Another subvolume, or the empty directory that stands for it in a snapshot (a snapshot does not copy nested
    /// subvolumes).
    Subvolume(RootId),
}

type Content = BTreeMap<Vec<u8>, Expected>;

struct Life {
    /// `None` while other programs examine the image.
    fs: Option<Arc<Fs>>,
    rng: Rng,
    /// For each subvolume: the subvolume that holds its name, and its expected content.
    subvolumes: BTreeMap<RootId, (RootId, Content)>,
    number: u64,
}

fn open(image: &Path, options: &str) -> Result<Arc<Fs>> {
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image, Access::ReadWrite)?);
    Ok(Fs::open(vec![device], MountOptions::parse(options)?)?)
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() { name.to_vec() } else { [dir, b"/", name].concat() }
}

impl Life {
    fn fs(&self) -> &Fs {
        self.fs.as_deref().unwrap()
    }

    fn close(&mut self) -> Result<()> {
        Ok(self.fs.take().unwrap().close()?)
    }

    fn name(&mut self, what: &str) -> Vec<u8> {
        self.number += 1;
        let len = if self.rng.one_in(3) { 200 } else { 8 };
        format!("{what}-{}-{}", self.number, "n".repeat(self.rng.index(len))).into_bytes()
    }

    fn inode(&self, root: RootId, path: &[u8]) -> Result<InodeId> {
        let mut id = InodeId::root_of(root);
        for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            id = self.fs().lookup(id, name)?.id;
        }
        Ok(id)
    }

    fn content(&mut self, root: RootId) -> &mut Content {
        &mut self.subvolumes.get_mut(&root).unwrap().1
    }

    fn pick_subvolume(&mut self) -> RootId {
        let ids: Vec<RootId> = self.subvolumes.keys().copied().collect();
        *self.rng.pick(&ids)
    }

    /// A path of a directory or of a file in a subvolume; the root directory if there is no other directory.
    fn pick_path(&mut self, root: RootId, directories: bool) -> Option<Vec<u8>> {
        let wanted = |expected: &Expected| match expected {
            Expected::Directory => directories,
            Expected::File(_) => !directories,
            Expected::Subvolume(_) => false,
        };
        let paths: Vec<Vec<u8>> =
            self.content(root).iter().filter(|(_, expected)| wanted(expected)).map(|(path, _)| path.clone()).collect();
        if paths.is_empty() { directories.then(Vec::new) } else { Some(self.rng.pick(&paths).clone()) }
    }

    fn make_dir(&mut self, root: RootId, dir: &[u8]) -> Result<Vec<u8>> {
        let name = self.name("dir");
        let id = self.inode(root, dir)?;
        self.fs().create(id, &name, NewInode::dir(0o755), &Caller::ROOT)?;
        self.content(root).insert(join(dir, &name), Expected::Directory);
        Ok(join(dir, &name))
    }

    fn make_files(&mut self, root: RootId, dir: &[u8], count: u64) -> Result<()> {
        let id = self.inode(root, dir)?;
        for _ in 0..count {
            let name = self.name("file");
            let file = self.fs().create(id, &name, NewInode::file(0o644), &Caller::ROOT)?.id;
            let size = if self.rng.one_in(8) { 4096 + self.rng.below(9000) } else { self.rng.below(300) };
            if size > 0 {
                self.fs().write(file, 0, &vec![self.number as u8; usize::try_from(size)?])?;
            }
            self.content(root).insert(join(dir, &name), Expected::File(size));
        }
        Ok(())
    }

    /// Makes a few changes in a subvolume.
    fn change(&mut self, root: RootId) -> Result<()> {
        for _ in 0..1 + self.rng.index(20) {
            let dir = self.pick_path(root, true).unwrap_or_default();
            match self.rng.below(5) {
                0 => drop(self.make_dir(root, &dir)?),
                1 | 2 => {
                    let count = if self.rng.one_in(6) { 400 } else { self.rng.below(20) };
                    self.make_files(root, &dir, count)?;
                }
                which => {
                    let Some(file) = self.pick_path(root, false) else { continue };
                    let at = file.iter().rposition(|byte| *byte == b'/');
                    let (from, name) = at.map_or((&b""[..], &file[..]), |at| (&file[..at], &file[at + 1..]));
                    let from = self.inode(root, from)?;
                    if which == 3 {
                        self.fs().unlink(from, name)?;
                        self.content(root).remove(&file);
                    } else {
                        let (new_name, to) = (self.name("moved"), self.inode(root, &dir)?);
                        self.fs().rename(from, name, to, &new_name, RenameFlags::empty())?;
                        let expected = self.content(root).remove(&file).unwrap();
                        self.content(root).insert(join(&dir, &new_name), expected);
                    }
                }
            }
        }
        Ok(())
    }

    /// Creates a snapshot of any subvolume in any directory, most often in a directory of that subvolume, or creates a
    /// new subvolume.
    fn place(&mut self) -> Result<()> {
        let source = self.pick_subvolume();
        let parent = if self.rng.one_in(4) { self.pick_subvolume() } else { source };
        let dir = self.pick_path(parent, true).unwrap_or_default();
        let (name, dir_id) = (self.name("sub"), self.inode(parent, &dir)?);
        let (id, content) = if self.rng.one_in(6) {
            (self.fs().create_subvolume(dir_id, &name, &Caller::ROOT)?, Content::new())
        } else {
            let content = self.content(source).clone();
            (self.fs().snapshot(source, dir_id, &name, false)?, content)
        };
        self.subvolumes.insert(id.root, (parent, content));
        self.content(parent).insert(join(&dir, &name), Expected::Subvolume(id.root));
        Ok(())
    }

    /// Deletes a subvolume that holds no other subvolume.
    fn delete(&mut self) -> Result<()> {
        let holders: Vec<RootId> = self.subvolumes.values().map(|(parent, _)| *parent).collect();
        let mut free = self.subvolumes.keys().filter(|id| !holders.contains(id) && **id != RootId::FS_TREE);
        let Some(&id) = free.next() else { return Ok(()) };
        let parent = self.subvolumes.remove(&id).unwrap().0;
        let path = self.content(parent).iter().find(|(_, expected)| **expected == Expected::Subvolume(id));
        let path = path.unwrap().0.clone();
        let at = path.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
        self.fs().delete_subvolume(self.inode(parent, &path[..at])?, &path[at..], Some(id))?;
        self.content(parent).remove(&path);
        if self.rng.one_in(2) {
            self.fs().finish_deletions(&mut |_| Ok(()))?;
        }
        Ok(())
    }

    /// All paths from the top, with the sizes of files.
    fn expected(&self) -> BTreeMap<Vec<u8>, Option<u64>> {
        let mut all = BTreeMap::from([(Vec::new(), None)]);
        let mut stack = vec![(Vec::new(), RootId::FS_TREE)];
        while let Some((base, root)) = stack.pop() {
            for (path, expected) in &self.subvolumes[&root].1 {
                let path = join(&base, path);
                if let Expected::Subvolume(id) = expected
                    && self.subvolumes.get(id).is_some_and(|(parent, _)| *parent == root)
                {
                    stack.push((path.clone(), *id));
                }
                let size = if let Expected::File(size) = expected { Some(*size) } else { None };
                all.insert(path, size);
            }
        }
        all
    }

    fn compare(&self, found: &[TreeEntry]) -> Result<()> {
        let size = |entry: &TreeEntry| (entry.kind == NodeKind::File).then_some(entry.size);
        let found: BTreeMap<Vec<u8>, Option<u64>> =
            found.iter().map(|entry| (entry.path.clone(), size(entry))).collect();
        let expected = self.expected();
        let missing: Vec<_> = expected.iter().filter(|(path, size)| found.get(*path) != Some(size)).collect();
        let extra: Vec<_> = found.iter().filter(|(path, size)| expected.get(*path) != Some(size)).collect();
        let show = |(path, size): &(&Vec<u8>, &Option<u64>)| format!("{} {size:?}", String::from_utf8_lossy(path));
        ensure!(
            missing.is_empty() && extra.is_empty(),
            "{} paths are missing or differ ({:?}), {} are not expected ({:?})",
            missing.len(),
            missing.first().map(show),
            extra.len(),
            extra.first().map(show)
        );
        Ok(())
    }
}

impl Life {
    /// Starts with a subvolume that holds some hundred files.
    fn start(fs: Arc<Fs>, rng: Rng) -> Result<Self> {
        let subvolumes = BTreeMap::from([(RootId::FS_TREE, (RootId::FS_TREE, Content::new()))]);
        let mut life = Self { fs: Some(fs), rng, subvolumes, number: 0 };
        let first = life.fs().create_subvolume(TOP, b"first", &Caller::ROOT)?.root;
        life.subvolumes.insert(first, (RootId::FS_TREE, Content::new()));
        life.content(RootId::FS_TREE).insert(b"first".to_vec(), Expected::Subvolume(first));
        for _ in 0..20 {
            let dir = life.make_dir(first, b"")?;
            life.make_files(first, &dir, 30)?;
        }
        Ok(life)
    }

    /// Makes some changes, and takes a snapshot or two, or deletes a subvolume.
    fn step(&mut self) -> Result<()> {
        for _ in 0..self.rng.below(3) {
            let root = self.pick_subvolume();
            self.change(root)?;
        }
        match self.rng.below(6) {
            0 => self.delete(),
            1 => self.place().and_then(|()| self.place()),
            _ => self.place(),
        }
    }
}

fn nested_life(seed: u64) -> Result<()> {
    let mut rng = Rng::new(seed);
    let mkfs: &[&str] = match rng.below(4) {
        0 => &["-n", "16384"],
        1 => &["-n", "4096", "-O", "^skinny-metadata,^no-holes"],
        _ => &["-n", "4096"],
    };
    let image = Image::kernel_made(1 << 30, mkfs)?;
    let mut life = Life::start(open(image.path(), "")?, rng)?;
    for _ in 0..3 {
        for _ in 0..4 {
            life.step()?;
        }
        life.compare(&walk_fs(life.fs())?).context("while it is open")?;
        life.close()?;
        let ours = FsTarget::open(image.path(), "ro")?;
        let found = ours.walk()?;
        life.compare(&found).context("opened again")?;
        ours.close()?;
        second_opinion(image.path())?;
        btrfs_check(image.path())?;
        let mount = LoopMount::new(image.path(), "ro")?;
        let theirs = walk_path(mount.path()).with_context(|| mount.kernel_log())?;
        mount.close()?;
        life.compare(&theirs).context("under Linux")?;
        compare_entries(&found, &theirs, Compare::ALL)?;
        life.fs = Some(open(image.path(), "commit=300")?);
    }
    // Deleting the subvolumes leaves nothing of their shared blocks behind.
    while life.subvolumes.len() > 1 {
        life.delete()?;
    }
    life.fs().finish_deletions(&mut |_| Ok(()))?;
    life.close()?;
    second_opinion(image.path())?;
    let mount = LoopMount::new(image.path(), "")?;
    mount.scrub()?;
    ensure!(mount.kernel_complaints().is_empty(), "{:?}", mount.kernel_complaints());
    mount.close()?;
    btrfs_check(image.path())
}

#[test]
fn snapshots_inside_their_sources_have_the_content_of_the_source() {
    if !capability::kernel_oracle() {
        return;
    }
    let nr_seeds: u64 = std::env::var("UBTRFS_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(4);
    let first = Rng::seed_or(1);
    for seed in first..first + nr_seeds {
        nested_life(seed).with_context(|| format!("seed {seed}")).unwrap();
    }
}

/// Cuts the power at many points. After each cut, the filesystem opens, all of its names lead to inodes, and it is
/// clean both before it is opened and after it is closed.
fn nested_cuts(seed: u64) -> Result<()> {
    let mkfs = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
    let device = Arc::new(RecordingDevice::new(Medium::formatted(512 << 20, &mkfs)?));
    let options = MountOptions::parse("commit=300")?;
    let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], options.clone())?;
    let mut life = Life::start(fs, Rng::new(seed))?;
    device.mark(1);
    for _ in 0..6 {
        life.step()?;
    }
    life.close()?;
    let (mut rng, flushes) = (Rng::new(seed), device.flush_points());
    let mut points: Vec<usize> = (0..24).map(|_| (*rng.pick(&flushes) + rng.index(4)).saturating_sub(1)).collect();
    points.sort_unstable();
    let mut builder = device.cuts();
    for point in points {
        let (medium, outcome) = builder.cut(point, &mut rng);
        if outcome.promised.is_none() {
            continue;
        }
        let verify = || -> Result<()> {
            check_medium(&medium).context("before")?;
            let device = Arc::new(MediumDevice::new(medium.clone()));
            let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], options.clone())?;
            ensure!(fs.read_only().is_none());
            walk_fs(&fs)?;
            fs.finish_deletions(&mut |_| Ok(()))?;
            fs.close()?;
            check_medium(&device.content()).context("after")
        };
        verify().with_context(|| format!("cut at event {point}: {outcome:?}"))?;
    }
    Ok(())
}

#[test]
fn snapshots_inside_of_their_sources_survive_power_cuts() {
    let first = Rng::seed_or(1);
    for seed in first..first + 2 {
        nested_cuts(seed).with_context(|| format!("seed {seed}")).unwrap();
    }
}
