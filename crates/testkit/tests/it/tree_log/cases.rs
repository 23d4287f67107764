//! The cases: operations between a commit and a crash, and the expected paths afterwards.

use ubtrfs_testkit::{FallocateOp, NodeKind, RenameOp, Target};

/// One scripted case. Everything is committed before `act` runs, and `act` ends with fsyncs.
pub(crate) struct Case {
    pub name: &'static str,
    /// Mount options.
    pub options: &'static str,
    pub before: fn(&mut dyn Target),
    pub act: fn(&mut dyn Target),
    /// Paths that must be as they were before the crash.
    pub kept: &'static [&'static str],
    /// Paths that must not exist after the crash.
    pub gone: &'static [&'static str],
}

const NOTHING: Case = Case { name: "", options: "", before: |_| (), act: |_| (), kept: &[], gone: &[] };

fn file(to: &mut dyn Target, path: &str, len: usize, byte: u8) {
    to.create(path.as_bytes(), NodeKind::File, 0o644, (0, 0)).unwrap();
    if len > 0 {
        write(to, path, 0, len, byte);
    }
}

fn write(to: &mut dyn Target, path: &str, at: u64, len: usize, byte: u8) {
    // Each sector has different bytes, so that exchanged sectors are noticed.
    let data: Vec<u8> = (0..len).map(|n| byte ^ (n / 512) as u8).collect();
    to.write(path.as_bytes(), at, &data).unwrap();
}

fn dir(to: &mut dyn Target, path: &str) {
    to.create(path.as_bytes(), NodeKind::Directory, 0o755, (0, 0)).unwrap();
}

fn fsync(to: &mut dyn Target, path: &str) {
    to.fsync(path.as_bytes()).unwrap();
}

fn rename(to: &mut dyn Target, old: &str, new: &str) {
    to.rename(old.as_bytes(), new.as_bytes(), RenameOp::Replace).unwrap();
}

fn unlink(to: &mut dyn Target, path: &str) {
    to.unlink(path.as_bytes()).unwrap();
}

fn link(to: &mut dyn Target, old: &str, new: &str) {
    to.link(old.as_bytes(), new.as_bytes()).unwrap();
}

fn fallocate(to: &mut dyn Target, path: &str, at: u64, len: u64, op: FallocateOp) {
    to.fallocate(path.as_bytes(), at, len, op).unwrap();
}

fn a_file(to: &mut dyn Target) {
    dir(to, "d");
    file(to, "d/f", 200_000, 1);
}

fn two_files(to: &mut dyn Target) {
    a_file(to);
    file(to, "d/g", 30_000, 2);
}

