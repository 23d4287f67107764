//! Receive joins commands that make, rename and describe an inode. Tests that the result is that of the single commands.

use std::sync::Arc;

use ubtrfs_device::{Device, MemoryDevice};
use ubtrfs_format::item::Timespec;
use ubtrfs_fs::{Fs, Job, MountOptions, ReceiveOptions, ReceiveReport};
use ubtrfs_stream::{StreamCommand, StreamVersion, StreamWriter};
use ubtrfs_testkit::{CAPABILITY, Compare, NodeKind, Rng, TreeEntry, compare_entries, walk_fs};
use uuid::Uuid;

/// A command that a filesystem accepts and that changes nothing. The receiver does not join a command before it with a
/// command after it.
const BETWEEN: StreamCommand<'_> = StreamCommand::UpdateExtent { path: b"", offset: 0, size: 0 };

/// Receives a stream of commands, of which some may fail. With `singly`, no commands are joined.
fn receive(commands: &[StreamCommand<'_>], singly: bool) -> (ReceiveReport, Vec<TreeEntry>) {
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(256 << 20));
    ubtrfs_mkfs::make(&*device, &ubtrfs_mkfs::MkfsOptions::default()).unwrap();
    let fs = Fs::open(vec![device], MountOptions::default()).unwrap();
    let mut writer = StreamWriter::new(Vec::new(), StreamVersion::V2).unwrap();
    writer.command(&StreamCommand::Subvol { path: b"s", uuid: Uuid::from_u128(1), ctransid: 7 }).unwrap();
    for command in commands {
        writer.command(command).unwrap();
        if singly {
            writer.command(&BETWEEN).unwrap();
        }
    }
    writer.command(&StreamCommand::End).unwrap();
    let options = ReceiveOptions { max_errors: 0, ..ReceiveOptions::default() };
    let report = fs.receive(fs.root(), &writer.into_inner()[..], &options, &Job::new(), &mut |_| {}).unwrap();
    (report, walk_fs(&fs).unwrap())
}

/// Receives the commands joined and singly, and compares. Returns the tree.
fn compare(commands: &[StreamCommand<'_>]) -> Vec<TreeEntry> {
    let (joined, mut tree) = receive(commands, false);
    let (single, mut tree_of_single) = receive(commands, true);
    assert_eq!(single.nr_commands, joined.nr_commands + commands.len() as u64);
    let errors = |report: &ReceiveReport| -> Vec<String> {
        let text = |error: &ubtrfs_fs::ReceiveError| format!("{} {}", error.path.escape_ascii(), error.problem);
        report.errors.iter().map(text).collect()
    };
    assert_eq!((joined.nr_errors, errors(&joined)), (single.nr_errors, errors(&single)));
    for entry in tree.iter_mut().chain(&mut tree_of_single) {
        // A time that no command set is the time of the test. The time of a directory depends on temporary names in it.
        if entry.mtime.0 > LAST_TIME || entry.kind == NodeKind::Directory {
            entry.mtime = (0, 0);
        }
    }
    compare_entries(&tree, &tree_of_single, Compare::ALL).unwrap();
    tree
}

/// The times that commands set are before this time.
const LAST_TIME: i64 = 1_000_000;

fn utimes(path: &[u8], sec: i64) -> StreamCommand<'_> {
    let time = |sec| Timespec { sec, nsec: 5 };
    StreamCommand::Utimes {
        path,
        atime: time(sec),
        mtime: time(sec + 1),
        ctime: time(sec + 2),
        otime: Some(time(sec + 3)),
    }
}

fn chown(path: &[u8], uid: u64) -> StreamCommand<'_> {
    StreamCommand::Chown { path, uid, gid: uid + 1 }
}

