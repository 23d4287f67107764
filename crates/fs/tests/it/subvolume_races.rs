//! Tests subvolumes that are snapshotted, deleted or made read-only, and filesystems that are closed, while other
//! threads work in them.
//!
//! Method: threads make, write, sync, rename and remove files in a subvolume and ignore errors. Meanwhile the subvolume
//! is snapshotted into its own directories, deleted or made read-only, or the filesystem is closed. No failure may make
//! the filesystem read-only, and both checkers must find nothing. All names in the snapshots lead to inodes, both in
//! the engine and under Linux. `UBTRFS_ROUNDS` sets the number of rounds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ubtrfs_format::{Ino, RootId};
use ubtrfs_fs::{Attr, Caller, Error, Fs, InodeId, NewInode, RenameFlags};
use ubtrfs_testkit::{
    Compare, FsTarget, Image, LoopMount, Rng, btrfs_check, capability, compare_entries, second_opinion, walk_path,
};

use crate::common::open;

const TOP: InodeId = InodeId { root: RootId::FS_TREE, ino: Ino::ROOT_DIR };

fn rounds(default: u64) -> u64 {
    std::env::var("UBTRFS_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Makes one random change in the directories `dirs`. Fails if an inode that the change needs is missing.
fn change(fs: &Fs, rng: &mut Rng, dirs: &[InodeId], number: u64) -> Result<(), Error> {
    let (dir, other) = (*rng.pick(dirs), *rng.pick(dirs));
    let name = format!("file-{}-{}", number % 500, "n".repeat(rng.index(150)));
    match rng.below(8) {
        0 => {
            fs.create(dir, format!("dir-{number}").as_bytes(), NewInode::dir(0o755), &Caller::ROOT)?;
        }
        1 => {
            let id = fs.lookup(dir, format!("kept-{}", number % 50).as_bytes())?.id;
            fs.rename(dir, format!("kept-{}", number % 50).as_bytes(), other, name.as_bytes(), RenameFlags::empty())?;
            fs.fsync(id, false)?;
        }
        2 => fs.unlink(dir, name.as_bytes())?,
        3 => {
            let id = fs.create(dir, format!("open-{number}").as_bytes(), NewInode::file(0o600), &Caller::ROOT)?.id;
            fs.open_inode(id)?;
            let done = fs.write(id, 0, &[5; 9000]).and_then(|_| fs.fsync(id, false));
            fs.release_inode(id);
            done?;
        }
        _ => {
            let name = if rng.one_in(3) { format!("kept-{}", number % 50) } else { name };
            let id = fs.create(dir, name.as_bytes(), NewInode::file(0o644), &Caller::ROOT)?.id;
            fs.write(id, 0, &vec![number as u8; rng.index(20_000)])?;
            if rng.one_in(20) {
                fs.fsync(id, false)?;
            }
        }
    }
    Ok(())
}

struct Stop<'s>(&'s AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Lets three threads change the directories `dirs` while `meanwhile` runs.
fn amid_changes(fs: &Arc<Fs>, dirs: &[InodeId], seed: u64, meanwhile: impl FnOnce(&mut Rng)) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let stop = &stop;
            scope.spawn(move || {
                let mut rng = Rng::new(seed * 16 + thread);
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    number += 3;
                    // Ignore errors: the directory may be gone.
                    drop(change(fs, &mut rng, dirs, number + thread));
                }
            });
        }
        // Stops the threads even if `meanwhile` panics.
        let _stop = Stop(&stop);
        meanwhile(&mut Rng::new(seed));
    });
}

fn subvolume_with_dirs(fs: &Fs, name: &str) -> (InodeId, Vec<InodeId>) {
    let root = fs.create_subvolume(TOP, name.as_bytes(), &Caller::ROOT).unwrap();
    let mut dirs = vec![root];
    for number in 0..6 {
        let name = format!("d{number}");
        dirs.push(fs.create(root, name.as_bytes(), NewInode::dir(0o755), &Caller::ROOT).unwrap().id);
    }
    (root, dirs)
}

