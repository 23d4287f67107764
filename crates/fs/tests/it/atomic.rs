//! Tests of transactions of several changes: power cuts, failures and too little memory leave all changes or none.
//!
//! Method: random operations run in a transaction on a recording device, with syncs of other threads that fail. The
//! power is cut at many points. Before the transaction's end is durable, the filesystem holds the model of its beginning,
//! and afterwards the model of its end. `UBTRFS_SEED` repeats a failure, `UBTRFS_CUTS` sets the number of cuts.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::io::Errno;
use ubtrfs_device::{Device, MemoryDevice};
use ubtrfs_format::{DevId, Ino, RootId};
use ubtrfs_fs::{Caller, Fs, InodeId, Job, MountOptions, NewInode, QgroupId, QuotaKind, ReplaceRequest, SetAttr};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{
    Compare, Driver, FsTarget, Medium, MediumDevice, Model, RecordingDevice, Rng, TreeEntry, check_medium,
    compare_entries,
};

const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };
const ROOT: Caller = Caller::ROOT;

fn open(device: Arc<dyn Device>, options: &str) -> Result<FsTarget> {
    FsTarget::on_device(device, MountOptions::parse(options)?)
}

fn memory(size: u64) -> Arc<MediumDevice> {
    Arc::new(MediumDevice::new(Medium::formatted(size, &MkfsOptions::default()).unwrap()))
}

fn errno<T>(done: ubtrfs_fs::Result<T>) -> Errno {
    Errno::from_raw_os_error(done.err().unwrap().errno())
}

/// The entries of a medium.
fn entries(medium: Medium) -> Result<Vec<TreeEntry>> {
    let target = open(Arc::new(MediumDevice::new(medium)), "ro")?;
    let found = target.walk()?;
    target.close()?;
    Ok(found)
}

#[test]
fn h1_a_power_cut_leaves_all_changes_of_a_transaction_or_none() {
    let cuts: usize = std::env::var("UBTRFS_CUTS").ok().and_then(|text| text.parse().ok()).unwrap_or(60);
    let first = Rng::seed_or(1);
    for seed in first..first + 3 {
        let base = Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap();
        let device = Arc::new(RecordingDevice::new(base));
        // Commits become due all the time.
        let mut target = open(Arc::clone(&device) as Arc<dyn Device>, "commit=1").unwrap();
        let (mut model, mut driver) = (Model::new(), Driver::new(seed, 1 << 15));
        driver.run(&mut model, &mut target, 60).unwrap();
        let fs: Arc<Fs> = Arc::clone(target.fs());
        fs.begin_atomic().unwrap();
        device.mark(1);
        let before = target.walk().unwrap();
        for step in 0..150u64 {
            let id = fs.create(TOP, format!("file{step}").as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id;
            fs.write_all(id, 0, &vec![step as u8; 1 + (step as usize * 977) % 40_000]).unwrap();
            if step % 3 == 1 {
                fs.unlink(TOP, format!("file{}", step / 2).as_bytes()).ok();
            }
            if step % 50 == 0 {
                assert_eq!(errno(fs.sync()), Errno::INVAL);
                assert_eq!(errno(fs.fsync(id, false)), Errno::INVAL);
                assert_eq!(errno(fs.create_subvolume(TOP, b"subvolume", &ROOT)), Errno::INVAL);
                assert_eq!(errno(fs.begin_atomic()), Errno::INVAL);
                std::thread::sleep(Duration::from_millis(1100));
            }
        }
        fs.commit_atomic().unwrap();
        device.mark(2);
        let after = target.walk().unwrap();
        drop(fs);
        target.close().unwrap();
        let mut rng = Rng::new(seed);
        let mut points: Vec<usize> = (0..cuts).map(|_| rng.index(device.events() + 1)).collect();
        points.extend(device.flush_points().into_iter().flat_map(|at| [at - 1, at]));
        points.sort_unstable();
        let (mut builder, mut nr_before, mut nr_after) = (device.cuts(), 0, 0);
        for (number, point) in points.into_iter().enumerate() {
            let (medium, outcome) = builder.cut(point, &mut Rng::new(seed * 65_537 + number as u64));
            let what = || format!("seed {seed}, cut {number} at event {point}: {outcome:?}");
            let Some(promised) = outcome.promised else { continue };
            check_medium(&medium).with_context(what).unwrap();
            let found = entries(medium).with_context(what).unwrap();
            let is_new = compare_entries(&after, &found, Compare::MODEL).is_ok();
            if !is_new {
                compare_entries(&before, &found, Compare::MODEL).with_context(what).unwrap();
                assert!(promised < 2, "{}", what());
            }
            *(if is_new { &mut nr_after } else { &mut nr_before }) += 1;
        }
        assert!(nr_before > 0 && nr_after > 0, "{nr_before} cuts before the end, {nr_after} after it");
    }
}

#[test]
fn h1_an_abort_or_a_close_leaves_the_state_before_the_transaction() {
    for aborts in [true, false] {
        let device = memory(256 << 20);
        let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::default()).unwrap();
        let kept = fs.create(TOP, b"kept", NewInode::file(0o644), &ROOT).unwrap().id;
        fs.write_all(kept, 0, &[1; 100_000]).unwrap();
        fs.begin_atomic().unwrap();
        let before = entries(device.content()).unwrap();
        fs.setattr(kept, &SetAttr { size: Some(5), ..SetAttr::default() }, &ROOT).unwrap();
        fs.write_all(kept, 0, &[2; 5]).unwrap();
        fs.create(TOP, b"new", NewInode::dir(0o755), &ROOT).unwrap();
        if aborts {
            fs.abort("a test".to_owned());
        }
        assert!(fs.close().is_err());
        drop(fs);
        check_medium(&device.content()).unwrap();
        compare_entries(&before, &entries(device.content()).unwrap(), Compare::MODEL).unwrap();
    }
}

