//! [`PairRound`]: a chain of snapshots that the engine makes in memory, sends, and receives into another filesystem in
//! memory.
//!
//! A round compares trees, access and creation times, inode flags, holes, preallocated blocks and the sharing of every
//! block. Our checker checks both filesystems. Some rounds also run `btrfs check` on the received filesystem, compare
//! what Linux reads there, and let Linux receive the streams.
//!
//! - I1. A round depends only on its seed, except for UUIDs and the current time.
//! - I2. Streams of version 1 do not transport creation times, flags and preallocated blocks, and a hole in such a
//!   stream can unshare the block in which a file ends. So these properties, and the sharing of the blocks in which
//!   files end, are compared only if the snapshot and all of its parents were sent in version 2.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use ubtrfs_device::Device;
use ubtrfs_format::item::InodeFlags;
use ubtrfs_format::{Ino, RootId};
use ubtrfs_fs::{Fs, InodeId, Job, MountOptions, ReceiveOptions};
use ubtrfs_mkfs::MkfsOptions;

use super::{FORMS, Form, Operations, Sent, Tolerance, compare_extents, receive, request, subvolume};
use crate::fs_target::{FsTarget, walk_fs_from};
use crate::medium::{Medium, MediumDevice};
use crate::prefixed::Prefixed;
use crate::rng::Rng;
use crate::tree_entry::{Compare, compare_entries, join, show, walk_path};
use crate::{Image, LoopMount, btrfs_check, check_medium};

/// One round.
#[derive(Clone, Debug)]
pub struct PairRound {
    /// The seed of all random choices.
    pub seed: u64,
    /// Number of operations before each snapshot.
    pub operations: usize,
    /// Whether Linux also judges the received filesystem.
    pub by_linux: bool,
    /// The directory for images and streams of a failed round.
    pub keep: Option<PathBuf>,
}

/// A snapshot and its stream.
pub(super) struct SentSnapshot {
    pub(super) name: String,
    parent: Option<usize>,
    sources: Vec<usize>,
    form: Form,
    /// Whether the stream and those of all parents have version 2 (I2).
    is_v2: bool,
    pub(super) stream: Vec<u8>,
}

impl PairRound {
    /// Runs the round. Returns the number of streams. An error names the difference and the seed.
    pub fn run(&self) -> Result<usize> {
        let mut rng = Rng::new(self.seed);
        let mut failed = Failed::default();
        let done = self.run_with(&mut rng, &mut failed);
        if let (Err(_), Some(keep)) = (&done, &self.keep) {
            failed.save(keep)?;
        }
        done.with_context(|| format!("round of seed {}", self.seed))
    }

    fn run_with(&self, rng: &mut Rng, failed: &mut Failed) -> Result<usize> {
        let (medium, names) = self.make_chain(rng).context("making the snapshots")?;
        failed.source = Some(medium.clone());
        check_medium(&medium).context("the source")?;
        let source = open(&medium, "ro")?;
        let sent = send_chain(&source, &names, rng)?;
        failed.streams = sent.iter().map(|one| (one.name.clone(), one.stream.clone())).collect();

        let target = receive_chain(&sent, rng, failed)?;
        let received = open(&target, "ro")?;
        for one in &sent {
            compare(&source, &received, one).with_context(|| one.describe(&sent))?;
        }
        let chain: Vec<Sent<'_>> = sent.iter().map(|one| one.expected(&sent)).collect();
        let differs = compare_extents(&source, &received, &chain)?;
        if differs.is_any() {
            let plans: Vec<String> = sent.iter().map(|one| one.describe(&sent)).collect();
            bail!("extents: {differs:#?}\n{}", plans.join("\n"));
        }
        received.close()?;
        source.close()?;
        if self.by_linux {
            judge(&medium, &target, &sent)?;
        }
        Ok(sent.len())
    }