#[test]
fn a_subvolume_is_deleted_amid_changes_of_it() {
    let image = Image::kernel_made(1 << 30, &["-n", "4096"]).unwrap();
    let fs = open(&image, "");
    let first = Rng::seed_or(1);
    for seed in first..first + rounds(40) {
        let name = format!("sub-{seed}");
        let (_, dirs) = subvolume_with_dirs(&fs, &name);
        amid_changes(&fs, &dirs, seed, |rng| {
            std::thread::sleep(Duration::from_millis(rng.below(30)));
            fs.delete_subvolume(TOP, name.as_bytes(), None).unwrap();
            if rng.one_in(2) {
                fs.finish_deletions(&mut |_| Ok(())).unwrap();
            } else {
                fs.sync().unwrap();
            }
            std::thread::sleep(Duration::from_millis(rng.below(10)));
        });
        assert_eq!(fs.read_only(), None, "seed {seed}");
    }
    fs.finish_deletions(&mut |_| Ok(())).unwrap();
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
    second_opinion(image.path()).unwrap();
}

#[test]
fn snapshots_go_into_their_source_amid_changes_of_it() {
    if !capability::kernel_oracle() {
        return;
    }
    let first = Rng::seed_or(1);
    for (seed, options) in
        (first..first + rounds(4)).zip(["", "nodatacow", "commit=1", "compress=zstd"].into_iter().cycle())
    {
        let image = Image::kernel_made(1 << 30, &["-n", "4096"]).unwrap();
        let fs = open(&image, options);
        let (root, dirs) = subvolume_with_dirs(&fs, "sub");
        amid_changes(&fs, &dirs, seed, |rng| {
            let mut taken: Vec<(InodeId, String)> = Vec::new();
            for number in 0..14 {
                std::thread::sleep(Duration::from_millis(rng.below(40)));
                let (dir, name) = (*rng.pick(&dirs), format!("snapshot-{number}-{}", "s".repeat(rng.index(200))));
                fs.snapshot(root.root, dir, name.as_bytes(), rng.one_in(2)).unwrap();
                taken.push((dir, name));
                if rng.one_in(4) {
                    let (dir, name) = taken.swap_remove(rng.index(taken.len()));
                    fs.delete_subvolume(dir, name.as_bytes(), None).unwrap();
                }
            }
        });
        assert_eq!(fs.read_only(), None, "seed {seed}");
        fs.close().unwrap();
        drop(fs);
        let ours = FsTarget::open(image.path(), "ro").unwrap();
        let found = ours.walk().unwrap_or_else(|error| panic!("seed {seed}: {error:#}"));
        ours.close().unwrap();
        second_opinion(image.path()).unwrap();
        btrfs_check(image.path()).unwrap_or_else(|error| panic!("seed {seed}: {error:#}"));
        let mount = LoopMount::new(image.path(), "").unwrap();
        compare_entries(&found, &walk_path(mount.path()).unwrap(), Compare::ALL).unwrap();
        mount.scrub().unwrap();
        assert!(mount.kernel_complaints().is_empty(), "{:?}", mount.kernel_complaints());
        mount.close().unwrap();
    }
}

/// Returns the names and attributes of all entries of the directories `dirs`.
fn list(fs: &Fs, dirs: &[InodeId]) -> Vec<(Vec<u8>, Attr)> {
    let mut all = Vec::new();
    for dir in dirs {
        let mut found = Vec::new();
        fs.readdir(*dir, 0, &mut |entry| {
            found.push(entry.name.to_vec());
            true
        })
        .unwrap();
        all.extend(
            found.into_iter().map(|name| (fs.lookup(*dir, &name), name)).map(|(attr, name)| (name, attr.unwrap())),
        );
    }
    // Reading a directory may change its atime, so replace each atime by the creation time before comparisons.
    all.iter_mut().for_each(|(_, attr)| attr.atime = attr.otime);
    all
}