#[test]
fn h1_a_transaction_that_changes_nothing_ends_without_a_trace() {
    let device = memory(256 << 20);
    // Every read would change the time of access.
    let options = MountOptions::parse("strictatime").unwrap();
    let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], options).unwrap();
    let file = fs.create(TOP, b"file", NewInode::file(0o644), &ROOT).unwrap().id;
    fs.write_all(file, 0, b"text").unwrap();
    fs.begin_atomic().unwrap();
    assert_eq!(fs.read(file, 0, 4).unwrap(), b"text");
    fs.abort_atomic("a test".to_owned()).unwrap();
    assert_eq!(fs.read_only(), None);
    assert_eq!(errno(fs.abort_atomic("a test".to_owned())), Errno::INVAL, "none runs");
    assert_eq!(errno(fs.commit_atomic()), Errno::INVAL, "none runs");
    fs.write_all(file, 0, b"more").unwrap();
    fs.sync().unwrap();
    fs.begin_atomic().unwrap();
    fs.write_all(file, 0, b"lost").unwrap();
    fs.abort_atomic("a test".to_owned()).unwrap();
    assert_eq!(errno(fs.write_all(file, 0, b"late")), Errno::ROFS);
    drop(fs);
    let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::default()).unwrap();
    assert_eq!(fs.read(file, 0, 4).unwrap(), b"more");
    fs.close().unwrap();
    check_medium(&device.content()).unwrap();
}

