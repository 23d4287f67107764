//! Sends chains of snapshots with random operations between them, and receives them with the engine and with Linux (see
//! `testkit::send`). Cases that once failed are separate tests.

use std::sync::Arc;

use ubtrfs_fs::{Caller, Fs, MountOptions, NewInode};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::send::{
    Change, FORMS, MutationRound, PairRound, SendRound, Sent, Tolerance, check_cloned, check_pair, check_prefixes,
    compare_extents,
};
use ubtrfs_testkit::{
    CAPABILITY, Errno, FallocateOp, Medium, MediumDevice, NodeKind, RenameOp, Rng, Target, capability,
};

#[test]
fn linux_receives_equal_trees_with_equal_sharing() {
    if !capability::kernel_oracle() {
        return;
    }
    let first = Rng::seed_or(1);
    let seeds = if std::env::var_os("UBTRFS_SEED").is_some() { first..first + 1 } else { 1..25 };
    for seed in seeds {
        SendRound { seed, operations: if seed.is_multiple_of(8) { 120 } else { 60 }, keep: None }.run().unwrap();
    }
}

#[test]
fn the_engine_receives_equal_trees_with_equal_sharing() {
    let first = Rng::seed_or(1);
    let seeds = if std::env::var_os("UBTRFS_SEED").is_some() { first..first + 1 } else { 1..41 };
    let with_linux = capability::kernel_oracle();
    for seed in seeds {
        let by_linux = with_linux && seed.is_multiple_of(20);
        PairRound { seed, operations: 60, by_linux, keep: None }.run().unwrap();
    }
}

#[test]
fn no_prefix_of_a_stream_is_received_or_leaves_anything() {
    // `UBTRFS_STEP=1` tries every prefix.
    let step = std::env::var("UBTRFS_STEP").map_or(997, |text| text.parse().unwrap());
    let nr = (1..21).map(|seed| check_prefixes(seed, step, usize::MAX).unwrap().1).sum::<usize>();
    println!("{nr} prefixes");
}

#[test]
fn changed_streams_harm_nothing() {
    for seed in 1..9 {
        let done = MutationRound { seed, nr_streams: 150 }.run().unwrap();
        assert!(done.nr_received > 0 && done.nr_failed > 0, "{done:?}");
    }
}

#[test]
fn a_subvolume_that_is_received_beside_itself_shares_its_blocks() {
    for seed in 1..16 {
        let (len_bytes, shared) = check_cloned(seed, 60).unwrap();
        println!("seed {seed}: {len_bytes} bytes, {shared} shared");
    }
}

/// Two received snapshots store the last block of equal files at two places. A third snapshot, whose stream may clone
/// from both, must share the block with one of them. Both count as sources, even the first snapshot, in which this
/// block may be unshared (`tails`).
#[test]
fn a_tail_that_may_be_unshared_is_a_source_of_later_snapshots() {
    /// Makes a file in each directory: written data, or a clone of an earlier file.
    fn filesystem(sources: [Option<usize>; 3]) -> Arc<Fs> {
        let device = MediumDevice::new(Medium::formatted(256 << 20, &MkfsOptions::default()).unwrap());
        let fs = Fs::open(vec![Arc::new(device)], MountOptions::default()).unwrap();
        let mut files = Vec::new();
        for (name, source) in NAMES.iter().zip(sources) {
            let dir = fs.create(fs.root(), name.as_bytes(), NewInode::dir(0o755), &Caller::ROOT).unwrap().id;
            let file = fs.create(dir, b"f", NewInode::file(0o644), &Caller::ROOT).unwrap().id;
            match source {
                Some(index) => fs.clone_range(files[index], 0, file, 0, 0).unwrap(),
                None => assert_eq!(fs.write(file, 0, &[7; 5000]).unwrap(), 5000),
            }
            files.push(file);
        }
        fs.sync().unwrap();
        fs
    }
    const NAMES: [&str; 3] = ["v1", "v2", "last"];
    let source = filesystem([None, Some(0), Some(0)]);
    let tolerance = |tails| Tolerance { prealloc: false, tails, ends: false };
    let sent = [
        Sent { name: NAMES[0], others: vec![], tolerance: tolerance(true) },
        Sent { name: NAMES[1], others: vec![], tolerance: tolerance(false) },
        Sent { name: NAMES[2], others: vec![NAMES[0], NAMES[1]], tolerance: tolerance(false) },
    ];
    let unshared = |target: &Fs| compare_extents(&source, target, &sent).unwrap().nr_unshared;
    for shared_with in [0, 1] {
        let target = filesystem([None, None, Some(shared_with)]);
        assert_eq!(unshared(&target), 0, "shared with {}", NAMES[shared_with]);
        target.close().unwrap();
    }
    let target = filesystem([None, None, None]);
    assert_eq!(unshared(&target), 2, "nothing is shared");
    target.close().unwrap();
    source.close().unwrap();
}

