//! Tests simple quotas: compares the groups' numbers with a count by `ubtrfs check`, and with the numbers that Linux
//! shows.
//!
//! Method: the engine makes the random changes of `quota_rounds`, with relocations and remounts. After each round,
//! `ubtrfs check` computes the numbers of all groups of all levels from the owners of the extents. Linux must show the
//! same numbers. Between the turns of the engine, Linux changes the filesystem too. At the end Linux deletes
//! everything, and the numbers must be those of an empty filesystem. `btrfs check` 6.2 does not open a filesystem with
//! simple quotas. `UBTRFS_SEED` repeats a failure.

use std::path::Path;

use crate::quota_rounds::{ROOT, Rounds, TOP, numbers, numbers_shown, open, settle, write};
use ubtrfs_fs::{Fs, Job, NewInode, QgroupId, QuotaKind};
use ubtrfs_testkit::{Image, LoopMount, Rng, capability, run, second_opinion};

fn referenced(fs: &Fs, id: QgroupId) -> Option<u64> {
    fs.sync().unwrap();
    fs.qgroups().unwrap().iter().find(|group| group.id == id).map(|group| group.referenced)
}

/// Enables simple quotas by an ioctl of Linux, because btrfs-progs 6.2 cannot enable them.
fn enable_in_linux(mount: &LoopMount) {
    let script = "import fcntl, os, struct, sys
fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0xC0109428, struct.pack('QQ', 4, 0))";
    run("python3", ["-c", script, &mount.path().to_string_lossy()]).unwrap();
}

fn of(number: u64) -> QgroupId {
    QgroupId::new(0, number).unwrap()
}

#[test]
fn an_extent_is_charged_to_the_subvolume_that_allocated_it() {
    if !capability::kernel_oracle() {
        return;
    }
    const NODE: u64 = 4096;
    let image = Image::kernel_made(1 << 30, &["-n", "4096"]).unwrap();
    let fs = open(&image, "");
    let a = fs.create_subvolume(TOP, b"a", &ROOT).unwrap();
    write(&fs, a, "old", 0, &Rng::new(1).bytes(200 << 10));
    fs.sync().unwrap();
    fs.enable_quotas(QuotaKind::Simple).unwrap();
    let status = fs.quota_status().unwrap();
    assert!(status.simple && status.consistent && status.rescan.is_none(), "{status:?}");
    assert_eq!(fs.start_quota_rescan().unwrap_err().errno(), 22);
    assert_eq!(referenced(&fs, of(256)), Some(0), "what exists already is not counted");
    write(&fs, a, "new", 0, &Rng::new(2).bytes(400 << 10));
    assert_eq!(referenced(&fs, of(256)), Some((400 << 10) + NODE));
    // A snapshot is charged for its root node, a clone is not charged, and a write is charged to the subvolume that is
    // written to.
    let s = fs.snapshot(a.root, TOP, b"s", false).unwrap();
    assert_eq!((referenced(&fs, of(256)), referenced(&fs, of(257))), (Some((400 << 10) + NODE), Some(NODE)));
    write(&fs, s, "new", 0, &Rng::new(3).bytes(100 << 10));
    let from = fs.lookup(a, b"new").unwrap().id;
    write(&fs, TOP, "clone", 0, b"x");
    fs.clone_range(from, 0, fs.lookup(TOP, b"clone").unwrap().id, 0, 400 << 10).unwrap();
    assert_eq!(referenced(&fs, of(257)), Some((100 << 10) + NODE));
    assert_eq!(referenced(&fs, of(5)), Some(NODE));
    // A clone counts towards no limit of its subvolume's groups either.
    fs.limit_qgroup(of(257), Some(Some(300 << 10)), None).unwrap();
    let clone = fs.create(s, b"clone", NewInode::file(0o644), &ROOT).unwrap().id;
    fs.clone_range(from, 0, clone, 0, 400 << 10).unwrap();
    let mut written = 0;
    let refused = loop {
        match fs.write(clone, written, &[4; 400 << 10][written as usize..]) {
            Ok(more) => written += more as u64,
            Err(error) => break error,
        }
    };
    assert!(refused.errno() == 122 && written <= 200 << 10, "EDQUOT after {written} bytes: {refused}");
    fs.unlink(s, b"clone").unwrap();
    fs.limit_qgroup(of(257), Some(None), None).unwrap();
    assert_eq!(referenced(&fs, of(257)), Some((100 << 10) + NODE));
    second_opinion(image.path()).unwrap();
    // The quota group of a deleted subvolume stays as long as extents that the subvolume allocated are in use.
    fs.delete_subvolume(TOP, b"a", None).unwrap();
    settle(&fs);
    assert_eq!(referenced(&fs, of(256)), Some(400 << 10));
    assert_eq!(fs.destroy_qgroup(of(256)).unwrap_err().errno(), 16);
    assert_eq!(fs.clear_stale_qgroups().unwrap(), 0);
    second_opinion(image.path()).unwrap();
    fs.close().unwrap();
    drop(fs);
    // Linux shows the same numbers, and keeps them right when Linux changes the filesystem.
    let mount = LoopMount::new(image.path(), "").unwrap();
    let shown = numbers_shown(&mount);
    assert_eq!((shown["0/256"].0, shown["0/257"].0), (400 << 10, (100 << 10) + NODE));
    run("bash", ["-ec", &format!("cd {} && rm clone s/new && sync", mount.path().display())]).unwrap();
    assert_eq!(numbers_shown(&mount)["0/256"].0, 0);
    assert!(mount.kernel_complaints().is_empty(), "{:?}", mount.kernel_complaints());
    mount.close().unwrap();
    second_opinion(image.path()).unwrap();
    let fs = open(&image, "");
    assert_eq!(fs.clear_stale_qgroups().unwrap(), 1);
    // When simple quotas are enabled again, existing extents are not counted.
    fs.disable_quotas().unwrap();
    write(&fs, s, "between", 0, &[1; 50_000]);
    fs.sync().unwrap();
    second_opinion(image.path()).unwrap();
    fs.enable_quotas(QuotaKind::Simple).unwrap();
    assert_eq!(referenced(&fs, of(257)), Some(0));
    fs.unlink(s, b"between").unwrap();
    assert_eq!(referenced(&fs, of(257)), Some(NODE));
    second_opinion(image.path()).unwrap();
    fs.close().unwrap();
}

