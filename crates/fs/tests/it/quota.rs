//! Quotas: compares the numbers after each commit with the counts of btrfs-progs and of Linux's rescan.
//!
//! Method: random writes, overwrites of shared data, reflinks, snapshots into groups, deletions and remounts. After
//! each round `btrfs check --qgroup-report` counts every group of every level independently; at the end Linux rescans.
//! `UBTRFS_SEED` repeats a failure.

use std::path::Path;
use std::sync::Arc;

use crate::quota_rounds::{Numbers, ROOT, Rounds, TOP, numbers, numbers_shown, open, settle, write};
use ubtrfs_device::Device;
use ubtrfs_format::item::Compression;
use ubtrfs_fs::{
    CompressSpec, Defragment, FallocateMode, Fs, InodeId, Job, MountOptions, NewInode, QgroupId, QuotaKind,
    RenameFlags, SetAttr, XattrFlags,
};
use ubtrfs_testkit::{
    Compare, Image, LoopMount, Medium, MediumDevice, Rng, btrfs_check, capability, check_medium, check_quotas,
    compare_entries, random_balance, run, second_opinion, walk_fs, walk_path,
};

/// Fails unless the numbers on disk are those that btrfs-progs counts.
fn judge_numbers(image: &Path, what: &str) {
    check_quotas(image).unwrap_or_else(|error| panic!("{what}: {error:#}"));
}

/// The numbers that Linux shows, before and after its rescan.
fn numbers_of_linux(image: &Path) -> (Numbers, Numbers) {
    let mount = LoopMount::new(image, "").unwrap();
    let before = numbers_shown(&mount);
    run("btrfs", ["quota", "rescan", "-w", &mount.path().to_string_lossy()]).unwrap();
    let after = numbers_shown(&mount);
    let complaints = mount.kernel_complaints();
    assert!(complaints.is_empty(), "{complaints:?}");
    mount.close().unwrap();
    (before, after)
}

#[test]
fn enabled_quotas_count_old_and_new_data() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(512 << 20, &["-n", "4096"]).unwrap();
    let fs = open(&image, "");
    let a = fs.create_subvolume(TOP, b"a", &ROOT).unwrap();
    for number in 0..300 {
        write(&fs, a, &format!("f{number}"), 0, &vec![7; 100 * number]);
    }
    fs.snapshot(a.root, TOP, b"s", false).unwrap();
    assert!(fs.quota_status().is_none() && fs.qgroups().is_err());
    fs.enable_quotas(QuotaKind::Full).unwrap();
    settle(&fs);
    let status = fs.quota_status().unwrap();
    assert!(status.consistent && status.rescan.is_none());
    judge_numbers(image.path(), "after the first rescan");
    write(&fs, a, "f299", 0, &[1; 5000]);
    write(&fs, a, "new", 0, &[1; 50000]);
    fs.sync().unwrap();
    judge_numbers(image.path(), "after writes");
    fs.snapshot(a.root, TOP, b"t", false).unwrap();
    judge_numbers(image.path(), "after a snapshot");
    fs.delete_subvolume(TOP, b"s", None).unwrap();
    settle(&fs);
    judge_numbers(image.path(), "after a deletion");
    assert!(!fs.qgroups().unwrap().iter().any(|group| group.id == QgroupId(257)), "its group went with it");
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
    let (ours, theirs) = numbers_of_linux(image.path());
    assert_eq!(ours, theirs);
    let fs = open(&image, "");
    assert!(fs.quota_status().unwrap().consistent);
    fs.disable_quotas().unwrap();
    assert!(fs.quota_status().is_none());
    fs.enable_quotas(QuotaKind::Full).unwrap();
    settle(&fs);
    judge_numbers(image.path(), "enabled again");
    fs.disable_quotas().unwrap();
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
}

