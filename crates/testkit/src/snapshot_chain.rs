//! [`SnapshotChain`]: read-only snapshots of one subvolume with random operations between them, made and sent by
//! Linux; and a comparison of received snapshots with the sent ones.
//!
//! I1. The chain and the streams depend only on the seed, except for UUIDs and times.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use tempfile::NamedTempFile;

use crate::command::run;
use crate::send::Operations;
use crate::{Compare, Image, LoopMount, PathTarget, Rng, Target, TreeEntry, compare_entries, walk_path};

/// Snapshots of one subvolume, `s0`, `s1` and so on, in a filesystem that Linux has mounted.
#[derive(Debug)]
pub struct SnapshotChain {
    mount: LoopMount,
    _image: Image,
    rng: Rng,
    nr_snapshots: usize,
}

/// The options for sending a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SendOptions {
    /// The index of the parent snapshot.
    pub parent: Option<usize>,
    /// The indexes of the snapshots that are clone sources.
    pub clone_sources: Vec<usize>,
    /// Version of the stream.
    pub proto: u32,
    /// Whether compressed extents are sent in compressed form.
    pub compressed_data: bool,
}

/// The amount of data that a filesystem mounted by Linux stores, and the amount that each of its snapshots refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharing {
    /// Bytes of data on disk, each byte counted once.
    pub used: u64,
    /// Bytes of data that each snapshot refers to.
    pub totals: Vec<u64>,
}

impl Sharing {
    /// Fails if a snapshot refers to a different amount of data than in `other`, or if the data of all snapshots takes
    /// more space on disk than in `other`. A difference of 64 KiB is allowed, because a small file can be inline or
    /// not. Exclusive and shared bytes are not compared, because they depend on the points at which partly shared
    /// extents were split.
    pub fn check(&self, other: &Self) -> Result<()> {
        const SLACK: u64 = 64 << 10;
        let totals = self.totals.iter().zip(&other.totals).all(|(one, other)| one.abs_diff(*other) <= SLACK);
        let is_shared = self.used <= other.used + SLACK;
        ensure!(
            totals && is_shared && self.totals.len() == other.totals.len(),
            "sharing: {self:?}, expected {other:?}"
        );
        Ok(())
    }
}

impl SnapshotChain {
    /// Makes a chain with about this many operations before each snapshot.
    pub fn make(seed: u64, nr_snapshots: usize, operations: usize) -> Result<Self> {
        let mut rng = Rng::new(seed);
        let image = Image::kernel_made(1 << 30, &[])?;
        let options = ["", "compress-force=zstd", "compress=lzo", "compress=zlib"][rng.index(4)];
        let mount = LoopMount::new(image.path(), options)?;
        let live = mount.join("live");
        run("btrfs", ["subvolume".as_ref(), "create".as_ref(), live.as_os_str()])?;
        let mut changes = Operations::new(rng.next_u64());
        let mut target = PathTarget::new(&live);
        for index in 0..nr_snapshots {
            changes.run(&mut target, operations);
            target.sync().map_err(|errno| anyhow::anyhow!("sync: errno {errno}"))?;
            snapshot(&live, &mount.join(format!("s{index}")))?;
        }
        // Delete the source, so that extents are shared only among the snapshots.
        run("btrfs", ["subvolume".as_ref(), "delete".as_ref(), "-c".as_ref(), live.as_os_str()])?;
        run("btrfs", ["subvolume".as_ref(), "sync".as_ref(), mount.path().as_os_str()])?;
        Ok(Self { mount, _image: image, rng, nr_snapshots })
    }

    /// The path of a snapshot.
    pub fn path(&self, index: usize) -> PathBuf {
        self.mount.join(format!("s{index}"))
    }

    /// The directory of the snapshots.
    pub fn dir(&self) -> &Path {
        self.mount.path()
    }

    /// Number of snapshots.
    pub fn len(&self) -> usize {
        self.nr_snapshots
    }

    /// Whether there are no snapshots.
    pub fn is_empty(&self) -> bool {
        self.nr_snapshots == 0
    }

    /// Random options for each snapshot. Most snapshots except the first get an earlier snapshot as their parent, and
    /// sometimes clone sources.
    pub fn random_options(&mut self) -> Vec<SendOptions> {
        let rng = &mut self.rng;
        let options = (0..self.nr_snapshots).map(|index| {
            let parent =
                (index > 0 && !rng.one_in(5)).then(|| if rng.one_in(3) { rng.index(index) } else { index - 1 });
            // Use clone sources only with a parent. Without a parent, btrfs-progs requires a common parent of all
            // clone sources.
            let mut is_source = |other: &usize| parent.is_some() && rng.one_in(3) && Some(*other) != parent;
            let clone_sources = (0..index).filter(|other| is_source(other)).collect();
            let proto = 1 + rng.below(2) as u32;
            SendOptions { parent, clone_sources, proto, compressed_data: proto == 2 && rng.one_in(2) }
        });
        options.collect()
    }