#[test]
fn quotas_of_the_other_kind_are_refused_until_quotas_are_disabled() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(512 << 20, &[]).unwrap();
    let fs = open(&image, "");
    for (enabled, other) in [(QuotaKind::Full, QuotaKind::Simple), (QuotaKind::Simple, QuotaKind::Full)] {
        fs.enable_quotas(enabled).unwrap();
        fs.enable_quotas(enabled).unwrap();
        let refused = fs.enable_quotas(other).unwrap_err();
        assert!(refused.to_string().contains("enabled already"), "{refused}");
        assert_eq!(fs.quota_status().unwrap().simple, enabled == QuotaKind::Simple);
        settle(&fs);
        fs.disable_quotas().unwrap();
    }
    fs.close().unwrap();
    drop(fs);
    second_opinion(image.path()).unwrap();
}

#[test]
fn nested_subvolumes_join_the_groups_of_their_holder() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let fs = open(&image, "");
    let (one, two) = (QgroupId::new(1, 1).unwrap(), QgroupId::new(1, 2).unwrap());
    let p = fs.create_subvolume(TOP, b"p", &ROOT).unwrap();
    fs.enable_quotas(QuotaKind::Simple).unwrap();
    fs.create_qgroup(one).unwrap();
    fs.create_qgroup(two).unwrap();
    write(&fs, p, "f", 0, &Rng::new(1).bytes(300 << 10));
    fs.sync().unwrap();
    assert!(!fs.assign_qgroup(QgroupId::of_subvolume(p.root), one).unwrap());
    assert_eq!(referenced(&fs, one), Some((300 << 10) + 16384));
    let nested = fs.create_subvolume(p, b"nested", &ROOT).unwrap();
    let named = fs.create_subvolume_in(p, b"named", &ROOT, &[two]).unwrap();
    let outside = fs.snapshot(p.root, TOP, b"outside", false).unwrap();
    let parents = |root: ubtrfs_format::RootId| {
        let groups = fs.qgroups().unwrap();
        groups.iter().find(|group| group.id == QgroupId::of_subvolume(root)).unwrap().parents.clone()
    };
    assert_eq!((parents(nested.root), parents(named.root), parents(outside.root)), (vec![one], vec![two], vec![]));
    // A limit of group `one` applies to the sum of all subvolumes in the group.
    fs.limit_qgroup(one, Some(Some(2 << 20)), None).unwrap();
    let (mut at, file) = (0, {
        write(&fs, nested, "f", 0, b"x");
        fs.lookup(nested, b"f").unwrap().id
    });
    let errno = loop {
        match fs.write(file, at, &vec![7; 64 << 10]) {
            Ok(written) => at += written as u64,
            Err(error) => break error.errno(),
        }
    };
    assert_eq!(errno, 122);
    assert!(referenced(&fs, one).unwrap() <= 2 << 20);
    fs.unlink(nested, b"f").unwrap();
    // When a subvolume leaves a group, its charged bytes are subtracted from the group's numbers.
    assert!(!fs.remove_qgroup(QgroupId::of_subvolume(p.root), one).unwrap());
    assert_eq!(referenced(&fs, one), referenced(&fs, QgroupId::of_subvolume(nested.root)));
    second_opinion(image.path()).unwrap();
    fs.close().unwrap();
}