fn random_rounds(seed: u64, image: &Image, nr_rounds: usize, with_groups: bool) {
    eprintln!("UBTRFS_SEED={seed}");
    let mut rounds = Rounds { rng: Rng::new(seed), names: vec!["a".to_owned()], next: 0 };
    let mut fs = open(image, "");
    if fs.lookup(TOP, b"a").is_err() {
        fs.create_subvolume(TOP, b"a", &ROOT).unwrap();
    }
    if fs.quota_status().is_none() {
        fs.enable_quotas(QuotaKind::Full).unwrap();
    }
    if with_groups {
        let id = |level, number| QgroupId::new(level, number).unwrap();
        for group in [id(1, 1), id(1, 2), id(2, 1)] {
            fs.create_qgroup(group).unwrap();
        }
        fs.assign_qgroup(id(1, 1), id(2, 1)).unwrap();
        let a = fs.lookup(TOP, b"a").unwrap().id.root;
        if fs.assign_qgroup(QgroupId::of_subvolume(a), id(1, 1)).unwrap() && fs.quota_status().unwrap().rescan.is_none()
        {
            fs.start_quota_rescan().unwrap();
        }
    }
    for round in 0..nr_rounds {
        for _ in 0..1 + rounds.rng.below(12) {
            rounds.step(&fs);
        }
        settle(&fs);
        judge_numbers(image.path(), &format!("UBTRFS_SEED={seed} round {round}"));
        if rounds.rng.below(8) == 0 {
            fs.close().unwrap();
            drop(fs);
            fs = open(image, "");
        }
    }
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
    let (ours, theirs) = numbers_of_linux(image.path());
    assert_eq!(ours, theirs, "UBTRFS_SEED={seed}");
}

#[test]
fn numbers_after_each_commit_equal_a_count() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &["-n", "4096"]).unwrap();
    random_rounds(Rng::seed_or(1), &image, 25, false);
}

#[test]
fn numbers_of_higher_groups_equal_a_count() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &["-n", "4096"]).unwrap();
    random_rounds(Rng::seed_or(2), &image, 25, true);
}

#[test]
fn quotas_of_linux_stay_consistent_under_our_writes() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    let script = "btrfs -q subvolume create a; for f in $(seq 60); do head -c $((f * 2000)) /dev/urandom > a/f$f; done
        btrfs -q subvolume snapshot a old; cp --reflink=always a/f60 old/copy; sync";
    run("bash", ["-ec", &format!("cd {} && {script}", mount.path().display())]).unwrap();
    mount.enable_quota().unwrap();
    mount.close().unwrap();
    random_rounds(Rng::seed_or(3), &image, 15, false);
}

const EDQUOT: i32 = rustix::io::Errno::DQUOT.raw_os_error();

/// The content of a file of this name: the name, repeated.
fn content_of(name: &str, at: u64, len: usize) -> Vec<u8> {
    name.bytes().cycle().skip(at as usize % name.len()).take(len).collect()
}

/// Writes to a new file until a write fails. Returns the bytes written, and the error number.
fn fill(fs: &Fs, dir: InodeId, name: &str, piece: usize, most: u64) -> (u64, i32) {
    let id = match fs.create(dir, name.as_bytes(), NewInode::file(0o644), &ROOT) {
        Ok(attr) => attr.id,
        Err(error) => return (0, error.errno()),
    };
    let mut at = 0;
    while at < most {
        match fs.write(id, at, &content_of(name, at, piece)) {
            // At the limit, only the first part of the piece is written.
            Ok(written) => at += written as u64,
            Err(error) => return (at, error.errno()),
        }
    }
    (at, 0)
}

fn group(fs: &Fs, id: QgroupId) -> (u64, u64) {
    let groups = fs.qgroups().unwrap();
    let group = groups.iter().find(|group| group.id == id).unwrap();
    (group.referenced, group.exclusive)
}

