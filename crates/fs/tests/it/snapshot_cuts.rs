//! Tests power cuts during snapshots and deletions of subvolumes.
//!
//! Method: random operations in a subvolume are recorded once, while snapshots of it are taken and deleted, and block
//! groups are emptied. The power is cut at many points of the recording. After each cut, the filesystem can be opened,
//! and the checkers find nothing, neither before it is opened nor after it is closed. A snapshot exists if the call
//! that made it returned, unless its deletion had begun; every existing snapshot holds the model's content.
//! `UBTRFS_SEED` repeats a failure, `UBTRFS_CUTS` sets the number of cuts.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use ubtrfs_device::Device;
use ubtrfs_format::{Ino, RootId};
use ubtrfs_fs::{Caller, Fs, InodeId, Job, MountOptions, QuotaKind};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{
    Compare, Driver, FsTarget, Medium, MediumDevice, Model, RecordingDevice, Rng, TreeEntry, btrfs_check, capability,
    check_medium, compare_entries,
};

const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };

struct Snapshot {
    name: String,
    entries: Vec<TreeEntry>,
    /// The number passed to `RecordingDevice::mark` when the snapshot was durable.
    made: u64,
    /// The last number passed to `RecordingDevice::mark` before the snapshot's deletion began; `None` if the snapshot
    /// is not deleted.
    deleted: Option<u64>,
}

fn open(device: Arc<dyn Device>, options: &str) -> Result<FsTarget> {
    FsTarget::on_device(device, MountOptions::parse(options)?)
}

fn record(seed: u64) -> Result<(Arc<RecordingDevice>, Vec<Snapshot>)> {
    let mut rng = Rng::new(seed);
    let mkfs = MkfsOptions { nodesize: if rng.one_in(3) { 16_384 } else { 4096 }, ..MkfsOptions::default() };
    let base = Medium::formatted(256 << 20, &mkfs)?;
    let device = Arc::new(RecordingDevice::new(base));
    let fs = open(Arc::clone(&device) as Arc<dyn Device>, "commit=300")?;
    let work = fs.fs().create_subvolume(TOP, b"work", &Caller::ROOT)?;
    // With quotas, the checker also compares the numbers of the quota groups after each cut.
    if seed % 2 == 1 {
        fs.fs().enable_quotas(QuotaKind::Full)?;
        fs.fs().wait_for_quota_rescan(&Job::new())?;
    }
    fs.fs().set_default_subvolume(work.root)?;
    fs.close()?;
    let mut target = open(Arc::clone(&device) as Arc<dyn Device>, "commit=300")?;
    let fs: Arc<Fs> = Arc::clone(target.fs());
    let (mut model, mut driver) = (Model::new(), Driver::new(seed, 1 << 15));
    let mut snapshots: Vec<Snapshot> = Vec::new();
    let mut promise = 1;
    device.mark(promise);
    for number in 0..24 {
        driver.run(&mut model, &mut target, 40)?;
        let alive: Vec<usize> = (0..snapshots.len()).filter(|at| snapshots[*at].deleted.is_none()).collect();
        match rng.below(8) {
            0 | 1 if !alive.is_empty() => {
                let snapshot = &mut snapshots[*rng.pick(&alive)];
                snapshot.deleted = Some(promise);
                fs.delete_subvolume(TOP, snapshot.name.as_bytes(), None)?;
                if rng.one_in(2) {
                    fs.finish_deletions(&mut |_| Ok(()))?;
                }
            }
            2 => fs.sync()?,
            3 => {
                let group = *rng.pick(&fs.block_groups());
                let failures = fs.relocate_block_group(group.start, &Job::new())?.failures;
                ensure!(failures.is_empty(), "block group {}: {failures:?}", group.start);
            }
            _ => {
                let name = format!("snapshot-{number}");
                let (source, entries) = match rng.below(4) {
                    0 if !alive.is_empty() => {
                        let of = &snapshots[*rng.pick(&alive)];
                        (fs.lookup(TOP, of.name.as_bytes())?.id.root, of.entries.clone())
                    }
                    _ => (work.root, model.entries()),
                };
                fs.snapshot(source, TOP, name.as_bytes(), rng.one_in(2))?;
                snapshots.push(Snapshot { name, entries, made: promise + 1, deleted: None });
            }
        }
        promise += 1;
        device.mark(promise);
    }
    drop(fs);
    target.close()?;
    Ok((device, snapshots))
}

fn verify(medium: &Medium, snapshots: &[Snapshot], promised: u64) -> Result<()> {
    check_medium(medium).context("before")?;
    let device = Arc::new(MediumDevice::new(medium.clone()));
    let target = open(Arc::clone(&device) as Arc<dyn Device>, "subvolid=5").context("opening")?;
    ensure!(target.fs().read_only().is_none());
    let names: Vec<Vec<u8>> = target.fs().subvolumes()?.into_iter().map(|info| info.path).collect();
    target.fs().finish_deletions(&mut |_| Ok(()))?;
    target.close()?;
    check_medium(&device.content()).context("after")?;
    for snapshot in snapshots {
        let must_be = snapshot.made <= promised && snapshot.deleted.is_none_or(|after| after > promised);
        let is_there = names.iter().any(|name| *name == snapshot.name.as_bytes());
        ensure!(is_there || !must_be, "{} is lost", snapshot.name);
        if is_there {
            let device = Arc::new(MediumDevice::new(device.content()));
            let target = open(device, &format!("ro,subvol={}", snapshot.name))?;
            let found = target.walk()?;
            target.close()?;
            compare_entries(&snapshot.entries, &found, Compare::MODEL).with_context(|| snapshot.name.clone())?;
        }
    }
    Ok(())
}

#[test]
fn snapshots_survive_power_cuts() {
    let cuts: usize = std::env::var("UBTRFS_CUTS").ok().and_then(|text| text.parse().ok()).unwrap_or(40);
    let first = Rng::seed_or(1);
    for seed in first..first + 3 {
        let (device, snapshots) = record(seed).with_context(|| format!("seed {seed}")).unwrap();
        let (mut rng, flushes) = (Rng::new(seed), device.flush_points());
        let mut points: Vec<usize> = (0..cuts)
            .map(|number| match number % 2 {
                0 => (*rng.pick(&flushes) + rng.index(4)).saturating_sub(1),
                _ => rng.index(device.events() + 1),
            })
            .collect();
        points.sort_unstable();
        let mut builder = device.cuts();
        for (number, point) in points.into_iter().enumerate() {
            let (medium, outcome) = builder.cut(point, &mut Rng::new(seed * 65_537 + number as u64));
            let what = || format!("seed {seed}, cut {number} at event {point}: {outcome:?}");
            let Some(promised) = outcome.promised else { continue };
            verify(&medium, &snapshots, promised).with_context(what).unwrap();
            if number % 13 == 0 && capability::kernel_oracle() {
                let image = tempfile::NamedTempFile::new().unwrap();
                medium.save(image.path()).unwrap();
                btrfs_check(image.path()).with_context(what).unwrap();
            }
        }
    }
}