#[test]
fn joined_commands_have_the_result_of_single_ones() {
    let f: &[u8] = b"d/f";
    let make = [
        StreamCommand::Mkdir { path: b"o1-1-0", ino: 1 },
        StreamCommand::Rename { path: b"o1-1-0", to: b"d" },
        StreamCommand::Mkfile { path: b"o2-1-0", ino: 2 },
        StreamCommand::Rename { path: b"o2-1-0", to: f },
    ];
    // A chown after the chmod removes the set-user-id bit; a chmod after the chown keeps the bit.
    for (attributes, mode) in [
        ([StreamCommand::Chmod { path: f, mode: 0o4755 }, chown(f, 7), utimes(f, 10)], 0o755),
        ([chown(f, 7), StreamCommand::Chmod { path: f, mode: 0o4755 }, utimes(f, 10)], 0o4755),
        ([utimes(f, 10), utimes(f, 20), StreamCommand::Chmod { path: f, mode: 0o4755 }], 0o4755),
    ] {
        let tree = compare(&[&make[..], &attributes].concat());
        assert_eq!(tree.iter().find(|entry| entry.path == b"s/d/f").unwrap().mode, mode);
    }
    // Names of new inodes are taken: the temporary name `a` of inode 2 by inode 1, and the final name `b` of inode 3 by
    // a file that is replaced.
    let tree = compare(&[
        StreamCommand::Mkfile { path: b"a", ino: 1 },
        StreamCommand::Write { path: b"a", offset: 0, data: b"first" },
        StreamCommand::Mkfile { path: b"a", ino: 2 },
        StreamCommand::Rename { path: b"a", to: b"b" },
        StreamCommand::Mkfile { path: b"o", ino: 3 },
        StreamCommand::Rename { path: b"o", to: b"b" },
        StreamCommand::Mkfile { path: b"p", ino: 4 },
        StreamCommand::Rename { path: b"q", to: b"r" },
    ]);
    let names: Vec<_> = tree.iter().map(|entry| entry.path.clone()).collect();
    assert_eq!(names, [&b""[..], b"s", b"s/b", b"s/p"]);
}

/// `UBTRFS_SEED` and `UBTRFS_ROUNDS` choose the streams.
#[test]
fn random_commands_give_equal_trees_joined_and_singly() {
    let first = Rng::seed_or(1);
    let rounds = std::env::var("UBTRFS_ROUNDS").map_or(8, |rounds| rounds.parse().unwrap());
    for seed in first..first + rounds {
        println!("UBTRFS_SEED={seed}");
        let mut rng = Rng::new(seed);
        let names = ["a", "b", "c", "a/x", "a/y", "b/x", "b/a", "o1", "o2", "a/x/z", ""].map(str::as_bytes);
        let mut commands = Vec::new();
        while commands.len() < 400 {
            let path = *rng.pick(&names);
            let other = *rng.pick(&names);
            let number = rng.below(1000);
            let make = match rng.below(6) {
                0 | 1 => StreamCommand::Mkdir { path, ino: 1 },
                2 | 3 => StreamCommand::Mkfile { path, ino: 1 },
                4 => StreamCommand::Symlink { path, ino: 1, target: b"b/x" },
                _ => StreamCommand::Mknod { path, ino: 1, rdev: number, mode: 0o020_644 | (number & 1) << 40 },
            };
            let rename = StreamCommand::Rename { path, to: other };
            let chmod = StreamCommand::Chmod { path, mode: rng.below(0o10000) };
            let wide_uid = if rng.one_in(10) { 1 << 40 } else { number };
            let next = match rng.below(8) {
                0..=2 => vec![make, rename],
                3 => vec![make, StreamCommand::Rename { path: other, to: path }],
                4 => vec![chown(path, wide_uid), chmod, utimes(path, 100 + number as i64)],
                5 => vec![chmod, chown(path, number), utimes(other, 9), utimes(path, 50), chmod_of(other)],
                6 => vec![
                    StreamCommand::SetXattr { path, name: b"security.capability", data: &CAPABILITY },
                    chown(path, number),
                    chmod,
                ],
                _ => vec![match number % 4 {
                    0 => StreamCommand::Unlink { path },
                    1 => StreamCommand::Rmdir { path },
                    2 => StreamCommand::Write { path, offset: number, data: b"data" },
                    _ => rename,
                }],
            };
            commands.extend(next);
        }
        assert!(compare(&commands).len() > 2, "seed {seed}");
    }
}

fn chmod_of(path: &[u8]) -> StreamCommand<'_> {
    StreamCommand::Chmod { path, mode: 0o6711 }
}