/// 100 threads try to write more than the limit of a quota group: 192 MiB, or the number of MiB in `UBTRFS_LIMIT_MIB`.
#[test]
fn many_writers_end_at_the_limit() {
    if !capability::kernel_oracle() {
        return;
    }
    let limit = std::env::var("UBTRFS_LIMIT_MIB").map_or(192_u64, |text| text.parse().unwrap()) << 20;
    let most = (limit / 64).next_multiple_of(1 << 20);
    for kind in [QuotaKind::Full, QuotaKind::Simple] {
        let image = Image::kernel_made(4 * limit + (1 << 30), &[]).unwrap();
        let fs = open(&image, "");
        let a = fs.create_subvolume(TOP, b"a", &ROOT).unwrap();
        fs.enable_quotas(kind).unwrap();
        settle(&fs);
        let id = QgroupId::of_subvolume(a.root);
        fs.limit_qgroup(id, Some(Some(limit)), None).unwrap();
        let written: Vec<(u64, i32)> = std::thread::scope(|scope| {
            let fs = &fs;
            let writers: Vec<_> =
                (0..100).map(|nr| scope.spawn(move || fill(fs, a, &format!("f{nr}"), 64 << 10, most))).collect();
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        let is_done = |(bytes, errno): &(u64, i32)| *errno == EDQUOT || *bytes >= most;
        assert!(written.iter().all(is_done) && written.iter().any(|(_, errno)| *errno == EDQUOT), "{written:?}");
        settle(&fs);
        let (referenced, _) = group(&fs, id);
        let sum: u64 = written.iter().map(|(bytes, _)| bytes).sum();
        // The limit exceeds the counted bytes by less than one reservation: a write of 64 KiB, a sector and a tree block.
        println!("{kind:?}: {sum} bytes written, {referenced} of {limit} counted");
        assert!((limit - (84 << 10)..=limit).contains(&referenced), "{referenced} of {limit}");
        fs.close().unwrap();
        drop(fs);
        judge_kind(kind, image.path(), "at the limit");
        // Everything that a write returned as written is there after a remount.
        let fs = open(&image, "");
        let mut content = vec![0; 1 << 20];
        for (nr, (bytes, _)) in written.iter().enumerate() {
            let (name, mut at) = (format!("f{nr}"), 0);
            let Ok(found) = fs.lookup(a, name.as_bytes()) else {
                assert_eq!(*bytes, 0, "{name} is lost");
                continue;
            };
            assert!(found.size >= *bytes, "{name} has {} bytes of {bytes}", found.size);
            while at < *bytes {
                let len = fs.read_into(found.id, at, &mut content).unwrap();
                assert!(content[..len] == content_of(&name, at, len), "{name} at {at}");
                at += len as u64;
            }
        }
        assert_eq!(fill(&fs, a, "more", 1 << 20, 16 << 20).1, EDQUOT);
        // Removals always work, and make room.
        for nr in 0..100 {
            let name = format!("f{nr}");
            if fs.lookup(a, name.as_bytes()).is_ok() {
                fs.unlink(a, name.as_bytes()).unwrap();
            }
        }
        assert_eq!(fill(&fs, a, "again", 1 << 20, 20 << 20), (20 << 20, 0));
        // Other subvolumes are not limited.
        let b = fs.create_subvolume(TOP, b"b", &ROOT).unwrap();
        assert_eq!(fill(&fs, b, "f", 1 << 20, 60 << 20), (60 << 20, 0));
        settle(&fs);
        fs.close().unwrap();
        drop(fs);
        judge_kind(kind, image.path(), "after removals");
    }
}

/// The extent items of scattered blocks fill many tree blocks, which count too.
#[test]
fn scattered_writes_end_at_the_limit() {
    if !capability::kernel_oracle() {
        return;
    }
    const LIMIT: u64 = 48 << 20;
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let fs = open(&image, "");
    let a = fs.create_subvolume(TOP, b"a", &ROOT).unwrap();
    fs.enable_quotas(QuotaKind::Full).unwrap();
    settle(&fs);
    let id = QgroupId::of_subvolume(a.root);
    fs.limit_qgroup(id, Some(Some(LIMIT)), None).unwrap();
    let file = fs.create(a, b"f", NewInode::file(0o644), &ROOT).unwrap().id;
    let nr_written = (0..LIMIT / 4096).take_while(|nr| fs.write(file, nr * 8192, &[1; 4096]).is_ok()).count() as u64;
    assert!(nr_written < LIMIT / 4096 && nr_written * 4096 > LIMIT / 10 * 9, "{nr_written}");
    settle(&fs);
    let (referenced, _) = group(&fs, id);
    assert!((LIMIT - (128 << 10)..=LIMIT).contains(&referenced), "{referenced} of {LIMIT}");
    fs.close().unwrap();
    drop(fs);
    judge_kind(QuotaKind::Full, image.path(), "scattered");
}

/// Judges the numbers of either kind of quotas. `btrfs check` 6.2 does not open a filesystem with simple quotas.
fn judge_kind(kind: QuotaKind, image: &Path, what: &str) {
    if kind == QuotaKind::Full {
        judge_numbers(image, what);
        btrfs_check(image).unwrap();
    } else {
        second_opinion(image).unwrap_or_else(|error| panic!("{what}: {error:#}"));
    }
}

/// If a write does not fit as a whole, the largest part that fits is written, as in Linux.
#[test]
fn a_write_over_a_limit_or_the_end_of_space_is_done_in_part() {
    const PIECE: usize = 1 << 20;
    for kind in [Some(QuotaKind::Full), Some(QuotaKind::Simple), None] {
        let mkfs = ubtrfs_mkfs::MkfsOptions::default();
        let device = Arc::new(MediumDevice::new(Medium::formatted(256 << 20, &mkfs).unwrap()));
        let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::default()).unwrap();
        let a = fs.create_subvolume(TOP, b"a", &ROOT).unwrap();
        if let Some(kind) = kind {
            fs.enable_quotas(kind).unwrap();
            settle(&fs);
            fs.limit_qgroup(QgroupId::of_subvolume(a.root), Some(Some(3 << 20)), None).unwrap();
        }
        let file = fs.create(a, b"f", NewInode::file(0o644), &ROOT).unwrap().id;
        let content = Rng::new(1).bytes(PIECE);
        let (mut at, mut last, mut first_short) = (0, PIECE, None);
        let errno = loop {
            match fs.write(file, at, &content) {
                Ok(written) => {
                    (at, last) = (at + written as u64, written);
                    first_short = first_short.or((written < PIECE).then_some(at));
                }
                Err(error) => break error.errno(),
            }
        };
        assert_eq!(errno, if kind.is_some() { EDQUOT } else { 28 });
        assert!(last < PIECE, "{kind:?}: the last write is done in part");
        assert_eq!(fs.getattr(file).unwrap().size, at);
        // The room left below the limit is only the room that a write reserves in addition to its data: for metadata
        // and one more sector.
        if kind.is_some() {
            let end = first_short.unwrap();
            assert!((3 << 20) - end < 128 << 10, "{kind:?}: the first partial write ends at {end}");
        }
        fs.close().unwrap();
        drop(fs);
        let fs = Fs::open(vec![Arc::clone(&device) as Arc<dyn Device>], MountOptions::default()).unwrap();
        let mut found = vec![0; last];
        fs.read_into(file, at - last as u64, &mut found).unwrap();
        assert!(found == content[..last]);
        fs.close().unwrap();
        check_medium(&device.content()).unwrap();
    }
}

#[test]
fn preallocation_clones_and_higher_groups_obey_limits() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let fs = open(&image, "compress-force=zstd");
    let [a, b, c] = [b"a", b"b", b"c"].map(|name| fs.create_subvolume(TOP, name, &ROOT).unwrap());
    fs.enable_quotas(QuotaKind::Full).unwrap();
    settle(&fs);
    let (one, top) = (QgroupId::new(1, 1).unwrap(), QgroupId::new(2, 1).unwrap());
    fs.create_qgroup(one).unwrap();
    fs.create_qgroup(top).unwrap();
    for (member, parent) in [(QgroupId::of_subvolume(a.root), one), (QgroupId::of_subvolume(b.root), one), (one, top)] {
        assert!(!fs.assign_qgroup(member, parent).unwrap());
    }
    fs.limit_qgroup(top, Some(Some(30 << 20)), None).unwrap();
    let new = |dir, name: &str| fs.create(dir, name.as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id;
    let file = new(a, "prealloc");
    fs.fallocate(file, 0, 20 << 20, FallocateMode::empty()).unwrap();
    assert_eq!(fs.fallocate(new(b, "too much"), 0, 20 << 20, FallocateMode::empty()).unwrap_err().errno(), EDQUOT);
    // Writes into preallocated space take no data space, but above the limit there is no room for their items. Other
    // subvolumes are not limited.
    fs.sync().unwrap();
    fs.limit_qgroup(top, Some(Some(1 << 20)), None).unwrap();
    assert_eq!(fs.write(file, 0, &[1; 65536]).unwrap_err().errno(), EDQUOT);
    assert_eq!(fs.write(new(c, "free"), 0, &[1; 4096]).unwrap(), 4096);
    fs.limit_qgroup(top, Some(Some((20 << 20) + (80 << 10))), None).unwrap();
    assert_eq!(fs.write(file, 0, &[1; 65536]).unwrap(), 65536);
    fs.limit_qgroup(top, Some(Some(30 << 20)), None).unwrap();
    let source = new(c, "source");
    let mut rng = Rng::new(7);
    for piece in 0..16 {
        fs.write(source, piece << 20, &rng.bytes(1 << 20)).unwrap();
    }
    fs.sync().unwrap();
    let target = new(b, "clone");
    assert_eq!(fs.clone_range(source, 0, target, 0, 16 << 20).unwrap_err().errno(), EDQUOT);
    fs.clone_range(source, 0, target, 0, 4 << 20).unwrap();
    // Within one subvolume, a clone uses no further quota.
    fs.clone_range(target, 0, new(b, "twin"), 0, 4 << 20).unwrap();
    // Quotas count compressed data by its size on disk, so the files may have more bytes than the limit allows on disk.
    fs.unlink(a, b"prealloc").unwrap();
    let (bytes, errno) = fill(&fs, a, "zeros", 1 << 20, 100 << 20);
    assert_eq!((bytes, errno), (100 << 20, 0), "compressed data fits");
    // Now limit exclusive bytes.
    fs.limit_qgroup(top, Some(None), Some(Some(20 << 20))).unwrap();
    let mut at = 0;
    let noise = new(b, "noise");
    let errno = loop {
        match fs.write(noise, at, &rng.bytes(1 << 20)) {
            Ok(written) => at += written as u64,
            Err(error) => break error.errno(),
        }
    };
    assert_eq!(errno, EDQUOT);
    settle(&fs);
    let (_, exclusive) = group(&fs, top);
    assert!(exclusive <= 20 << 20, "{exclusive}");
    judge_numbers(image.path(), "with limits");
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
}

/// The part of a round in which Linux changes the filesystem, as a script.
fn turn_of_linux(rounds: &mut Rounds, turn: u64) -> String {
    let mut script = String::new();
    for number in 0..5 {
        let name = rounds.names[rounds.rng.index(rounds.names.len())].clone();
        let (file, group) = (rounds.rng.below(60), 1 + rounds.rng.below(3));
        let id = format!("0/$(btrfs inspect-internal rootid {name})");
        script += &match rounds.rng.below(9) {
            // If Linux deletes a group that belongs to several groups, it leaves relations of the group on disk, and
            // btrfs-progs then fails to show the groups. So first remove the group from all groups but one.
            1 => format!(
                "for g in 2 3; do btrfs qgroup remove --no-rescan {id} 1/$g . || true; done\n{}",
                rounds.command_of_linux(1, &name, file, String::new())
            ),
            4 => "btrfs balance start --full-balance . > /dev/null\n".to_owned(),
            5 => "btrfs balance start -dusage=60 -mconvert=single -sconvert=single -f . > /dev/null\n".to_owned(),
            6 => format!(
                "btrfs qgroup create 1/{group} . || true\nbtrfs qgroup assign --rescan {id} 1/{group} . || true\n"
            ),
            7 => format!("btrfs qgroup limit 8G {id} .\nbtrfs qgroup remove --rescan {id} 1/{group} . || true\n"),
            kind => rounds.command_of_linux(kind, &name, file, format!("l{turn}-{number}")),
        };
    }
    // A commit wakes the kernel's cleaner, which drops deleted subvolumes. Linux marks its numbers as inconsistent
    // after some changes of relations between quota groups, so the script ends with a rescan. While a rescan runs that
    // began before the last change, `rescan -w` only waits for it, so the script waits first.
    script
        + "sync; btrfs subvolume sync -s 1 . > /dev/null; sync; btrfs quota rescan -W . > /dev/null
        btrfs quota rescan -w . > /dev/null\n"
}

/// The part of a round in which ubtrfs changes the filesystem.
fn our_turn(fs: &Fs, rounds: &mut Rounds) {
    for _ in 0..12 {
        rounds.step(fs);
        let group = QgroupId::new(1, 1 + rounds.rng.below(3)).unwrap();
        let name = rounds.names[rounds.rng.index(rounds.names.len())].clone();
        let member = QgroupId::of_subvolume(fs.lookup(TOP, name.as_bytes()).unwrap().id.root);
        let needs_rescan = match rounds.rng.below(10) {
            0 => fs.create_qgroup(group).map(|()| false),
            1 => fs.assign_qgroup(member, group),
            2 => fs.remove_qgroup(member, group),
            3 => fs.limit_qgroup(member, Some(Some(8 << 30)), None).map(|()| false),
            4 | 5 => {
                let item = random_balance(fs, false, &mut rounds.rng);
                let report = fs.balance(item, &Job::new()).unwrap();
                assert!(report.failures.is_empty(), "{:?}", report.failures);
                Ok(false)
            }
            _ => Ok(false),
        };
        // Random changes that the existing groups do not allow fail, and are ignored.
        if needs_rescan.unwrap_or(false) {
            settle(fs);
            fs.start_quota_rescan().unwrap();
        }
    }
    settle(fs);
}

/// When Linux deletes a subvolume whose group belongs to several groups, it leaves relations of the group on disk.
#[test]
fn relations_of_deleted_groups_are_removed_and_leave_the_numbers_consistent() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(512 << 20, &["-n", "4096"]).unwrap();
    let mount = LoopMount::new(image.path(), "noatime").unwrap();
    let script = "btrfs -q subvolume create a; btrfs -q subvolume create b; head -c 100000 /dev/urandom > a/f
        btrfs -q subvolume snapshot a s; btrfs quota enable .; btrfs quota rescan -w . > /dev/null
        for group in 1/1 1/2 1/3; do btrfs qgroup create $group .; btrfs qgroup assign --no-rescan 0/256 $group .; done
        btrfs qgroup assign --no-rescan 0/257 1/1 .
        btrfs -q subvolume delete a; sync; btrfs subvolume sync -s 1 . > /dev/null; sync
        btrfs quota rescan -w . > /dev/null";
    run("bash", ["-ec", &format!("cd {} && {script}", mount.path().display())]).unwrap();
    mount.close().unwrap();
    let fs = open(&image, "noatime");
    assert!(fs.quota_status().unwrap().consistent);
    assert_eq!(fs.qgroups().unwrap().iter().find(|group| group.id.0 == 257).unwrap().parents.len(), 1);
    write(&fs, fs.lookup(TOP, b"s").unwrap().id, "new", 0, &[1; 5000]);
    fs.sync().unwrap();
    let ours = numbers(&fs);
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
    judge_numbers(image.path(), "after the relations were removed");
    let mount = LoopMount::new(image.path(), "noatime").unwrap();
    assert_eq!(ours, numbers_shown(&mount));
    mount.close().unwrap();
}

