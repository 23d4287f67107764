//! Rounds of sending: chains of snapshots with random operations between them. All beds make their operations with
//! [`Operations`].
//!
//! ```text
//! PairRound              made and sent by the engine, received by the engine, all in memory; some also by Linux
//! SendRound              made by Linux or the engine, sent by the engine, received by Linux
//! crate::receive_round   made and sent by Linux, received by the engine
//! MutationRound          streams of the engine, changed at random, received by the engine in memory
//! check_cloned           made and sent by the engine, received on the same filesystem with sharing
//! ```
//!
//! Trees, holes and sharing must be equal in the sent and the received snapshots. Many rounds are run by
//! `cargo run --release -p ubtrfs-testkit --example send_rounds -- --bed BED --from SEED --rounds N`.

mod cloned;
mod mutations;
mod operations;
mod pairs;
mod sharing;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use ubtrfs_device::{Access, Device, FileDevice};
use ubtrfs_format::{Ino, RootId};
use ubtrfs_fs::{Fs, InodeId, Job, MountOptions, ReceiveOptions, SendRequest};

pub use cloned::check_cloned;
pub use mutations::{Mutated, MutationRound};
pub use operations::Operations;
pub use pairs::{PairRound, check_prefixes};
pub use sharing::{Differs, Sent, Tolerance, compare_extents};

use crate::command::run;
use crate::fs_target::{FsTarget, walk_fs_from};
use crate::image::Image;
use crate::loop_mount::LoopMount;
use crate::medium::{Medium, MediumDevice};
use crate::path_target::PathTarget;
use crate::prefixed::Prefixed;
use crate::rng::Rng;
use crate::target::{Errno, Target};
use crate::tree_entry::{Compare, compare_entries, compare_trees};

/// One round.
#[derive(Clone, Debug)]
pub struct SendRound {
    /// The seed of all random choices.
    pub seed: u64,
    /// Number of operations before each snapshot.
    pub operations: usize,
    /// The directory for images and streams of a failed round.
    pub keep: Option<PathBuf>,
}

/// A form in which streams are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// Version of the stream.
    pub version: u32,
    /// Whether compressed extents are sent in compressed form.
    pub compressed_data: bool,
}

/// All forms.
pub const FORMS: [Form; 3] = [
    Form { version: 1, compressed_data: false },
    Form { version: 2, compressed_data: false },
    Form { version: 2, compressed_data: true },
];

/// Opens an image for reading. `options` are further mount options, such as the subvolume to open; "" for none.
pub fn open_at(image: &Path, options: &str) -> Result<Arc<Fs>> {
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image, Access::ReadOnly)?);
    let options = if options.is_empty() { "ro".to_owned() } else { format!("ro,{options}") };
    Ok(Fs::open(vec![device], MountOptions::parse(&options)?)?)
}

/// Compares the extents of the sent snapshots (in the image `source`) with those that Linux made when it received the
/// streams (in `target`).
fn compare_images(source: &Path, target: &Path, sent: &[(&str, Vec<&str>)], form: Form) -> Result<Differs> {
    let tolerance = Tolerance { prealloc: form.version < 2, tails: true, ends: true };
    let sent: Vec<Sent<'_>> =
        sent.iter().map(|(name, others)| Sent { name, others: others.clone(), tolerance }).collect();
    let (from, to) = (open_at(source, "")?, open_at(target, "")?);
    let differs = compare_extents(&from, &to, &sent)?;
    from.close()?;
    to.close()?;
    Ok(differs)
}

/// The subvolume of this path.
pub fn subvolume(fs: &Fs, path: &str) -> Result<RootId> {
    let list = fs.subvolumes()?;
    let found = list.into_iter().find(|info| info.path == path.as_bytes());
    Ok(found.with_context(|| format!("no subvolume {path}"))?.id)
}

/// Makes the request to send one snapshot.
pub fn request(fs: &Fs, name: &str, parent: Option<&str>, clone_sources: &[&str], form: Form) -> Result<SendRequest> {
    Ok(SendRequest {
        subvolumes: vec![subvolume(fs, name)?],
        parent: parent.map(|parent| subvolume(fs, parent)).transpose()?,
        clone_sources: clone_sources.iter().map(|name| subvolume(fs, name)).collect::<Result<_>>()?,
        version: form.version,
        compressed_data: form.compressed_data,
        no_data: false,
        joined: false,
    })
}

/// Receives a stream with btrfs-progs.
pub fn receive(stream: &Path, dir: &Path) -> Result<()> {
    run("btrfs", ["receive".as_ref(), "-e".as_ref(), "-f".as_ref(), stream.as_os_str(), dir.as_os_str()]).map(drop)
}