    /// Makes `live` and its snapshots `s0`, `s1`, ...
    pub(super) fn make_chain(&self, rng: &mut Rng) -> Result<(Medium, Vec<String>)> {
        let nr = 3 + rng.index(4);
        let medium = formatted(rng)?;
        let options = ["", "", "compress-force=zstd", "compress=lzo", "max_inline=0", "nodatasum"][rng.index(6)];
        let mut operations = Operations::new(rng.next_u64());
        let device = Arc::new(MediumDevice::new(medium));
        let mut names: Vec<String> = Vec::new();
        while names.len() < nr {
            // Make one or two snapshots in each session. After the next mount, numbers of deleted inodes are used
            // again.
            let target = FsTarget::on_device(Arc::clone(&device) as Arc<dyn Device>, MountOptions::parse(options)?)?;
            let fs = Arc::clone(target.fs());
            let top = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };
            if names.is_empty() {
                fs.create_subvolume(top, b"live", &ubtrfs_fs::Caller::ROOT)?;
            }
            let live = subvolume(&fs, "live")?;
            let mut inside = Prefixed::new(target, "live");
            for _ in 0..(1 + rng.index(2)).min(nr - names.len()) {
                operations.run(&mut inside, self.operations);
                let name = format!("s{}", names.len());
                fs.snapshot_in(live, top, name.as_bytes(), true, &[])?;
                names.push(name);
            }
            fs.close()?;
        }
        Ok((device.content(), names))
    }
}

/// Makes, sends and receives a small chain. Before each stream is received, its prefixes are received, in lengths that
/// are multiples of `step`, unless the stream is longer than `most_bytes`. Fails if the receive of a prefix reports no
/// error, or leaves a subvolume behind. Returns the numbers of streams whose prefixes were received, and of prefixes.
pub fn check_prefixes(seed: u64, step: usize, most_bytes: usize) -> Result<(usize, usize)> {
    let mut rng = Rng::new(seed);
    let (medium, names) = PairRound { seed, operations: 8, by_linux: false, keep: None }.make_chain(&mut rng)?;
    let source = open(&medium, "ro")?;
    let sent = send_chain(&source, &names, &mut rng)?;
    let device = Arc::new(MediumDevice::new(formatted(&mut rng)?));
    let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::default())?;
    let receive = |input: &[u8]| fs.receive(fs.root(), input, &ReceiveOptions::default(), &Job::new(), &mut |_| {});
    let (mut nr_streams, mut nr) = (0, 0);
    for (index, one) in sent.iter().enumerate() {
        let is_cut = one.stream.len() <= most_bytes;
        nr_streams += usize::from(is_cut);
        for len in (0..if is_cut { one.stream.len() } else { 0 }).step_by(step) {
            ensure!(receive(&one.stream[..len]).is_err(), "{len} bytes of {} were received", one.describe(&sent));
            ensure!(fs.subvolumes()?.len() == 1 + index, "{len} bytes of {} left a subvolume", one.describe(&sent));
            nr += 1;
        }
        receive(&one.stream).map_err(|error| anyhow!("{}: {error}", one.describe(&sent)))?;
    }
    fs.close()?;
    source.close()?;
    check_medium(&device.content())?;
    Ok((nr_streams, nr))
}

/// The images and streams that are saved after a failed round.
#[derive(Default)]
struct Failed {
    source: Option<Medium>,
    target: Option<Medium>,
    streams: Vec<(String, Vec<u8>)>,
}

impl Failed {
    fn save(&self, dir: &Path) -> Result<()> {
        std::fs::create_dir_all(dir)?;
        for (medium, name) in [(&self.source, "source"), (&self.target, "target")] {
            if let Some(medium) = medium {
                medium.save(&dir.join(name))?;
            }
        }
        for (name, stream) in &self.streams {
            std::fs::write(dir.join(format!("{name}.stream")), stream)?;
        }
        Ok(())
    }
}