/// Linux and ubtrfs take turns to balance, to change quota groups, and to take and delete snapshots. `UBTRFS_ROUNDS` is
/// the number of rounds.
#[test]
fn linux_and_ubtrfs_take_turns() {
    if !capability::kernel_oracle() {
        return;
    }
    let seed = Rng::seed_or(4);
    eprintln!("UBTRFS_SEED={seed}");
    let nr_rounds: u64 = std::env::var("UBTRFS_ROUNDS").map_or(4, |text| text.parse().unwrap());
    let image = Image::kernel_made(2 << 30, &["-n", "4096"]).unwrap();
    let mut rounds = Rounds { rng: Rng::new(seed), names: vec!["a".to_owned()], next: 0 };
    let fs = open(&image, "noatime");
    fs.create_subvolume(TOP, b"a", &ROOT).unwrap();
    fs.enable_quotas(QuotaKind::Full).unwrap();
    settle(&fs);
    fs.close().unwrap();
    drop(fs);
    // Mount with `noatime`: otherwise reading all files would update access times, which unshares blocks.
    for turn in 0..nr_rounds {
        println!("round {turn}");
        let mount = LoopMount::new(image.path(), "noatime").unwrap();
        let script = turn_of_linux(&mut rounds, turn);
        run("bash", ["-ec", &format!("cd {} && {script}", mount.path().display())]).unwrap();
        let mut complaints = mount.kernel_complaints();
        // Linux logs this message after a change of relations between groups if it cannot compute the new numbers. The
        // message is no failure, because the script ends with a rescan.
        complaints.retain(|line| !line.contains("qgroup marked inconsistent"));
        assert!(complaints.is_empty(), "UBTRFS_SEED={seed} turn {turn}: {complaints:?}");
        // Rarely, Linux marks its numbers even after that rescan, when its cleaner comes late.
        if mount.quota_numbers().unwrap().is_some_and(|(_, is_inconsistent)| is_inconsistent) {
            mount.rescan_quotas().unwrap();
        }
        let (theirs, files) = (numbers_shown(&mount), walk_path(mount.path()).unwrap());
        mount.close().unwrap();
        judge_numbers(image.path(), &format!("UBTRFS_SEED={seed} Linux's turn {turn}"));
        let fs = open(&image, "noatime");
        let status = fs.quota_status().unwrap();
        assert!(status.consistent && status.rescan.is_none(), "{status:?}");
        assert_eq!(theirs, numbers(&fs), "UBTRFS_SEED={seed} after Linux's turn {turn}");
        compare_entries(&files, &walk_fs(&fs).unwrap(), Compare { root: false, ..Compare::ALL }).unwrap();
        our_turn(&fs, &mut rounds);
        let (ours, files) = (numbers(&fs), walk_fs(&fs).unwrap());
        fs.close().unwrap();
        drop(fs);
        judge_numbers(image.path(), &format!("UBTRFS_SEED={seed} our turn {turn}"));
        btrfs_check(image.path()).unwrap_or_else(|error| panic!("UBTRFS_SEED={seed} our turn {turn}: {error:#}"));
        let mount = LoopMount::new(image.path(), "noatime").unwrap();
        assert_eq!(ours, numbers_shown(&mount), "UBTRFS_SEED={seed} after our turn {turn}");
        assert!(mount.judge_quotas().unwrap());
        let found = walk_path(mount.path()).unwrap();
        compare_entries(&files, &found, Compare { root: false, ..Compare::ALL }).unwrap();
        mount.close().unwrap();
    }
}