type Done = Result<(), Errno>;

/// Checks a pair of snapshots in all forms of the stream, and checks how many temporary names the increment needs.
fn check(first: Change, second: Change, nr_temporary: usize) {
    check_sessions(first, &[second], nr_temporary);
}

fn check_sessions(first: Change, second: &[Change], nr_temporary: usize) {
    if !capability::kernel_oracle() {
        return;
    }
    for form in FORMS {
        let temporary = check_pair(first, second, form).unwrap();
        assert_eq!(temporary.len(), nr_temporary, "{form:?}: {temporary:?}");
    }
}

fn dirs(target: &mut dyn Target, paths: &[&str]) -> Done {
    paths.iter().try_for_each(|path| target.create(path.as_bytes(), NodeKind::Directory, 0o755, (0, 0)))
}

fn files(target: &mut dyn Target, paths: &[&str]) -> Done {
    paths.iter().try_for_each(|path| {
        target.create(path.as_bytes(), NodeKind::File, 0o644, (0, 0))?;
        target.write(path.as_bytes(), 0, path.repeat(2000).as_bytes())
    })
}

fn renames(target: &mut dyn Target, pairs: &[(&str, &str)]) -> Done {
    pairs.iter().try_for_each(|(from, to)| target.rename(from.as_bytes(), to.as_bytes(), RenameOp::NoReplace))
}

#[test]
fn a_chain_of_renames_needs_no_temporary_name() {
    check(
        |target| dirs(target, &["a", "b", "c"]).and_then(|()| files(target, &["a/x", "f", "g"])),
        |target| renames(target, &[("c", "d"), ("b", "c"), ("a", "b"), ("g", "a"), ("f", "g")]),
        0,
    );
}

#[test]
fn a_swap_and_a_cycle_need_one_temporary_name_each() {
    check(
        |target| dirs(target, &["a", "b"]).and_then(|()| files(target, &["a/1", "b/2", "x", "y", "z"])),
        |target| {
            renames(target, &[("a", "t"), ("b", "a"), ("t", "b")])?;
            renames(target, &[("x", "t"), ("y", "x"), ("z", "y"), ("t", "z")])
        },
        2,
    );
}

#[test]
fn a_directory_and_the_one_below_it_change_places() {
    check(
        |target| {
            dirs(target, &["a", "a/b", "a/b/c", "a/b/c/d"]).and_then(|()| files(target, &["a/1", "a/b/2", "a/b/c/d/3"]))
        },
        |target| renames(target, &[("a/b", "t"), ("a", "t/b"), ("t", "a")]),
        1,
    );
}

#[test]
fn a_deep_path_is_turned_around() {
    check(
        |target| dirs(target, &["1", "1/2", "1/2/3", "1/2/3/4", "1/2/3/4/5"]),
        |target| {
            renames(
                target,
                &[("1/2/3/4/5", "5"), ("1/2/3/4", "5/4"), ("1/2/3", "5/4/3"), ("1/2", "5/4/3/2"), ("1", "5/4/3/2/1")],
            )
        },
        0,
    );
}

#[test]
fn a_new_directory_takes_the_name_of_one_that_moves_into_it() {
    check(
        |target| dirs(target, &["a"]).and_then(|()| files(target, &["a/x"])),
        |target| {
            renames(target, &[("a", "t")])
                .and_then(|()| dirs(target, &["a"]))
                .and_then(|()| renames(target, &[("t", "a/a")]))
        },
        1,
    );
}

#[test]
fn a_directory_moves_below_a_new_one_that_has_its_name_and_gets_another_inode_first() {
    check(
        |target| files(target, &["x"]).and_then(|()| dirs(target, &["a"])),
        |target| {
            renames(target, &[("a", "t")])?;
            dirs(target, &["a", "a/c"])?;
            renames(target, &[("t", "a/c/a"), ("x", "a/x")])
        },
        1,
    );
}

#[test]
fn a_file_that_becomes_shorter_shares_its_end_with_a_copy() {
    check(
        |target| {
            files(target, &["f", "backup"])?;
            target.write(b"backup", 0, &vec![7; 10_000])?;
            target.copy_range(b"backup", 0, b"f", 0, 10_000)?;
            target.write(b"f", 10_000, &vec![8; 50_000])
        },
        |target| target.truncate(b"f", 0).and_then(|()| target.copy_range(b"backup", 0, b"f", 0, 10_000)),
        0,
    );
}