/// Makes Linux delete all subvolumes, and checks that only the nodes of the top level stay charged.
fn empty_by_linux(image: &Path, rounds: &Rounds) {
    let mount = LoopMount::new(image, "").unwrap();
    let names = rounds.names.join(" ");
    let script = format!(
        "cd {} && btrfs -q subvolume delete {names} && sync && btrfs subvolume sync -s 1 . && sync",
        mount.path().display()
    );
    run("bash", ["-ec", &script]).unwrap();
    let shown = numbers_shown(&mount);
    assert!(shown.iter().all(|(id, (bytes, _))| *bytes <= if id == "0/5" { 16384 } else { 0 }), "{shown:?}");
    let complaints = mount.kernel_complaints();
    assert!(complaints.is_empty(), "{complaints:?}");
    mount.close().unwrap();
    second_opinion(image).unwrap();
}

fn turn_of_linux(mount: &LoopMount, rounds: &mut Rounds, turn: usize) {
    let mut script = String::new();
    for number in 0..4 {
        let name = rounds.names[rounds.rng.index(rounds.names.len())].clone();
        let file = rounds.rng.below(60);
        script += &match rounds.rng.below(6) {
            4 => "btrfs balance start -dusage=50 -musage=50 . > /dev/null\n".to_owned(),
            kind => rounds.command_of_linux(kind, &name, file, format!("l{turn}-{number}")),
        };
    }
    script += "sync; btrfs subvolume sync -s 1 . > /dev/null; sync\n";
    run("bash", ["-ec", &format!("cd {} && {script}", mount.path().display())]).unwrap();
}

/// Lets the engine and Linux change the filesystem at random in turns. The engine and Linux also relocate block groups.
fn random_turns(seed: u64, image: &Image, nr_turns: usize, names: &[&str]) {
    eprintln!("UBTRFS_SEED={seed}");
    let names = names.iter().map(|name| (*name).to_owned()).collect();
    let mut rounds = Rounds { rng: Rng::new(seed), names, next: 0 };
    for turn in 0..nr_turns {
        let fs = open(image, "");
        if turn == 0 && fs.lookup(TOP, b"a").is_err() {
            fs.create_subvolume(TOP, b"a", &ROOT).unwrap();
            (0..10).for_each(|_| rounds.step(&fs));
            fs.enable_quotas(QuotaKind::Simple).unwrap();
            let (one, two) = (QgroupId::new(1, 1).unwrap(), QgroupId::new(2, 1).unwrap());
            fs.create_qgroup(one).unwrap();
            fs.create_qgroup(two).unwrap();
            fs.assign_qgroup(of(256), one).unwrap();
            fs.assign_qgroup(one, two).unwrap();
        }
        for _ in 0..3 {
            (0..1 + rounds.rng.below(12)).for_each(|_| rounds.step(&fs));
            if rounds.rng.one_in(3) {
                let groups = fs.block_groups();
                let start = groups[rounds.rng.index(groups.len())].start;
                // A block group cannot be moved if there is no room elsewhere.
                let _ = fs.relocate_block_group(start, &Job::new());
            }
            settle(&fs);
            second_opinion(image.path()).unwrap_or_else(|error| panic!("UBTRFS_SEED={seed} our turn {turn}: {error}"));
        }
        let ours = numbers(&fs);
        fs.close().unwrap();
        drop(fs);
        let mount = LoopMount::new(image.path(), "").unwrap();
        assert_eq!(ours, numbers_shown(&mount), "UBTRFS_SEED={seed} turn {turn}");
        turn_of_linux(&mount, &mut rounds, turn);
        let complaints = mount.kernel_complaints();
        assert!(complaints.is_empty(), "{complaints:?}");
        mount.close().unwrap();
        second_opinion(image.path()).unwrap_or_else(|error| panic!("UBTRFS_SEED={seed} Linux's turn {turn}: {error}"));
    }
    empty_by_linux(image.path(), &rounds);
}

#[test]
fn linux_and_ubtrfs_take_turns_with_simple_quotas() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &["-n", "4096"]).unwrap();
    random_turns(Rng::seed_or(6), &image, 6, &["a"]);
}

#[test]
fn simple_quotas_of_linux_stay_exact_under_our_writes() {
    if !capability::kernel_oracle() {
        return;
    }
    let image = Image::kernel_made(1 << 30, &["-n", "4096"]).unwrap();
    let mount = LoopMount::new(image.path(), "").unwrap();
    let before =
        "btrfs -q subvolume create a; for f in $(seq 60); do head -c $((f * 2000)) /dev/urandom > a/f$f; done; sync";
    let after = "btrfs -q subvolume create b; for f in $(seq 60); do head -c $((f * 2000)) /dev/urandom > a/g$f; done
        btrfs -q subvolume snapshot a old; cp --reflink=always a/g60 old/copy; sync";
    let at = mount.path().display().to_string();
    run("bash", ["-ec", &format!("cd {at} && {before}")]).unwrap();
    enable_in_linux(&mount);
    run("bash", ["-ec", &format!("cd {at} && {after}")]).unwrap();
    mount.close().unwrap();
    random_turns(Rng::seed_or(7), &image, 4, &["a", "b", "old"]);
}