#[test]
fn a_move_of_all_block_groups_changes_no_numbers() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &["-n", "4096"]).unwrap();
    let seed = Rng::seed_or(5);
    eprintln!("UBTRFS_SEED={seed}");
    let mut rounds = Rounds { rng: Rng::new(seed), names: vec!["a".to_owned()], next: 0 };
    let fs = open(&image, "");
    fs.create_subvolume(TOP, b"a", &ROOT).unwrap();
    fs.enable_quotas(QuotaKind::Full).unwrap();
    for _ in 0..3 {
        (0..40).for_each(|_| rounds.step(&fs));
        settle(&fs);
        let before = fs.qgroups().unwrap();
        for group in fs.block_groups() {
            // A block group cannot be moved if other block groups have no room.
            let _ = fs.relocate_block_group(group.start, &Job::new());
        }
        assert_eq!(fs.qgroups().unwrap(), before, "a move changes no users");
        judge_numbers(image.path(), &format!("UBTRFS_SEED={seed} after a move"));
        // Change data and metadata after the move: the moved blocks have newer generations than the snapshots that
        // share them.
        (0..20).for_each(|_| rounds.step(&fs));
        settle(&fs);
        judge_numbers(image.path(), &format!("UBTRFS_SEED={seed} after changes of what moved"));
    }
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
}