impl SentSnapshot {
    /// The names of the snapshots that the stream may clone from.
    fn others<'s>(&self, sent: &'s [Self]) -> Vec<&'s str> {
        self.parent.iter().chain(&self.sources).map(|index| sent[*index].name.as_str()).collect()
    }

    fn expected<'s>(&'s self, sent: &'s [Self]) -> Sent<'s> {
        let tolerance = Tolerance { prealloc: !self.is_v2, tails: !self.is_v2, ends: false };
        Sent { name: &self.name, others: self.others(sent), tolerance }
    }

    pub(super) fn describe(&self, sent: &[Self]) -> String {
        let parent = self.parent.map_or("none", |index| &sent[index].name);
        format!("{} (parent and sources {:?}, parent {parent}, {:?})", self.name, self.others(sent), self.form)
    }
}

pub(super) fn formatted(rng: &mut Rng) -> Result<Medium> {
    let mut mkfs = MkfsOptions::default();
    match rng.below(4) {
        0 => mkfs.nodesize = 4096,
        1 => mkfs.incompat.remove(ubtrfs_format::superblock::Incompat::NO_HOLES),
        _ => {}
    }
    Medium::formatted(2 << 30, &mkfs)
}

pub(super) fn open(medium: &Medium, options: &str) -> Result<Arc<Fs>> {
    let device: Arc<dyn Device> = Arc::new(MediumDevice::new(medium.clone()));
    Ok(Fs::open(vec![device], MountOptions::parse(options)?)?)
}

pub(super) fn send_chain(fs: &Fs, names: &[String], rng: &mut Rng) -> Result<Vec<SentSnapshot>> {
    let mut sent: Vec<SentSnapshot> = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let form = FORMS[rng.index(FORMS.len())];
        let (mut parent, mut sources) = (None, Vec::new());
        if index > 0 && !rng.one_in(6) {
            parent = Some(if rng.one_in(3) { rng.index(index) } else { index - 1 });
            sources = (0..index).filter(|other| Some(*other) != parent && rng.one_in(4)).collect();
        }
        let is_v2 = form.version >= 2 && parent.is_none_or(|parent| sent[parent].is_v2);
        let source_names: Vec<&str> = sources.iter().map(|source| names[*source].as_str()).collect();
        let request = request(fs, name, parent.map(|parent| names[parent].as_str()), &source_names, form)?;
        let mut one = SentSnapshot { name: name.clone(), parent, sources, form, is_v2, stream: Vec::new() };
        fs.send(&request, &mut one.stream, &Job::new()).with_context(|| format!("sending {name} from {parent:?}"))?;
        sent.push(one);
    }
    Ok(sent)
}

/// Receives the streams: one by one, joined, or with a break from which the receive is resumed.
fn receive_chain(sent: &[SentSnapshot], rng: &mut Rng, failed: &mut Failed) -> Result<Medium> {
    let device = Arc::new(MediumDevice::new(formatted(rng)?));
    let reopen = |fs: Option<Arc<Fs>>| -> Result<Arc<Fs>> {
        if let Some(fs) = fs {
            fs.close()?;
        }
        Ok(Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::default())?)
    };
    let mut fs = reopen(None)?;
    let mut joined: Vec<u8> = Vec::new();
    for (index, one) in sent.iter().enumerate() {
        joined.extend(&one.stream);
        if rng.one_in(4) && index + 1 < sent.len() {
            continue;
        }
        let input = std::mem::take(&mut joined);
        if rng.one_in(3) {
            let options = ReceiveOptions { keep: true, ..ReceiveOptions::default() };
            let cut = rng.index(input.len());
            // Ignore the result: the receive of the cut input fails, unless the cut is between two streams.
            let _ = fs.receive(fs.root(), &input[..cut], &options, &Job::new(), &mut |_| {});
            if rng.one_in(2) {
                fs = reopen(Some(fs))?;
            }
        }
        let done = receive_missing(&fs, &input, sent);
        if done.is_err() {
            let _ = fs.close();
            failed.target = Some(device.content());
        }
        done.with_context(|| one.describe(sent))?;
        if rng.one_in(3) {
            fs = reopen(Some(fs))?;
        }
    }
    fs.close()?;
    let medium = device.content();
    failed.target = Some(medium.clone());
    check_medium(&medium).context("what was received")?;
    Ok(medium)
}

