//! Tests of `ubtrfs::manage` on image files: balance, scrub, devices, quotas, extents. Both checkers and Linux judge the images.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ubtrfs::format::BlockGroupFlags;
use ubtrfs::manage::{BalanceFilter, BalanceOptions, Defragment, QgroupId, QuotaKind, ScrubOptions};
use ubtrfs::{Access, Device, FileDevice, Filesystem, Job, MkfsOptions, MountOptions};
use ubtrfs_testkit::{Rng, btrfs_check_array, capability, judge, second_opinion};

const SIZE: u64 = 512 << 20;

/// Image files in a directory.
struct Images(tempfile::TempDir);

impl Images {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// An empty image.
    fn device(&self, name: &str) -> Arc<dyn Device> {
        Arc::new(FileDevice::create(&self.path(name), SIZE, true).unwrap())
    }

    fn open(&self, names: &[&str]) -> Filesystem {
        let open = |name: &&str| -> Arc<dyn Device> {
            Arc::new(FileDevice::open(&self.path(name), Access::ReadWrite).unwrap())
        };
        Filesystem::open_devices(names.iter().map(open).collect(), MountOptions::default()).unwrap()
    }
}

fn of_type(fs: &Filesystem, kind: BlockGroupFlags) -> Vec<BlockGroupFlags> {
    let groups = fs.space_usage().groups;
    groups.iter().map(|group| group.flags).filter(|flags| flags.contains(kind)).collect()
}

/// Bytes of the first image, at which the content of a file lies.
fn place_of(image: &Path, content: &[u8]) -> u64 {
    let raw = std::fs::read(image).unwrap();
    let at = raw.chunks(4096).position(|block| block == &content[..4096]).unwrap();
    at as u64 * 4096
}