#[test]
fn h2_freed_space_is_not_used_before_the_end() {
    let device = memory(256 << 20);
    let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::default()).unwrap();
    let fill = |name: &str| {
        let id = fs.create(TOP, name.as_bytes(), NewInode::file(0o644), &ROOT)?.id;
        (0..100u64).try_for_each(|piece| fs.write_all(id, piece << 20, &vec![piece as u8; 1 << 20]))?;
        fs.flush_data()
    };
    fill("first").unwrap();
    fs.begin_atomic().unwrap();
    fs.unlink(TOP, b"first").unwrap();
    assert_eq!(errno(fill("second")), Errno::NOSPC);
    fs.unlink(TOP, b"second").unwrap();
    fs.commit_atomic().unwrap();
    fill("third").unwrap();
    fs.close().unwrap();
    drop(fs);
    check_medium(&device.content()).unwrap();
}

#[test]
fn h2_a_transaction_that_the_memory_cannot_hold_is_refused() {
    let device = memory(512 << 20);
    let options = MountOptions { memory_bytes: 16 << 20, ..MountOptions::default() };
    let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], options).unwrap();
    fs.begin_atomic().unwrap();
    let refused = (0..400_000u64).find_map(|number| {
        fs.create(TOP, format!("a name of some length {number}").as_bytes(), NewInode::file(0o644), &ROOT).err()
    });
    assert_eq!(refused.map(|error| error.errno()), Some(Errno::INVAL.raw_os_error()));
    fs.abort("a test".to_owned());
    drop(fs);
    assert_eq!(entries(device.content()).unwrap().len(), 1, "the root directory");
}

#[test]
fn h2_work_that_commits_is_refused_before_it_changes_anything() {
    let device = memory(256 << 20);
    let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::default()).unwrap();
    let sv = fs.create_subvolume(TOP, b"sv", &ROOT).unwrap().root;
    let group = QgroupId::new(1, 7).unwrap();
    for has_quotas in [false, true] {
        if has_quotas {
            fs.enable_quotas(QuotaKind::Full).unwrap();
            fs.create_qgroup(group).unwrap();
        }
        let state = || {
            let groups = has_quotas.then(|| fs.qgroups().unwrap());
            let devices: Vec<_> = fs.space_usage().devices.iter().map(|device| device.devid).collect();
            let flags = fs.subvolume_info(sv).unwrap().flags;
            (fs.superblock().label().to_vec(), groups, devices, flags, fs.default_subvolume().unwrap())
        };
        let before = state();
        let other = Arc::new(MemoryDevice::new(256 << 20));
        other.write_at(1 << 20, b"not lost").unwrap();
        fs.begin_atomic().unwrap();
        let other_device = || Arc::clone(&other) as Arc<dyn Device>;
        let replace = ReplaceRequest { devid: DevId(1), device: other_device(), avoids_source: false };
        let job = Job::new();
        let mut refused = vec![
            errno(fs.set_label(b"new")),
            errno(fs.set_subvolume_read_only(sv, true)),
            errno(fs.set_default_subvolume(sv)),
            errno(fs.add_device(other_device(), &job)),
            errno(fs.replace_device(&replace, &job)),
            errno(fs.resize_device(DevId(1), 200 << 20, &job)),
        ];
        match has_quotas {
            false => refused.push(errno(fs.enable_quotas(QuotaKind::Full))),
            true => refused.extend([
                errno(fs.disable_quotas()),
                errno(fs.create_qgroup(QgroupId::new(1, 8).unwrap())),
                errno(fs.limit_qgroup(group, Some(Some(1 << 20)), None)),
                errno(fs.destroy_qgroup(group)),
            ]),
        }
        assert!(refused.iter().all(|errno| *errno == Errno::INVAL), "{refused:?}");
        fs.create(TOP, format!("file{has_quotas}").as_bytes(), NewInode::file(0o644), &ROOT).unwrap();
        fs.commit_atomic().unwrap();
        assert_eq!(state(), before);
        let mut kept = [0; 8];
        other.read_at(1 << 20, &mut kept).unwrap();
        assert_eq!(&kept, b"not lost");
        fs.set_label(b"").unwrap();
    }
    fs.close().unwrap();
    drop(fs);
    check_medium(&device.content()).unwrap();
}