impl SendRound {
    /// Runs the round. The error names the differences and the seed.
    pub fn run(&self) -> Result<()> {
        let mut rng = Rng::new(self.seed);
        let source = Image::kernel_made(1 << 30, mkfs_args(&mut rng))?;
        let names = self.make_chain(&source, &mut rng).context("making the snapshots")?;
        let form = FORMS[rng.index(FORMS.len())];
        let result = self.send_chain(&source, &names, form, &mut rng);
        if let (Err(_), Some(keep)) = (&result, &self.keep) {
            std::fs::create_dir_all(keep)?;
            run("cp", ["--sparse=always".as_ref(), source.path().as_os_str(), keep.join("source").as_os_str()])?;
        }
        result.with_context(|| format!("round of seed {} ({form:?})", self.seed))
    }

    /// Makes `live` and its snapshots `s0`, `s1`, ...
    fn make_chain(&self, image: &Image, rng: &mut Rng) -> Result<Vec<String>> {
        let nr = 2 + rng.index(3);
        let mut operations = Operations::new(rng.next_u64());
        let mut names = Vec::new();
        let by_linux = rng.one_in(2);
        let options = ["", "compress-force=zstd", "compress=lzo", "max_inline=0", "nodatasum"][rng.index(5)];
        {
            let mount = LoopMount::new(image.path(), "")?;
            run("btrfs", ["subvolume".as_ref(), "create".as_ref(), mount.join("live").as_os_str()])?;
            mount.close()?;
        }
        let mut done = 0;
        while done < nr {
            // Make one or two snapshots in each session. After the next mount, numbers of deleted inodes are used
            // again.
            let here = (1 + rng.index(2)).min(nr - done);
            if by_linux {
                let mount = LoopMount::new(image.path(), options)?;
                let mut target = PathTarget::new(&mount.join("live"));
                for _ in 0..here {
                    operations.run(&mut target, self.operations);
                    let name = format!("s{done}");
                    run("sync", std::iter::empty::<&str>())?;
                    let (live, path) = (mount.join("live"), mount.join(&name));
                    run(
                        "btrfs",
                        ["subvolume".as_ref(), "snapshot".as_ref(), "-r".as_ref(), live.as_os_str(), path.as_os_str()],
                    )?;
                    names.push(name);
                    done += 1;
                }
                mount.close()?;
            } else {
                let target = FsTarget::open(image.path(), options)?;
                let fs = Arc::clone(target.fs());
                let mut inside = Prefixed::new(target, "live");
                for _ in 0..here {
                    operations.run(&mut inside, self.operations);
                    let name = format!("s{done}");
                    let top = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };
                    fs.snapshot_in(subvolume(&fs, "live")?, top, name.as_bytes(), true, &[])?;
                    names.push(name);
                    done += 1;
                }
                fs.close()?;
            }
        }
        Ok(names)
    }

    fn send_chain(&self, source: &Image, names: &[String], form: Form, rng: &mut Rng) -> Result<()> {
        let target = Image::kernel_made(1 << 30, &[])?;
        let dir = tempfile::TempDir::with_prefix("ubtrfs-send-")?;
        let fs = open_at(source.path(), "")?;
        let (mut streams, mut sent) = (Vec::new(), Vec::new());
        for (index, name) in names.iter().enumerate() {
            let (mut parent, mut sources) = (None, Vec::new());
            if index > 0 && !rng.one_in(6) {
                parent = Some(names[rng.index(index)].as_str());
                if rng.one_in(2) {
                    sources.push(names[rng.index(index)].as_str());
                }
            }
            let path = dir.path().join(name);
            let mut file = File::create(&path)?;
            let request = request(&fs, name, parent, &sources, form)?;
            fs.send(&request, &mut file, &Job::new()).with_context(|| format!("sending {name} from {parent:?}"))?;
            streams.push((path, name, parent));
            sent.push((name.as_str(), parent.into_iter().chain(sources).collect()));
        }
        fs.close()?;
        let (from, to) = (LoopMount::new(source.path(), "ro")?, LoopMount::new(target.path(), "")?);
        let keep_stream = |path: &Path, name: &str| -> Result<()> {
            let Some(keep) = &self.keep else { return Ok(()) };
            std::fs::create_dir_all(keep)?;
            std::fs::copy(path, keep.join(format!("{name}.stream")))?;
            Ok(())
        };
        for (path, name, parent) in &streams {
            let received = receive(path, to.path()).with_context(|| format!("receiving {name} (parent {parent:?})"));
            let same = received.and_then(|()| {
                let what = format!("{name} (parent {parent:?}) as received");
                compare_trees(&from.join(name), &to.join(name), Compare::ALL).context(what)
            });
            if let Err(error) = same {
                keep_stream(path, name)?;
                return Err(error);
            }
        }
        from.close()?;
        to.close()?;
        let differs = compare_images(source.path(), target.path(), &sent, form)?;
        if differs.is_any() {
            for (path, name, _) in &streams {
                keep_stream(path, name)?;
            }
        }
        ensure!(!differs.is_any(), "extents: {differs:?}");
        Ok(())
    }
}