/// Writes a file of `len` random bytes in one extent.
fn one_extent(fs: &Fs, dir: InodeId, name: &str, len: usize) -> InodeId {
    let id = fs.create(dir, name.as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id;
    fs.write(id, 0, &Rng::new(9).bytes(len)).unwrap();
    fs.fsync(id, false).unwrap();
    id
}

#[test]
fn defragmentation_holes_and_truncation_obey_limits() {
    if !capability::kernel_oracle() {
        return;
    }
    const LIMIT: u64 = 3 << 20;
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let fs = open(&image, "compress-force=zstd");
    let [a, b, c] = [b"a", b"b", b"c"].map(|name| fs.create_subvolume(TOP, name, &ROOT).unwrap());
    fs.enable_quotas(QuotaKind::Full).unwrap();
    settle(&fs);
    for dir in [a, b, c] {
        fs.limit_qgroup(QgroupId::of_subvolume(dir.root), Some(Some(LIMIT)), None).unwrap();
    }
    assert_eq!(fill(&fs, a, "even", 1 << 20, 60 << 20), (60 << 20, 0));
    fs.close().unwrap();
    drop(fs);
    let fs = open(&image, "");
    let referenced = |dir: InodeId| {
        settle(&fs);
        group(&fs, QgroupId::of_subvolume(dir.root)).0
    };
    // Without compression, the file takes 60 MiB.
    let even = fs.lookup(a, b"even").unwrap().id;
    let no_compression = CompressSpec::new(Compression::None);
    let uncompress = Defragment { compress: Some(no_compression), ..Defragment::default() };
    assert_eq!(fs.defragment(even, &uncompress, &Job::new()).unwrap_err().errno(), EDQUOT);
    assert!(referenced(a) <= LIMIT, "defragmentation: {}", referenced(a));
    for at in (0..60 << 20).step_by(1 << 20) {
        assert!(fs.read(even, at, 1 << 20).unwrap() == content_of("even", at, 1 << 20), "{at}");
    }
    // A partly zeroed sector takes a new extent, and the old one stays because its other sectors are in use.
    let holes = one_extent(&fs, b, "holes", 2_800_000);
    let punch = FallocateMode::PUNCH_HOLE | FallocateMode::KEEP_SIZE;
    let refused = (1..600u64).filter(|at| at % 32 != 0).find_map(|at| {
        let punched = fs.fallocate(holes, at * 4096 + 5, 1, punch);
        punched.and_then(|()| fs.fsync(holes, false)).err()
    });
    assert_eq!(refused.map(|error| error.errno()), Some(EDQUOT));
    assert!(referenced(b) <= LIMIT, "holes: {}", referenced(b));
    fs.fallocate(holes, 4096, 8192, punch).unwrap();
    let tails = one_extent(&fs, c, "tails", 2_900_000);
    let refused = (1..600u64).find_map(|step| {
        let size = 2_900_000 - step * 4096;
        let cut = fs.setattr(tails, &SetAttr { size: Some(size), ..SetAttr::default() }, &ROOT);
        cut.and_then(|_| fs.fsync(tails, false)).err()
    });
    assert!(refused.is_none_or(|error| error.errno() == EDQUOT));
    assert!(referenced(c) <= LIMIT, "truncation: {}", referenced(c));
    // Truncation to whole sectors, truncation to 0, and removal work at any limit.
    for (dir, name, id) in [(a, "even", even), (b, "holes", holes), (c, "tails", tails)] {
        fs.limit_qgroup(QgroupId::of_subvolume(dir.root), Some(Some(4096)), None).unwrap();
        let cut = |size| fs.setattr(id, &SetAttr { size: Some(size), ..SetAttr::default() }, &ROOT);
        assert_eq!(cut(4097).unwrap_err().errno(), EDQUOT, "{name}");
        cut(8192).unwrap();
        cut(0).unwrap();
        fs.unlink(dir, name.as_bytes()).unwrap();
    }
    settle(&fs);
    judge_numbers(image.path(), "with limits");
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
}

/// Like Linux, ubtrfs refuses each of these changes at the limit. Removals work.
#[test]
fn names_attributes_and_subvolumes_obey_limits() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let fs = open(&image, "");
    let a = fs.create_subvolume(TOP, b"a", &ROOT).unwrap();
    let free = fs.create_subvolume(TOP, b"free", &ROOT).unwrap();
    fs.enable_quotas(QuotaKind::Full).unwrap();
    let new = |dir, name: &str| fs.create(dir, name.as_bytes(), NewInode::file(0o644), &ROOT).unwrap().id;
    let (file, other) = (new(a, "file"), new(a, "other"));
    fs.setxattr(file, b"user.old", b"value", XattrFlags::empty(), &ROOT).unwrap();
    fs.write(file, 0, &Rng::new(1).bytes(3 << 20)).unwrap();
    settle(&fs);
    fs.limit_qgroup(QgroupId::of_subvolume(a.root), Some(Some(1 << 20)), None).unwrap();
    let refused = |what: &str, errno: Option<i32>| assert_eq!(errno, Some(EDQUOT), "{what}");
    let errno = |error: ubtrfs_fs::Error| error.errno();
    refused("link", fs.link(file, a, b"hard").err().map(errno));
    refused("rename", fs.rename(a, b"file", a, b"renamed", RenameFlags::empty()).err().map(errno));
    refused("setxattr", fs.setxattr(other, b"user.new", b"value", XattrFlags::empty(), &ROOT).err().map(errno));
    refused("tmpfile", fs.tmpfile(a, 0o600, &ROOT).err().map(errno));
    refused("subvolume", fs.create_subvolume(a, b"in", &ROOT).err().map(errno));
    refused("snapshot", fs.snapshot(a.root, a, b"in", false).err().map(errno));
    refused("snapshot of another", fs.snapshot(free.root, a, b"in", false).err().map(errno));
    fs.removexattr(file, b"user.old", &ROOT).unwrap();
    fs.snapshot(a.root, TOP, b"elsewhere", false).unwrap();
    fs.unlink(a, b"other").unwrap();
    fs.unlink(a, b"file").unwrap();
    settle(&fs);
    fs.link(new(a, "now"), a, b"hard").unwrap();
    settle(&fs);
    judge_numbers(image.path(), "after refusals");
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
}
