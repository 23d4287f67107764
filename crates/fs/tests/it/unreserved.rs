//! Writes into preallocated extents of a full filesystem have no space of their own. They must reach the disk whatever
//! happens to the extents.

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_fs::{Caller, Defragment, FallocateMode, Fs, InodeId, Job, MountOptions, NewInode, QgroupId, QuotaKind};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{Medium, MediumDevice, check_medium};

const SECTOR: usize = 4096;
const MIB: u64 = 1 << 20;
/// The place of a write that needs space, and has it.
const RESERVED: u64 = 8 * MIB;

struct Full {
    device: Arc<MediumDevice>,
    fs: Arc<Fs>,
    file: InodeId,
}

impl Full {
    /// A full filesystem with a preallocated file, whose first sectors are dirty.
    fn new(options: &str, has_reserved: bool) -> Self {
        let mkfs = MkfsOptions::default();
        let device = Arc::new(MediumDevice::new(Medium::formatted(256 * MIB, &mkfs).unwrap()));
        let options = MountOptions::parse(options).unwrap();
        let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], options).unwrap();
        let new = |name: &[u8]| fs.create(fs.root(), name, NewInode::file(0o600), &Caller::ROOT).unwrap().id;
        let (file, filler) = (new(b"file"), new(b"filler"));
        new(b"clone");
        fs.write(new(b"spare"), 0, &[1; 8 * SECTOR]).unwrap();
        fs.fallocate(file, 0, MIB, FallocateMode::empty()).unwrap();
        for nr in 0..64 {
            fs.write(file, 2 * MIB + (nr ^ 1) * SECTOR as u64, &[1; SECTOR]).unwrap();
            fs.flush_data().unwrap();
        }
        fs.sync().unwrap();
        for len in [MIB as usize, 16 * SECTOR, SECTOR] {
            while let Ok(written) = fs.write(filler, fs.getattr(filler).unwrap().size, &vec![7; len]) {
                assert!(written > 0);
            }
            fs.sync().unwrap();
        }
        // Room for the sectors that a clone may have to copy, but not for the write.
        fs.unlink(fs.root(), b"spare").unwrap();
        fs.sync().unwrap();
        let bsize = fs.statfs().unwrap();
        assert!(bsize.bavail < 32, "{bsize:?}");
        if has_reserved {
            fs.write(file, RESERVED, &[4; 2 * SECTOR]).unwrap();
        }
        fs.write(file, 0, &[3; 64 * SECTOR]).unwrap();
        Self { device, fs, file }
    }

    /// Takes all space that is still free.
    fn take_all(&self) {
        let id = self.fs.create(self.fs.root(), b"all", NewInode::file(0o600), &Caller::ROOT).unwrap().id;
        let mut at = 0;
        while self.fs.write(id, at, &[9; SECTOR]).is_ok() {
            at += SECTOR as u64;
        }
        drop(self.fs.fsync(id, false));
    }

    fn check_reserved(self) {
        self.take_all();
        self.fs.fsync(self.file, false).unwrap();
        assert!(self.fs.read(self.file, RESERVED, 2 * SECTOR).unwrap() == [4; 2 * SECTOR]);
        self.fs.close().unwrap();
        check_medium(&self.device.content()).unwrap();
    }

    fn check(self) {
        self.fs.fsync(self.file, false).unwrap();
        assert!(self.fs.read(self.file, 0, 64 * SECTOR).unwrap() == [3; 64 * SECTOR]);
        self.fs.close().unwrap();
        check_medium(&self.device.content()).unwrap();
        let device = Arc::new(MediumDevice::new(self.device.content()));
        let fs = Fs::open(vec![device], MountOptions::default()).unwrap();
        assert!(fs.read(self.file, 0, 64 * SECTOR).unwrap() == [3; 64 * SECTOR]);
        fs.close().unwrap();
    }
}

#[test]
fn another_part_of_the_extent_is_cloned() {
    for options in ["defaults", "nodatacow"] {
        let full = Full::new(options, false);
        let clone = full.fs.lookup(full.fs.root(), b"clone").unwrap().id;
        full.fs.clone_range(full.file, MIB / 2, clone, 0, 4 * SECTOR as u64).unwrap();
        full.check();
    }
}

/// A defragmentation writes to new extents, but there is no room for them.
#[test]
fn the_file_is_defragmented() {
    for options in ["defaults", "nodatacow"] {
        let full = Full::new(options, false);
        let how = Defragment { range: 2 * MIB..4 * MIB, ..Defragment::default() };
        drop(full.fs.defragment(full.file, &how, &Job::new()));
        full.check();
    }
}