fn mkfs_args(rng: &mut Rng) -> &'static [&'static str] {
    [&[][..], &["-n", "4096"], &["-O", "^no-holes"], &["-M", "-n", "4096"]][rng.index(4)]
}

/// Operations on a tree.
pub type Change = fn(&mut dyn Target) -> Result<(), Errno>;

/// Makes a snapshot after `first` and one after `second`, sends both (the second one as an increment), and receives
/// them with Linux and with the engine. Fails unless the received trees equal the snapshots. The filesystem is opened
/// again for each change, so that numbers of deleted inodes are used again. Returns the temporary names in the
/// increment.
pub fn check_pair(first: Change, second: &[Change], form: Form) -> Result<Vec<PathBuf>> {
    let source = Image::kernel_made(256 << 20, &[])?;
    let mount = LoopMount::new(source.path(), "")?;
    run("btrfs", ["subvolume".as_ref(), "create".as_ref(), mount.join("live").as_os_str()])?;
    mount.close()?;
    let session = |change: Change, snapshot: Option<&str>| -> Result<()> {
        let target = FsTarget::open(source.path(), "")?;
        let fs = Arc::clone(target.fs());
        let mut inside = Prefixed::new(target, "live");
        change(&mut inside).map_err(|errno| anyhow::anyhow!("an operation failed: errno {errno}"))?;
        let top = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };
        if let Some(name) = snapshot {
            fs.snapshot_in(subvolume(&fs, "live")?, top, name.as_bytes(), true, &[])?;
        }
        Ok(fs.close()?)
    };
    session(first, Some("s0"))?;
    for (index, change) in second.iter().enumerate() {
        session(*change, (index + 1 == second.len()).then_some("s1"))?;
    }
    let target = Image::kernel_made(256 << 20, &[])?;
    let dir = tempfile::TempDir::with_prefix("ubtrfs-send-")?;
    let streams = [dir.path().join("s0"), dir.path().join("s1")];
    let fs = open_at(source.path(), "")?;
    for (path, (name, parent)) in streams.iter().zip([("s0", None), ("s1", Some("s0"))]) {
        fs.send(&request(&fs, name, parent, &[], form)?, &mut File::create(path)?, &Job::new())?;
    }
    let ours = FsTarget::on_device(
        Arc::new(MediumDevice::new(Medium::formatted(256 << 20, &ubtrfs_mkfs::MkfsOptions::default())?)),
        MountOptions::default(),
    )?;
    let ours = ours.fs();
    for (path, name) in streams.iter().zip(["s0", "s1"]) {
        ours.receive(ours.root(), File::open(path)?, &ReceiveOptions::default(), &Job::new(), &mut |_| {})
            .map_err(|error| anyhow::anyhow!("the engine receives {name}: {error}"))?;
        let walk = |fs: &Fs| walk_fs_from(fs, fs.lookup_path(name.as_bytes(), false)?.id);
        compare_entries(&walk(&fs)?, &walk(ours)?, Compare::ALL)
            .with_context(|| format!("the engine received {name}"))?;
    }
    ours.close()?;
    fs.close()?;
    let (from, to) = (LoopMount::new(source.path(), "ro")?, LoopMount::new(target.path(), "")?);
    for (path, name) in streams.iter().zip(["s0", "s1"]) {
        receive(path, to.path())?;
        compare_trees(&from.join(name), &to.join(name), Compare::ALL).with_context(|| name.to_owned())?;
    }
    from.close()?;
    to.close()?;
    let differs = compare_images(source.path(), target.path(), &[("s0", vec![]), ("s1", vec!["s0"])], form)?;
    ensure!(!differs.is_any(), "extents: {differs:?}");
    // List the temporary names that the increment uses.
    let dump = run("btrfs", ["receive".as_ref(), "--dump".as_ref(), "-f".as_ref(), streams[1].as_os_str()])?;
    let temporary =
        dump.lines().filter(|line| line.starts_with("rename")).filter_map(|line| line.split("dest=./s1/").nth(1));
    Ok(temporary.filter(|name| is_temporary(name)).map(PathBuf::from).collect())
}

/// Whether a name is like `o257-7-0`.
fn is_temporary(name: &str) -> bool {
    let parts: Vec<&str> = name.strip_prefix('o').unwrap_or_default().split('-').collect();
    parts.len() == 3 && parts.iter().all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
}
