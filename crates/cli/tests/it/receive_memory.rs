//! Tests the memory that a receive takes, with streams of many fragments, many small files, large commands, or long
//! paths.
//!
//! Method: streams are generated into the input of the built program, which runs with `--memory`, and the highest
//! resident memory of the process is read. This memory must not exceed the limit, or [`LEAST_MIB`] if the limit is
//! smaller.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::{ChildStdin, Stdio};
use std::time::Duration;

use ubtrfs_stream::{StreamCommand, StreamVersion, StreamWriter};
use uuid::Uuid;

use crate::common::{command, ok, text, ubtrfs};

/// Memory that a receive may take regardless of the limit: the fixed share of the filesystem's memory budget (120 MiB),
/// and a fifth more, because what the allocator keeps depends on the order in which threads run. A receive of one empty
/// file takes 22 MiB.
const LEAST_MIB: u64 = 144;

type Out = StreamWriter<BufWriter<ChildStdin>>;

/// Peak resident memory, in MiB, of a receive of a subvolume with the commands that `fill` writes.
fn peak_mib(dir: &Path, limit_mib: u64, options: &[&str], fill: &mut (dyn FnMut(&mut Out) + Send)) -> u64 {
    let image = dir.join("image");
    let _ = fs::remove_file(&image);
    ok(ubtrfs(["mkfs", "-q", "-b", "32G", &text(&image)]));
    let memory = format!("{limit_mib}M");
    let place = text(&image);
    let args = ["receive", "-q", "--memory", &memory].into_iter().chain(options.iter().copied()).chain([&*place]);
    let mut child = command(args).stdin(Stdio::piped()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut out = StreamWriter::new(BufWriter::new(child.stdin.take().unwrap()), StreamVersion::V2).unwrap();
    let peak = std::thread::scope(|scope| {
        scope.spawn(move || {
            out.command(&StreamCommand::Subvol { path: b"s", uuid: Uuid::from_u128(1), ctransid: 7 }).unwrap();
            fill(&mut out);
            out.command(&StreamCommand::End).unwrap();
            out.into_inner().flush().unwrap();
        });
        let mut peak = 0;
        while child.try_wait().unwrap().is_none() {
            let text = fs::read_to_string(&status).unwrap_or_default();
            let found = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
            peak = peak.max(found.split_whitespace().next().and_then(|kib| kib.parse().ok()).unwrap_or(0));
            std::thread::sleep(Duration::from_millis(5));
        }
        peak >> 10
    });
    assert!(child.wait().unwrap().success());
    ok(ubtrfs(["check", &place]));
    peak
}

fn path_of(dir: &[u8], name: &str) -> Vec<u8> {
    [dir, name.as_bytes()].join(&b'/')
}

/// Makes directories inside each other, and returns the path of the innermost one. The path has `len` bytes, or up to
/// 249 bytes fewer.
fn deep_dir(out: &mut Out, len: usize) -> Vec<u8> {
    let mut path = b"d".to_vec();
    out.command(&StreamCommand::Mkdir { path: &path, ino: 0 }).unwrap();
    while path.len() + 250 <= len {
        path = path_of(&path, &"d".repeat(249));
        out.command(&StreamCommand::Mkdir { path: &path, ino: 0 }).unwrap();
    }
    path
}

fn many_files(out: &mut Out, count: u32) {
    let time = ubtrfs_format::item::Timespec { sec: 1000, nsec: 0 };
    for number in 0..count {
        if number % 1000 == 0 {
            out.command(&StreamCommand::Mkdir { path: format!("d{}", number / 1000).as_bytes(), ino: 0 }).unwrap();
        }
        let path = format!("d{}/{number:0>100}", number / 1000);
        let path = path.as_bytes();
        out.command(&StreamCommand::Mkfile { path, ino: 0 }).unwrap();
        out.command(&StreamCommand::Write { path, offset: 0, data: &[7; 100] }).unwrap();
        out.command(&StreamCommand::Chown { path, uid: 1, gid: 1 }).unwrap();
        out.command(&StreamCommand::Chmod { path, mode: 0o644 }).unwrap();
        out.command(&StreamCommand::Utimes { path, atime: time, mtime: time, ctime: time, otime: None }).unwrap();
    }
}

/// Writes blocks of one file at distant offsets.
fn fragments(out: &mut Out, count: u64) {
    let block = std::array::from_fn::<u8, 4096, _>(|at| (at * 31) as u8);
    out.command(&StreamCommand::Mkfile { path: b"f", ino: 0 }).unwrap();
    for number in 0..count {
        let offset = (number * 7919 % 2_000_003) * 8192;
        out.command(&StreamCommand::Write { path: b"f", offset, data: &block }).unwrap();
    }
}

/// A name, options, and a function that writes commands.
type Case<'c> = (&'c str, &'c [&'c str], &'c mut (dyn FnMut(&mut Out) + Send));

fn check_peaks(limit_mib: u64, cases: &mut [Case<'_>]) {
    let dir = tempfile::tempdir().unwrap();
    let mut over = Vec::new();
    for (name, options, fill) in cases {
        let peak = peak_mib(dir.path(), limit_mib, options, fill);
        println!("{name} {options:?}: {peak} MiB of {limit_mib}");
        if peak > limit_mib.max(LEAST_MIB) {
            over.push(format!("{name} {options:?}: {peak} MiB of {limit_mib}"));
        }
    }
    assert!(over.is_empty(), "{over:?}");
}

#[test]
fn no_stream_takes_more_memory_than_the_limit() {
    check_peaks(
        256,
        &mut [
            ("fragments", &[], &mut |out| fragments(out, 200_000)),
            ("small files", &["--verify"], &mut |out| many_files(out, 200_000)),
        ],
    );
}

#[test]
fn a_small_limit_keeps_every_receive_near_the_least_memory() {
    let mut data = vec![0; 15 << 20];
    data.iter_mut().zip(0_u64..).for_each(|(byte, at)| *byte = (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8);
    check_peaks(
        64,
        &mut [
            ("one file", &[], &mut |out| out.command(&StreamCommand::Mkfile { path: b"f", ino: 0 }).unwrap()),
            ("large commands", &[], &mut |out| {
                out.command(&StreamCommand::Mkfile { path: b"f", ino: 0 }).unwrap();
                for number in 0..40 {
                    let offset = number * data.len() as u64;
                    out.command(&StreamCommand::Write { path: b"f", offset, data: &data }).unwrap();
                }
            }),
            ("fragments", &[], &mut |out| fragments(out, 200_000)),
            ("small files", &[], &mut |out| many_files(out, 200_000)),
            ("long paths", &[], &mut |out| {
                let dir = deep_dir(out, 3800);
                for number in 0..25_000 {
                    let path = path_of(&dir, &format!("{number:0>200}"));
                    out.command(&StreamCommand::Mkdir { path: &path, ino: 0 }).unwrap();
                    out.command(&StreamCommand::Mkfile { path: &path_of(&path, "f"), ino: 0 }).unwrap();
                }
            }),
            ("small files", &["--verify"], &mut |out| many_files(out, 200_000)),
            ("fragments", &["--verify"], &mut |out| {
                out.command(&StreamCommand::Mkfile { path: b"f", ino: 0 }).unwrap();
                for number in 0..400_000 {
                    let offset = number * 512;
                    out.command(&StreamCommand::Write { path: b"f", offset, data: &data[..512] }).unwrap();
                }
            }),
        ],
    );
}