#[test]
fn devices_join_leave_and_are_replaced() {
    let images = Images::new();
    let first = images.device("a");
    Filesystem::make_on(first.as_ref(), &MkfsOptions::default()).unwrap();
    let fs = Filesystem::open_devices(vec![first], MountOptions::default()).unwrap();
    let content = Rng::new(1).bytes(40 << 20);
    fs.write("/f", &content).unwrap();
    let job = Job::new();
    assert_eq!(fs.add_device(images.device("b"), &job).unwrap(), 2);
    let raid1 = || Some(BalanceFilter { convert: Some(BlockGroupFlags::RAID1), ..BalanceFilter::default() });
    let report =
        fs.balance(&BalanceOptions { data: raid1(), metadata: raid1(), ..BalanceOptions::default() }, &job).unwrap();
    assert!(report.failures.is_empty() && report.counts.completed > 0);
    for kind in [BlockGroupFlags::DATA, BlockGroupFlags::METADATA] {
        assert!(of_type(&fs, kind).iter().all(|flags| flags.contains(BlockGroupFlags::RAID1)));
    }
    assert!(job.progress().done > 0);
    // RAID1 needs two devices.
    assert_eq!(fs.remove_devices(&[2], &Job::new()).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    assert_eq!(fs.remove_devices(&[7], &Job::new()).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    let report = fs.replace_device(1, images.device("c"), &Job::new()).unwrap();
    assert!(report.files.is_empty() && report.counts.uncorrectable_errors == 0);
    fs.close().unwrap();
    let fs = images.open(&["c", "b"]);
    assert!(fs.read("/f").unwrap() == content);
    fs.close().unwrap();
    if capability::kernel_oracle() {
        btrfs_check_array(&[images.path("c"), images.path("b")]).unwrap();
    }
}

#[test]
fn a_scrub_repairs_what_is_bad() {
    let images = Images::new();
    let devices = [images.device("a"), images.device("b")];
    let options = MkfsOptions {
        data_profile: BlockGroupFlags::RAID1,
        metadata_profile: BlockGroupFlags::RAID1,
        ..MkfsOptions::default()
    };
    Filesystem::make_on_devices(&[devices[0].as_ref(), devices[1].as_ref()], &options).unwrap();
    let fs = Filesystem::open_devices(devices.to_vec(), MountOptions::default()).unwrap();
    let content = Rng::new(2).bytes(8 << 20);
    fs.write("/f", &content).unwrap();
    fs.close().unwrap();
    drop(devices);
    let at = place_of(&images.path("a"), &content);
    File::options().write(true).open(images.path("a")).unwrap().write_all_at(&[7; 8192], at).unwrap();
    let fs = images.open(&["a", "b"]);
    let look = ScrubOptions { repair: false, devices: vec![1], ..ScrubOptions::default() };
    for (options, nr_bad) in [(&look, 2), (&ScrubOptions::default(), 2), (&ScrubOptions::default(), 0)] {
        let report = fs.scrub(options, &Job::new()).unwrap();
        let first = &report.devices[0].counts;
        assert_eq!((first.csum_errors, first.uncorrectable_errors), (nr_bad, 0), "{options:?}");
        assert_eq!(report.files.len(), usize::from(nr_bad > 0));
        assert_eq!(report.devices.len(), if options.devices.is_empty() { 2 } else { 1 });
    }
    let unknown = ScrubOptions { devices: vec![9], ..ScrubOptions::default() };
    assert_eq!(fs.scrub(&unknown, &Job::new()).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    fs.close().unwrap();
    if capability::kernel_oracle() {
        btrfs_check_array(&[images.path("a"), images.path("b")]).unwrap();
    }
}

#[test]
fn sizes_labels_quotas_and_extents_are_those_of_linux() {
    let images = Images::new();
    let image = images.path("a");
    let fs = Filesystem::make_image(&image, 1 << 30).unwrap();
    fs.set_label("by the library").unwrap();
    assert!(fs.set_label(vec![b'x'; 256]).is_err());
    fs.create_subvolume("/home").unwrap();
    fs.set_default_subvolume("/home").unwrap();
    fs.set_default_subvolume("/").unwrap();
    fs.make_node("/home/null", 0o020_666, (1, 3)).unwrap();
    fs.make_node("/home/pipe", 0o010_640, (0, 0)).unwrap();
    assert!(fs.make_node("/home/dir", 0o040_755, (0, 0)).is_err());
    let content = Rng::new(3).bytes(6 << 20);
    fs.write("/home/a", &content).unwrap();
    fs.write("/home/b", &content).unwrap();
    let (a, b) = (fs.open("/home/a").unwrap(), fs.open("/home/b").unwrap());
    assert!(b.dedupe_range(0, &a, 0, 6 << 20, &Job::new()).unwrap());
    let c = fs.create("/home/c").unwrap();
    c.clone_range(0, &a, 1 << 20, 0).unwrap();
    assert!(fs.read("/home/c").unwrap() == content[1 << 20..]);
    assert!(fs.defragment("/home/c", &Defragment { unshare: true, ..Defragment::default() }, &Job::new()).is_ok());
    assert!(fs.trim(0, &Job::new()).unwrap() > 0);
    fs.enable_quotas(QuotaKind::Full).unwrap();
    fs.wait_for_quotas(&Job::new()).unwrap();
    let home = QgroupId::new(0, fs.subvolume("/home").unwrap().id()).unwrap();
    let group = QgroupId::new(1, 7).unwrap();
    fs.create_qgroup(group).unwrap();
    if fs.assign_qgroup(home, group).unwrap() {
        fs.engine().start_quota_rescan().unwrap();
        fs.wait_for_quotas(&Job::new()).unwrap();
    }
    fs.limit_qgroup(home, Some(64 << 20), None).unwrap();
    let summary = fs.qgroups().unwrap().into_iter().find(|summary| summary.id == home).unwrap();
    assert_eq!((summary.parents, summary.max_referenced), (vec![group], Some(64 << 20)));
    assert!(summary.referenced >= 6 << 20);
    drop((a, b, c));
    assert!(fs.write("/home/too-large", vec![1; 80 << 20]).is_err());
    let least = fs.min_device_size(1).unwrap();
    fs.resize_device(1, least.max(600 << 20), &Job::new()).unwrap();
    assert!(fs.resize_device(1, 4 << 30, &Job::new()).is_err());
    fs.close().unwrap();
    second_opinion(&image).unwrap();
    if capability::kernel_oracle() {
        judge(&image, "", &[]).unwrap();
    }
}

#[test]
fn another_thread_watches_pauses_and_cancels_a_balance() {
    let images = Images::new();
    let image = images.path("a");
    let fs = Filesystem::make_image(&image, 2 << 30).unwrap();
    for nr in 0..40 {
        fs.write(format!("/f{nr}"), Rng::new(nr).bytes(8 << 20)).unwrap();
    }
    fs.sync().unwrap();
    let everything = BalanceOptions::everything();
    let job = Job::new();
    std::thread::scope(|scope| {
        let balance = scope.spawn(|| fs.balance(&everything, &job));
        while fs.balance_status().is_none() && !balance.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let paused = fs.pause_balance();
        let done = balance.join().unwrap();
        // It may have ended before the pause.
        assert_eq!(paused.is_ok(), done.is_err(), "{paused:?} {done:?}");
    });
    match fs.balance_status() {
        Some(status) => {
            assert!(!status.is_running);
            let job = Job::new();
            job.cancel();
            assert!(fs.resume_balance(&job).is_err());
            let _ended = fs.cancel_balance();
        }
        None => assert!(fs.cancel_balance().is_err()),
    }
    assert_eq!(fs.balance_status(), None);
    fs.close().unwrap();
    second_opinion(&image).unwrap();
    if capability::kernel_oracle() {
        judge(&image, "", &[]).unwrap();
    }
}