#[test]
fn the_extent_is_moved() {
    for options in ["defaults", "nodatacow"] {
        let full = Full::new(options, false);
        full.fs.unlink(full.fs.root(), b"filler").unwrap();
        let at = full.fs.extents(full.file).unwrap()[0].disk_bytenr;
        let groups = full.fs.block_groups();
        let group = groups.iter().rfind(|group| group.start <= at).unwrap();
        let job = Job::new();
        std::thread::scope(|scope| {
            // The job has a total when the block group takes no writes any more.
            let is_closed = || job.progress().total > 0;
            let moving = scope.spawn(|| full.fs.relocate_block_group(group.start, &job));
            while !is_closed() && !moving.is_finished() {
                std::thread::yield_now();
            }
            full.fs.fsync(full.file, false).unwrap();
            moving.join().unwrap().unwrap();
        });
        full.check();
    }
}

/// A move of blocks that a snapshot shares makes all extents of the subvolume count as shared. Writes at a limit of a
/// quota group have no space of their own either.
#[test]
fn blocks_that_a_snapshot_shares_are_moved() {
    const LEN: u64 = 64 * SECTOR as u64;
    #[cfg(debug_assertions)]
    ubtrfs_transaction::delay_races(std::time::Duration::from_millis(4));
    for options in ["defaults", "nodatacow"] {
        let mkfs = MkfsOptions { nodesize: 4096, ..MkfsOptions::default() };
        let device = Arc::new(MediumDevice::new(Medium::formatted(1 << 30, &mkfs).unwrap()));
        let options = MountOptions::parse(options).unwrap();
        let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], options).unwrap();
        let root = fs.root();
        let new = |name: &str| fs.create(root, name.as_bytes(), NewInode::file(0o600), &Caller::ROOT).unwrap().id;
        for nr in 0..500 {
            new(&format!("old-{nr}"));
        }
        fs.snapshot(root.root, root, b"snapshot", true).unwrap();
        fs.enable_quotas(QuotaKind::Full).unwrap();
        fs.wait_for_quota_rescan(&Job::new()).unwrap();
        let qgroup = QgroupId(root.root.0);
        let mut nr_accepted = 0;
        for nr in 0..24 {
            fs.limit_qgroup(qgroup, None, Some(None)).unwrap();
            let file = new(&nr.to_string());
            fs.fallocate(file, 0, LEN, FallocateMode::empty()).unwrap();
            fs.sync().unwrap();
            let used = fs.qgroups().unwrap().iter().find(|group| group.id == qgroup).unwrap().exclusive;
            fs.limit_qgroup(qgroup, None, Some(Some(used + LEN / 2))).unwrap();
            let groups = fs.block_groups();
            let group = groups.iter().find(|group| group.flags.contains(BlockGroupFlags::METADATA)).unwrap();
            let job = Job::new();
            let is_accepted = std::thread::scope(|scope| {
                let moving = scope.spawn(|| fs.relocate_block_group(group.start, &job));
                // The job has a total when the block group takes no blocks any more.
                while job.progress().total == 0 && !moving.is_finished() {
                    std::hint::spin_loop();
                }
                let is_accepted = fs.write(file, 0, &[3; LEN as usize]).is_ok_and(|written| written == LEN as usize);
                moving.join().unwrap().unwrap();
                is_accepted
            });
            nr_accepted += u64::from(is_accepted);
            fs.fsync(file, false).unwrap();
            assert!(!is_accepted || fs.read(file, 0, LEN as usize).unwrap() == [3; LEN as usize]);
        }
        println!("{nr_accepted} writes were accepted");
        assert!(nr_accepted > 0);
        fs.close().unwrap();
        check_medium(&device.content()).unwrap();
    }
}

/// A hole that drops data without a reservation leaves the reservation of other data.
#[test]
fn a_hole_is_punched_beside_data_with_a_reservation() {
    let full = Full::new("defaults", true);
    let mode = FallocateMode::PUNCH_HOLE | FallocateMode::KEEP_SIZE;
    full.fs.fallocate(full.file, 0, 64 * SECTOR as u64, mode).unwrap();
    full.check_reserved();
}

/// The data without a reservation is written first.
#[test]
fn a_part_is_written_back_beside_data_with_a_reservation() {
    let full = Full::new("defaults", true);
    let clone = full.fs.lookup(full.fs.root(), b"clone").unwrap().id;
    drop(full.fs.clone_range(full.file, 0, clone, 0, 4 * SECTOR as u64));
    full.check_reserved();
}