/// Receives those streams of an input whose subvolumes have not been received completely yet.
fn receive_missing(fs: &Fs, input: &[u8], sent: &[SentSnapshot]) -> Result<()> {
    let complete: Vec<Vec<u8>> =
        fs.subvolumes()?.into_iter().filter(|info| !info.received_uuid.is_nil()).map(|info| info.path).collect();
    let mut rest = Vec::new();
    let mut at = input;
    for one in sent {
        if let Some(after) = at.strip_prefix(&one.stream[..]) {
            if !complete.contains(&one.name.clone().into_bytes()) {
                rest.extend(&one.stream);
            }
            at = after;
        }
    }
    if rest.is_empty() {
        return Ok(());
    }
    let options = ReceiveOptions { keep: true, ..ReceiveOptions::default() };
    fs.receive(fs.root(), &rest[..], &options, &Job::new(), &mut |_| {})
        .map(drop)
        .map_err(|error| anyhow!("receive: {error}"))
}

/// Compares a snapshot with the received one.
fn compare(source: &Fs, received: &Fs, one: &SentSnapshot) -> Result<()> {
    let root = |fs: &Fs| -> Result<InodeId> { Ok(fs.lookup_path(one.name.as_bytes(), false)?.id) };
    let (from, to) = (walk_fs_from(source, root(source)?)?, walk_fs_from(received, root(received)?)?);
    compare_entries(&from, &to, Compare::ALL).context("sent (first) and received (second) differ")?;
    for entry in &from {
        let path = if entry.path.is_empty() { one.name.clone().into() } else { join(one.name.as_bytes(), &entry.path) };
        let (before, after) = (source.lookup_path(&path, false)?, received.lookup_path(&path, false)?);
        ensure!(before.atime == after.atime, "{}: atime {:?} / {:?}", show(&path), before.atime, after.atime);
        if one.is_v2 {
            ensure!(before.otime == after.otime, "{}: otime {:?} / {:?}", show(&path), before.otime, after.otime);
            let flags = |bits: u64| InodeFlags::from_bits_retain(bits) & RECEIVED_FLAGS;
            let (before, after) = (flags(before.flags), flags(after.flags));
            ensure!(before == after, "{}: flags {before:?} / {after:?}", show(&path));
        }
    }
    Ok(())
}

/// Runs `btrfs check` on the received filesystem, compares the snapshots of both filesystems as Linux reads them, and
/// lets Linux receive the streams.
fn judge(source: &Medium, target: &Medium, sent: &[SentSnapshot]) -> Result<()> {
    let (from, to) = (Image::empty(0)?, Image::empty(0)?);
    source.save(from.path())?;
    target.save(to.path())?;
    btrfs_check(to.path())?;
    let by_linux = Image::kernel_made(2 << 30, &[])?;
    let from = LoopMount::new(from.path(), "ro")?;
    let (ours, linux) = (LoopMount::new(to.path(), "ro")?, LoopMount::new(by_linux.path(), "")?);
    let dir = tempfile::TempDir::with_prefix("ubtrfs-pairs-")?;
    for one in sent {
        let path = dir.path().join(&one.name);
        std::fs::write(&path, &one.stream)?;
        receive(&path, linux.path()).with_context(|| format!("Linux receives {}", one.describe(sent)))?;
        let expected = walk_path(&from.join(&one.name))?;
        compare_entries(&expected, &walk_path(&ours.join(&one.name))?, Compare::ALL)
            .with_context(|| format!("Linux reads what was received: {}", one.describe(sent)))?;
        compare_entries(&expected, &walk_path(&linux.join(&one.name))?, Compare::ALL)
            .with_context(|| format!("Linux received: {}", one.describe(sent)))?;
    }
    let complaints = ours.kernel_complaints();
    ensure!(complaints.is_empty(), "Linux complains:\n{}", complaints.join("\n"));
    from.close()?;
    ours.close()?;
    linux.close()
}

/// The inode flags that the receiver sets; the comparison ignores all others.
const RECEIVED_FLAGS: InodeFlags =
    InodeFlags::SYNC.union(InodeFlags::NODUMP).union(InodeFlags::NOATIME).union(InodeFlags::DIRSYNC);