    /// Sends a snapshot with Linux.
    pub fn send(&self, index: usize, options: &SendOptions) -> Result<NamedTempFile> {
        let file = NamedTempFile::with_prefix("ubtrfs-stream-")?;
        let mut args: Vec<OsString> = ["send", "-q", "--proto"].map(OsString::from).to_vec();
        args.push(options.proto.to_string().into());
        if options.compressed_data {
            args.push("--compressed-data".into());
        }
        if let Some(parent) = options.parent {
            args.extend(["-p".into(), self.path(parent).into_os_string()]);
        }
        for source in &options.clone_sources {
            args.extend(["-c".into(), self.path(*source).into_os_string()]);
        }
        args.extend(["-f".into(), file.path().as_os_str().to_owned(), self.path(index).into_os_string()]);
        run("btrfs", args)?;
        Ok(file)
    }

    /// The entries of a snapshot.
    pub fn entries(&self, index: usize) -> Result<Vec<TreeEntry>> {
        walk_path(&self.path(index))
    }

    /// Fails unless the snapshots in a mounted directory are equal to the snapshots of this chain. The modification
    /// time of a root may differ, because Linux 6.18 does not always send that time.
    pub fn compare(&self, received: &Path) -> Result<()> {
        (0..self.nr_snapshots).try_for_each(|index| self.compare_one(index, received))
    }

    /// Compares one snapshot like [`Self::compare`].
    pub fn compare_one(&self, index: usize, received: &Path) -> Result<()> {
        let mut found = walk_path(&received.join(format!("s{index}")))?;
        let sent = self.entries(index)?;
        for (found, sent) in found.iter_mut().zip(&sent).filter(|(found, _)| found.path.is_empty()) {
            found.mtime = sent.mtime;
        }
        compare_entries(&sent, &found, Compare::ALL)
            .with_context(|| format!("snapshot {index}: sent (first) and received (second) differ"))
    }

    /// Measures the amounts of data of the snapshots in a directory that Linux has mounted.
    pub fn sharing(&self, received: &Path) -> Result<Sharing> {
        // Sync first, because data that is not on disk yet would not be counted.
        run("sync", ["-f".as_ref(), received.as_os_str()])?;
        let totals = (0..self.nr_snapshots).map(|index| total(&received.join(format!("s{index}"))));
        Ok(Sharing { used: data_used(received)?, totals: totals.collect::<Result<_>>()? })
    }
}

/// Receives a stream with Linux.
pub fn receive_by_linux(stream: &Path, dir: &Path) -> Result<()> {
    let output = Command::new("btrfs")
        .args(["receive", "-q"])
        .arg(dir)
        .stdin(Stdio::from(File::open(stream)?))
        .env("LC_ALL", "C")
        .output()
        .context("cannot start btrfs receive")?;
    ensure!(output.status.success(), "btrfs receive failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Bytes of data that the files of a subvolume refer to.
fn total(subvolume: &Path) -> Result<u64> {
    let args = ["filesystem".as_ref(), "du".as_ref(), "--raw".as_ref(), "-s".as_ref(), subvolume.as_os_str()];
    let text = run("btrfs", args)?;
    let first = text.lines().last().and_then(|line| line.split_whitespace().next()?.parse().ok());
    first.with_context(|| format!("btrfs filesystem du printed:\n{text}"))
}

/// Bytes of data extents of a filesystem.
fn data_used(mount: &Path) -> Result<u64> {
    let args = ["filesystem".as_ref(), "df".as_ref(), "--raw".as_ref(), mount.as_os_str()];
    let text = run("btrfs", args)?;
    let used = |line: &str| line.strip_prefix("Data")?.split_once("used=")?.1.trim().parse().ok();
    text.lines().find_map(used).with_context(|| format!("btrfs filesystem df printed:\n{text}"))
}

fn snapshot(source: &Path, to: &Path) -> Result<()> {
    let args = ["subvolume".as_ref(), "snapshot".as_ref(), "-r".as_ref(), source.as_os_str(), to.as_os_str()];
    run("btrfs", args).map(drop)
}