#[test]
fn a_subvolume_that_became_read_only_is_not_changed_by_operations_that_had_begun() {
    let image = Image::kernel_made(1 << 30, &["-n", "4096"]).unwrap();
    let fs = open(&image, "");
    let seed = Rng::seed_or(1);
    let (root, dirs) = subvolume_with_dirs(&fs, "sub");
    amid_changes(&fs, &dirs, seed, |rng| {
        for round in 0..rounds(60) {
            std::thread::sleep(Duration::from_millis(rng.below(8)));
            fs.set_subvolume_read_only(root.root, true).unwrap();
            let before = list(&fs, &dirs);
            std::thread::sleep(Duration::from_millis(5));
            assert!(list(&fs, &dirs) == before, "round {round}: changed while it was read-only");
            fs.set_subvolume_read_only(root.root, false).unwrap();
        }
    });
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
    second_opinion(image.path()).unwrap();
}

#[test]
fn a_closed_filesystem_refuses_changes_and_keeps_those_that_had_begun() {
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    for seed in 0..rounds(8) {
        let fs = open(&image, "");
        let (root, dirs) = subvolume_with_dirs(&fs, &format!("sub-{seed}"));
        let mut seen = Vec::new();
        amid_changes(&fs, &dirs, seed, |rng| {
            std::thread::sleep(Duration::from_millis(rng.below(30)));
            fs.close().unwrap();
            seen = list(&fs, &dirs);
            std::thread::sleep(Duration::from_millis(5));
            assert!(list(&fs, &dirs) == seen, "seed {seed}: changed after it was closed");
        });
        let refused = [
            fs.create(root, b"late", NewInode::file(0o644), &Caller::ROOT).map(drop),
            fs.snapshot(root.root, TOP, b"late", false).map(drop),
            fs.set_subvolume_read_only(root.root, true),
            fs.set_default_subvolume(root.root),
            fs.delete_subvolume(TOP, format!("sub-{seed}").as_bytes(), None),
        ];
        assert!(refused.iter().all(|done| matches!(done, Err(Error::Closed))), "{refused:?}");
        drop(fs);
        let fs = open(&image, "");
        assert!(list(&fs, &dirs) == seen, "seed {seed}: the next session finds something else");
        fs.close().unwrap();
    }
    btrfs_check(image.path()).unwrap();
    second_opinion(image.path()).unwrap();
}

/// Begins a write and calls `meanwhile` after the checks of the write. Returns the size of the file right after
/// `meanwhile`, and after the write.
fn sizes_around(fs: &Fs, file: InodeId, meanwhile: impl FnOnce()) -> (u64, u64) {
    let begun = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let write = scope.spawn(|| {
            fs.write_with::<Error>(file, 0, 100_000, |_, bytes| {
                begun.store(true, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(100));
                bytes.fill(7);
                Ok(())
            })
        });
        while !begun.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        meanwhile();
        let at_once = fs.getattr(file).unwrap().size;
        write.join().unwrap().unwrap();
        (at_once, fs.getattr(file).unwrap().size)
    })
}

#[test]
fn a_change_that_has_begun_ends_before_its_subvolume_is_read_only_or_its_filesystem_closed() {
    let image = Image::kernel_made(1 << 30, &[]).unwrap();
    let fs = open(&image, "");
    let (root, _) = subvolume_with_dirs(&fs, "sub");
    let file = |name: &[u8]| fs.create(root, name, NewInode::file(0o644), &Caller::ROOT).unwrap().id;
    let (first, second) = (file(b"first"), file(b"second"));
    let sizes = sizes_around(&fs, first, || fs.set_subvolume_read_only(root.root, true).unwrap());
    assert_eq!(sizes, (100_000, 100_000), "read-only");
    fs.set_subvolume_read_only(root.root, false).unwrap();
    let sizes = sizes_around(&fs, second, || fs.close().unwrap());
    assert_eq!(sizes, (100_000, 100_000), "closed");
    drop(fs);
    let fs = open(&image, "");
    assert!(fs.read(second, 0, 200_000).unwrap() == [7; 100_000], "the next session");
    fs.close().unwrap();
    drop(fs);
    btrfs_check(image.path()).unwrap();
    second_opinion(image.path()).unwrap();
}