pub(crate) const CASES: &[Case] = &[
    Case {
        name: "append",
        before: a_file,
        act: |to| {
            write(to, "d/f", 200_000, 5000, 3);
            fsync(to, "d/f");
        },
        kept: &["d/f"],
        ..NOTHING
    },
    Case {
        name: "append many times",
        before: a_file,
        act: |to| {
            for n in 0..40 {
                write(to, "d/f", 200_000 + n * 4096, 4096, n as u8);
                fsync(to, "d/f");
            }
        },
        kept: &["d/f"],
        ..NOTHING
    },
    Case {
        name: "overwrite",
        before: a_file,
        act: |to| {
            write(to, "d/f", 8192, 4096, 4);
            fsync(to, "d/f");
            write(to, "d/f", 10_000, 60_000, 5);
            fsync(to, "d/f");
            write(to, "d/f", 0, 200_000, 6);
            write(to, "d/f", 4096, 4096, 7);
            fsync(to, "d/f");
        },
        kept: &["d/f"],
        ..NOTHING
    },
    Case {
        name: "truncate down",
        before: a_file,
        act: |to| {
            to.truncate(b"d/f", 10_001).unwrap();
            fsync(to, "d/f");
        },
        kept: &["d/f"],
        ..NOTHING
    },
    Case {
        name: "truncate down and up",
        before: a_file,
        act: |to| {
            to.truncate(b"d/f", 4096).unwrap();
            fsync(to, "d/f");
            to.truncate(b"d/f", 150_000).unwrap();
            write(to, "d/f", 100_000, 100, 3);
            fsync(to, "d/f");
        },
        kept: &["d/f"],
        ..NOTHING
    },
    Case {
        name: "truncate to nothing and write",
        before: a_file,
        act: |to| {
            to.truncate(b"d/f", 0).unwrap();
            write(to, "d/f", 0, 10, 3);
            fsync(to, "d/f");
            write(to, "d/f", 10, 10_000, 3);
            fsync(to, "d/f");
        },
        kept: &["d/f"],
        ..NOTHING
    },
    Case {
        name: "punch",
        before: a_file,
        act: |to| {
            fallocate(to, "d/f", 20_000, 90_000, FallocateOp::PunchHole);
            fsync(to, "d/f");
            write(to, "d/f", 50_000, 100, 3);
            fsync(to, "d/f");
            fallocate(to, "d/f", 0, 8192, FallocateOp::PunchHole);
            fsync(to, "d/f");
        },
        kept: &["d/f"],
        ..NOTHING
    },
    Case {
        name: "preallocate",
        before: a_file,
        act: |to| {
            fallocate(to, "d/f", 300_000, 100_000, FallocateOp::Allocate);
            fsync(to, "d/f");
            write(to, "d/f", 320_000, 5000, 9);
            fsync(to, "d/f");
        },
        kept: &["d/f"],
        ..NOTHING
    },
    Case {
        name: "write into preallocated",
        before: |to| {
            a_file(to);
            file(to, "d/p", 0, 0);
            fallocate(to, "d/p", 0, 1 << 20, FallocateOp::Allocate);
            file(to, "d/k", 6000, 7);
            fallocate(to, "d/k", 0, 1 << 20, FallocateOp::KeepSize);
        },
        act: |to| {
            write(to, "d/p", 100_000, 9000, 5);
            fsync(to, "d/p");
            write(to, "d/k", 6000, 6000, 8);
            fsync(to, "d/k");
            write(to, "d/k", 12_000, 6000, 9);
            fsync(to, "d/k");
        },
        kept: &["d/p", "d/k"],
        ..NOTHING
    },
    Case {
        name: "new file",
        before: a_file,
        act: |to| {
            file(to, "d/n", 9000, 2);
            fsync(to, "d/n");
        },
        kept: &["d/n", "d/f"],
        ..NOTHING
    },
    Case {
        name: "new files, one inline, one empty, one sparse",
        before: a_file,
        act: |to| {
            file(to, "d/small", 100, 2);
            fsync(to, "d/small");
            file(to, "d/empty", 0, 0);
            fsync(to, "d/empty");
            file(to, "d/sparse", 100, 2);
            write(to, "d/sparse", 5 << 30, 70_000, 1);
            write(to, "d/sparse", 1 << 20, 100, 1);
            to.truncate(b"d/sparse", 6 << 30).unwrap();
            fsync(to, "d/sparse");
        },
        kept: &["d/small", "d/empty", "d/sparse"],
        ..NOTHING
    },
    Case {
        name: "inline to regular",
        before: |to| {
            dir(to, "d");
            file(to, "d/f", 500, 1);
        },
        act: |to| {
            write(to, "d/f", 500, 200, 3);
            fsync(to, "d/f");
            write(to, "d/f", 700, 20_000, 4);
            fsync(to, "d/f");
        },
        kept: &["d/f"],
        ..NOTHING
    },
    Case {
        name: "new chain of directories",
        before: a_file,
        act: |to| {
            dir(to, "d/a");
            dir(to, "d/a/b");
            dir(to, "d/a/b/c");
            file(to, "d/a/b/c/f", 5000, 4);
            file(to, "d/a/other", 5000, 4);
            fsync(to, "d/a/b/c/f");
        },
        kept: &["d/a/b/c/f"],
        ..NOTHING
    },
    Case {
        name: "attributes",
        before: |to| {
            a_file(to);
            to.set_xattr(b"d/f", b"user.one", b"1").unwrap();
            to.set_xattr(b"d/f", b"user.two", b"2").unwrap();
            to.set_xattr(b"d", b"user.dir", b"2").unwrap();
        },
        act: |to| {
            to.set_xattr(b"d/f", b"user.three", &[7; 300]).unwrap();
            to.remove_xattr(b"d/f", b"user.two").unwrap();
            to.chmod(b"d/f", 0o600).unwrap();
            to.chown(b"d/f", 12, 13).unwrap();
            to.set_mtime(b"d/f", (1_000_000_000, 5)).unwrap();
            fsync(to, "d/f");
            to.set_xattr(b"d/f", b"user.one", b"one").unwrap();
            to.remove_xattr(b"d/f", b"user.three").unwrap();
            fsync(to, "d/f");
            to.set_xattr(b"d", b"user.dir", b"3").unwrap();
            fsync(to, "d");
        },
        kept: &["d/f", "d"],
        ..NOTHING
    },
    Case {
        name: "rename a new file over an old one and sync the file",
        before: two_files,
        act: |to| {
            file(to, "d/tmp", 9000, 9);
            fsync(to, "d/tmp");
            rename(to, "d/tmp", "d/f");
            fsync(to, "d/f");
        },
        kept: &["d/f", "d/g"],
        gone: &["d/tmp"],
        ..NOTHING
    },
    Case {
        name: "rename a new file over an old one and sync the directory",
        before: two_files,
        act: |to| {
            file(to, "d/tmp", 9000, 9);
            fsync(to, "d/tmp");
            rename(to, "d/tmp", "d/f");
            fsync(to, "d");
        },
        kept: &["d/f", "d/g", "d"],
        gone: &["d/tmp"],
        ..NOTHING
    },
    Case {
        name: "rename in one directory",
        before: two_files,
        act: |to| {
            rename(to, "d/f", "d/h");
            write(to, "d/h", 0, 100, 4);
            fsync(to, "d/h");
        },
        kept: &["d/h", "d/g"],
        gone: &["d/f"],
        ..NOTHING
    },
    Case {
        name: "rename to another directory",
        before: |to| {
            two_files(to);
            dir(to, "e");
        },
        act: |to| {
            rename(to, "d/f", "e/f");
            fsync(to, "e/f");
        },
        kept: &["e/f", "d/g"],
        gone: &["d/f"],
        ..NOTHING
    },
    Case {
        name: "rename to another directory and sync that",
        before: |to| {
            two_files(to);
            dir(to, "e");
        },
        act: |to| {
            rename(to, "d/f", "e/f");
            fsync(to, "e");
        },
        kept: &["e/f", "d/g"],
        gone: &["d/f"],
        ..NOTHING
    },
    Case {
        name: "rename to another directory and sync the old one",
        before: |to| {
            two_files(to);
            dir(to, "e");
        },
        act: |to| {
            rename(to, "d/f", "e/f");
            fsync(to, "d");
        },
        kept: &["e/f", "d/g"],
        gone: &["d/f"],
        ..NOTHING
    },
    Case {
        name: "exchange",
        before: two_files,
        act: |to| {
            to.rename(b"d/f", b"d/g", RenameOp::Exchange).unwrap();
            fsync(to, "d/f");
        },
        kept: &["d/f", "d/g"],
        ..NOTHING
    },
    Case {
        name: "a name taken over",
        before: two_files,
        act: |to| {
            rename(to, "d/f", "d/old");
            file(to, "d/f", 5000, 8);
            fsync(to, "d/f");
        },
        kept: &["d/f", "d/old", "d/g"],
        ..NOTHING
    },
    Case {
        name: "a name taken over from an unlinked file",
        before: two_files,
        act: |to| {
            unlink(to, "d/f");
            file(to, "d/f", 5000, 8);
            fsync(to, "d/f");
        },
        kept: &["d/f", "d/g"],
        ..NOTHING
    },
    Case {
        name: "link",
        before: two_files,
        act: |to| {
            link(to, "d/f", "d/l");
            link(to, "d/f", "l");
            fsync(to, "d/f");
        },
        kept: &["d/f", "d/l", "l", "d/g"],
        ..NOTHING
    },
    Case {
        name: "link a new file, unlink a name",
        before: two_files,
        act: |to| {
            file(to, "d/n", 3000, 1);
            link(to, "d/n", "d/m");
            fsync(to, "d/n");
            unlink(to, "d/n");
            fsync(to, "d/m");
        },
        kept: &["d/m", "d/g"],
        gone: &["d/n"],
        ..NOTHING
    },
    Case {
        name: "unlink one of two names",
        before: |to| {
            two_files(to);
            link(to, "d/f", "d/l");
            link(to, "d/f", "l");
        },
        act: |to| {
            unlink(to, "d/f");
            fsync(to, "d/l");
            unlink(to, "l");
            fsync(to, "d/l");
        },
        kept: &["d/l", "d/g"],
        gone: &["d/f", "l"],
        ..NOTHING
    },
    Case {
        name: "unlink and sync the directory",
        before: |to| {
            two_files(to);
            file(to, "d/h", 10, 1);
        },
        act: |to| {
            unlink(to, "d/f");
            unlink(to, "d/h");
            fsync(to, "d");
        },
        kept: &["d", "d/g"],
        gone: &["d/f", "d/h"],
        ..NOTHING
    },
    Case {
        name: "a directory with new entries of all kinds",
        before: two_files,
        act: |to| {
            file(to, "d/n1", 3000, 1);
            file(to, "d/n2", 0, 1);
            to.symlink(b"d/s", b"target").unwrap();
            to.create(b"d/p", NodeKind::Fifo, 0o600, (0, 0)).unwrap();
            to.create(b"d/c", NodeKind::CharDevice, 0o600, (1, 3)).unwrap();
            dir(to, "d/sub");
            file(to, "d/sub/x", 0, 1);
            link(to, "d/g", "d/g2");
            unlink(to, "d/f");
            fsync(to, "d");
        },
        kept: &["d", "d/s", "d/p", "d/c", "d/sub", "d/g", "d/g2", "d/n2"],
        gone: &["d/f"],
        ..NOTHING
    },
    Case {
        name: "a directory synced again and again",
        before: two_files,
        act: |to| {
            for n in 0..12 {
                file(to, &format!("d/n{n}"), 0, 1);
                if n % 3 == 2 {
                    unlink(to, &format!("d/n{}", n - 1));
                }
                fsync(to, "d");
            }
            rename(to, "d/n0", "d/z");
            fsync(to, "d/z");
        },
        kept: &["d/z", "d/n2", "d/n11"],
        gone: &["d/n0", "d/n1", "d/n4"],
        ..NOTHING
    },
    Case {
        name: "remove a directory",
        before: |to| {
            two_files(to);
            dir(to, "d/sub");
            file(to, "d/sub/f", 10, 1);
        },
        act: |to| {
            unlink(to, "d/sub/f");
            to.rmdir(b"d/sub").unwrap();
            fsync(to, "d");
        },
        kept: &["d"],
        gone: &["d/sub"],
        ..NOTHING
    },
    Case {
        name: "move a file out of a directory and remove that",
        before: |to| {
            two_files(to);
            dir(to, "e");
            dir(to, "d/sub");
            file(to, "d/sub/f", 10_000, 1);
        },
        act: |to| {
            rename(to, "d/sub/f", "e/f");
            to.rmdir(b"d/sub").unwrap();
            fsync(to, "d");
        },
        kept: &["e/f"],
        gone: &["d/sub"],
        ..NOTHING
    },
    Case {
        name: "rename a directory",
        before: |to| {
            two_files(to);
            dir(to, "e");
        },
        act: |to| {
            rename(to, "d", "e/d");
            file(to, "e/d/n", 10, 2);
            fsync(to, "e/d/n");
            fsync(to, "e");
        },
        kept: &["e/d/n", "e/d/f"],
        gone: &["d"],
        ..NOTHING
    },
    Case {
        name: "a file that was synced is removed, its name used again",
        before: a_file,
        act: |to| {
            file(to, "d/n", 9000, 1);
            fsync(to, "d/n");
            unlink(to, "d/n");
            file(to, "d/n", 100, 2);
            fsync(to, "d/n");
        },
        kept: &["d/n", "d/f"],
        ..NOTHING
    },
    Case {
        name: "copy a range",
        before: two_files,
        act: |to| {
            to.copy_range(b"d/f", 4096, b"d/g", 0, 65_536).unwrap();
            file(to, "d/n", 70_000, 5);
            to.copy_range(b"d/n", 0, b"d/g", 131_072, 65_536).unwrap();
            fsync(to, "d/g");
        },
        kept: &["d/g"],
        ..NOTHING
    },
    Case {
        name: "parts of a new extent in several files",
        before: two_files,
        act: |to| {
            file(to, "d/n", 100_000, 5);
            fsync(to, "d/n");
            for (name, at, len) in [("d/a", 0, 65_536), ("d/b", 0, 4096), ("d/c", 8192, 61_440), ("d/e", 4096, 8192)] {
                file(to, name, 0, 0);
                to.copy_range(b"d/n", at, name.as_bytes(), 0, len).unwrap();
                fsync(to, name);
            }
        },
        kept: &["d/n", "d/a", "d/b", "d/c", "d/e"],
        ..NOTHING
    },
    Case {
        name: "compressed",
        options: "compress=zstd",
        before: |to| {
            dir(to, "d");
            file(to, "d/f", 400_000, 1);
        },
        act: |to| {
            write(to, "d/f", 100_000, 50_000, 3);
            fsync(to, "d/f");
            file(to, "d/n", 300_000, 3);
            file(to, "d/tiny", 1500, 3);
            fsync(to, "d/n");
            fsync(to, "d/tiny");
            write(to, "d/n", 300_000, 4096, 3);
            fsync(to, "d/n");
            fallocate(to, "d/n", 8192, 8192, FallocateOp::PunchHole);
            fsync(to, "d/n");
        },
        kept: &["d/f", "d/n", "d/tiny"],
        ..NOTHING
    },
    Case {
        name: "without checksums",
        options: "nodatasum",
        before: a_file,
        act: |to| {
            write(to, "d/f", 0, 4096, 3);
            fsync(to, "d/f");
            file(to, "d/n", 30_000, 3);
            fsync(to, "d/n");
        },
        kept: &["d/f", "d/n"],
        ..NOTHING
    },
    Case {
        name: "in place",
        options: "nodatacow",
        before: a_file,
        act: |to| {
            write(to, "d/f", 0, 9000, 3);
            fsync(to, "d/f");
            file(to, "d/n", 30_000, 3);
            fsync(to, "d/n");
            write(to, "d/n", 4096, 4096, 4);
            fsync(to, "d/n");
        },
        kept: &["d/f", "d/n"],
        ..NOTHING
    },
    Case {
        name: "many files",
        before: a_file,
        act: |to| {
            for n in 0..150 {
                let path = format!("d/a file with a rather long name to fill leaves of the log {n}");
                file(to, &path, 5000 + n, n as u8);
                fsync(to, &path);
            }
        },
        kept: &[
            "d/a file with a rather long name to fill leaves of the log 0",
            "d/a file with a rather long name to fill leaves of the log 77",
            "d/a file with a rather long name to fill leaves of the log 149",
        ],
        ..NOTHING
    },
];