#[test]
fn a_deleted_directory_is_removed_after_its_moved_files() {
    check(
        |target| {
            dirs(target, &["old", "old/in", "old/in/er"])
                .and_then(|()| files(target, &["old/in/f", "old/in/er/g", "old/h"]))
        },
        |target| {
            renames(target, &[("old/in/f", "f"), ("old/in/er", "er")])?;
            target.unlink(b"old/h")?;
            target.rmdir(b"old/in")?;
            target.rmdir(b"old")?;
            files(target, &["old"])
        },
        0,
    );
}

#[test]
fn an_inode_number_is_used_again_by_a_directory_that_gets_the_old_names() {
    check_sessions(
        |target| {
            files(target, &["f"])?;
            dirs(target, &["p"])?;
            target.rename(b"f", b"p/f", RenameOp::NoReplace)?;
            target.link(b"p/f", b"p/g")
        },
        &[
            |target| {
                renames(target, &[("p/f", "t")])?;
                target.unlink(b"p/g")?;
                target.rmdir(b"p")
            },
            |target| {
                dirs(target, &["p"])?;
                renames(target, &[("t", "p/f")])?;
                target.link(b"p/f", b"p/g")
            },
        ],
        1,
    );
}

#[test]
fn hard_links_are_added_moved_and_removed() {
    check(
        |target| {
            dirs(target, &["d", "e"])?;
            files(target, &["a", "b", "d/c"])?;
            target.link(b"a", b"d/a")?;
            target.link(b"a", b"e/a")?;
            target.link(b"b", b"d/b")
        },
        |target| {
            target.unlink(b"a")?;
            target.link(b"d/a", b"e/z")?;
            renames(target, &[("d/b", "e/b"), ("b", "a")])?;
            target.unlink(b"d/c")?;
            renames(target, &[("d", "dd")])?;
            target.link(b"a", b"dd/new")
        },
        0,
    );
}

#[test]
fn new_files_do_not_inherit_what_the_sent_ones_do_not_have() {
    const ACL: [u8; 44] = [
        2, 0, 0, 0, 1, 0, 7, 0, 255, 255, 255, 255, 2, 0, 7, 0, 7, 0, 0, 0, 4, 0, 5, 0, 255, 255, 255, 255, 16, 0, 7,
        0, 255, 255, 255, 255, 32, 0, 5, 0, 255, 255, 255, 255,
    ];
    check(
        |target| {
            dirs(target, &["d", "e"])?;
            target.set_xattr(b"d", b"system.posix_acl_default", &ACL)?;
            target.set_xattr(b"e", b"system.posix_acl_default", &ACL)
        },
        |target| {
            target.remove_xattr(b"d", b"system.posix_acl_default")?;
            target.remove_xattr(b"e", b"system.posix_acl_default")?;
            files(target, &["d/f", "e/f"])?;
            dirs(target, &["d/sub", "d/sub/sub"])?;
            target.set_xattr(b"d", b"system.posix_acl_default", &ACL)
        },
        0,
    );
}

#[test]
fn a_hole_reaches_over_the_new_end_of_a_file() {
    check(
        |target| files(target, &["f"]).and_then(|()| target.write(b"f", 0, &vec![7; 300_000])),
        |target| {
            target
                .fallocate(b"f", 40_960, 250_000, FallocateOp::PunchHole)
                .and_then(|()| target.truncate(b"f", 100_000))
        },
        0,
    );
}

#[test]
fn a_file_grows_over_an_unaligned_end_into_an_extent_that_it_had() {
    check(
        |target| {
            files(target, &["f", "backup"])?;
            target.write(b"backup", 0, &vec![7; 12_288])?;
            target.copy_range(b"backup", 0, b"f", 0, 12_288)?;
            target.truncate(b"f", 10)
        },
        |target| target.copy_range(b"backup", 0, b"f", 0, 12_288),
        0,
    );
}

#[test]
fn capabilities_and_set_id_bits_survive_data_and_owners() {
    check(
        |target| {
            files(target, &["f", "g", "h"])?;
            target.set_xattr(b"f", b"security.capability", &CAPABILITY)?;
            target.set_xattr(b"h", b"security.capability", &CAPABILITY)?;
            target.chmod(b"g", 0o4755)
        },
        |target| {
            target.write(b"f", 100, b"data")?;
            target.set_xattr(b"f", b"security.capability", &CAPABILITY)?;
            target.chown(b"g", 5, 6)?;
            target.chmod(b"g", 0o6711)?;
            target.truncate(b"h", 10)
        },
        0,
    );
}
